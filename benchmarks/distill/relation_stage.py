"""Measure whether relations are worth their time: the same student with and without MiniLMv2 first, for equal seconds of training.

    python benchmarks/distill/relation_stage.py --teacher T --task K --data DIR [--corpus F] --out FOLDER

It first measures seconds per step. One student spends `--share` of the time of `--student-epochs` on MiniLMv2 relations of the
teacher as given, on the task's text and the corpus, and the rest on soft labels and labels, as `run --method minilmv2` trains.
The other spends all of it on soft labels and labels, as `run --method soft-labels` does. Prints a JSON document with validation
and test scores and the paired bootstrap of their difference.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from compress.evaluation.predictions import row_logits
from compress.runs import task_stages
from compress.runs.hardware import same_bits
from compress.runs.lineage import read_lineage
from compress.runs.method_stages import run_method
from compress.runs.method_trainings import method_inputs
from compress.runs.soft_labels import SoftLabels, make_soft_labels
from compress.runs.stages import fingerprint
from compress.tasks import task_named
from stillroom.console import say
from stillroom.inputs.preflight import prepare
from stillroom.inputs.recipe import Recipe
from stillroom.verbs.run.time_budget import full_plan, timed_rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("teacher", "task", "data", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--student", default="3x384")
    parser.add_argument("--corpus", action="append", default=[])
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--student-epochs", type=int, default=5)
    parser.add_argument("--augment", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soft-weight", type=float, default=0.9)
    given = parser.parse_args()
    recipe = Recipe(
        teacher=given.teacher, task=given.task, data=given.data, out=given.out, student=given.student, seed=given.seed,
        corpus=tuple(given.corpus), method="minilmv2", student_epochs=given.student_epochs, augment=given.augment,
        threads=given.threads,
    )  # fmt: skip
    settings = dataclasses.asdict(recipe)
    inputs = prepare(recipe)
    same_bits(inputs.recipe.threads)
    rates = timed_rates(inputs)
    plan = full_plan(inputs)
    budget_s = plan.student_steps * rates["student step"]
    tokens = given.share * budget_s / rates["token"]
    rest = round((1 - given.share) * plan.student_steps)
    say(
        f"{budget_s:.0f} s each: {plan.student_steps} task steps, or {tokens:,.0f} tokens of relations and {rest} task steps"
    )

    def stage(name: str, make: Callable[[Path], None]) -> Path:
        return inputs.workdir.stage(name, fingerprint(name, settings, tokens), make)

    teacher = stage("teacher", lambda f: task_stages.make_teacher(f, inputs, plan.teacher_steps))
    labels = stage("soft-labels", lambda f: make_soft_labels(f, inputs, teacher))
    soft = SoftLabels(labels, given.soft_weight)
    start = stage("start", lambda f: task_stages.make_start(f, inputs, teacher))
    taught = method_inputs(inputs, teacher, tokens)
    links = inputs.chain.links(tokens, 0.0)
    *_, related = run_method(inputs.workdir, fingerprint("relations", settings, tokens), links, taught)
    arms = {
        "task only": stage(
            "task-only", lambda f: task_stages.make_distilled(f, inputs, start, soft, plan.student_steps)
        ),
        "relations, then task": stage(
            "both", lambda f: task_stages.make_distilled(f, inputs, related, soft, rest, taught)
        ),
    }
    task = task_named(recipe.task)
    document: dict[str, object] = {
        "seconds": budget_s,
        "rates": rates,
        "relation_tokens": round(tokens),
        "task_steps": plan.student_steps,
    }
    said = {}
    for name, folder in arms.items():
        model = task_stages.load_stage(folder, inputs)
        said[name] = inputs.test.task.predictions(inputs.test, row_logits(model, inputs.test))
        gold = [task.gold_of(example) for example in inputs.splits.test]
        validation = read_lineage(folder)["validation"]
        document[name] = {
            "test": dataclasses.asdict(task.metric.score(gold, said[name])),
            "validation": max(value for _, value in validation),
        }
    a, b = said.values()
    document["task only less relations"] = dataclasses.asdict(task.metric.difference(gold, a, b))
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
