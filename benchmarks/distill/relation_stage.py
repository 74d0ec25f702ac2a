"""Measure whether the relation stage is worth its time: the same student with and without it, for equal seconds of training.

    python benchmarks/distill/relation_stage.py --teacher T --task K --data DIR [--corpus F] --out FOLDER

It first measures seconds per step. One student spends `--share` of the time of `--student-epochs` on MiniLMv2 relations and the
rest on soft labels and labels; the other spends all of it on soft labels and labels. Both start from the same weights. Prints a JSON
document with validation and test scores and the paired bootstrap of their difference.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from compress.data.examples import check_task
from compress.engine import task_stages
from compress.engine.fingerprints import fingerprint
from compress.engine.hardware import same_bits
from compress.evaluation.metrics import difference, gold_of, score
from compress.evaluation.predictions import predictions, row_logits
from stillroom.commands.run.time_budget import full_plan, seconds_a_step
from stillroom.console import say
from stillroom.inputs.preflight import prepare
from stillroom.inputs.recipe import Recipe


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
    given = parser.parse_args()
    recipe = Recipe(
        teacher=given.teacher, task=given.task, data=given.data, out=given.out, student=given.student, seed=given.seed,
        corpus=tuple(given.corpus), relation_epochs=1.0, student_epochs=given.student_epochs, augment=given.augment,
        threads=given.threads,
    )  # fmt: skip
    inputs = prepare(recipe)
    same_bits(inputs.recipe.threads)
    rates, _ = seconds_a_step(inputs)
    plan = full_plan(inputs)
    budget_s = plan.student_steps * rates["student"]
    relation_steps = max(1, round(given.share * budget_s / rates["relations"]))
    rest = round((1 - given.share) * plan.student_steps)
    say(
        f"{budget_s:.0f} s each: {plan.student_steps} task steps, or {relation_steps} relation steps and {rest} task steps"
    )

    def stage(name: str, make: object) -> Path:
        return inputs.workdir.stage(name, fingerprint(name, dataclasses.asdict(recipe), relation_steps), make)  # type: ignore[arg-type]

    teacher = stage("teacher", lambda f: task_stages.make_teacher(f, inputs, plan.teacher_steps))
    soft = stage("soft-labels", lambda f: task_stages.make_soft_labels(f, inputs, teacher))
    start = stage("start", lambda f: task_stages.make_start(f, inputs, teacher))
    related = stage("relations", lambda f: task_stages.make_relations(f, inputs, teacher, start, relation_steps))
    arms = {
        "task only": stage("task-only", lambda f: task_stages.make_student(f, inputs, start, soft, plan.student_steps)),
        "relations, then task": stage("both", lambda f: task_stages.make_student(f, inputs, related, soft, rest)),
    }
    task = check_task(recipe.task)
    document: dict[str, object] = {
        "seconds": budget_s,
        "rates": rates,
        "relation_steps": relation_steps,
        "task_steps": plan.student_steps,
    }
    said = {}
    for name, folder in arms.items():
        model = task_stages.load_stage(folder, inputs)
        said[name] = predictions(inputs.test, row_logits(model, inputs.test))
        gold = [gold_of(example, task) for example in inputs.splits.test]
        validation = task_stages.read_lineage(folder)["validation"]
        document[name] = {
            "test": dataclasses.asdict(score(gold, said[name])),
            "validation": max(value for _, value in validation),
        }
    a, b = said.values()
    document["task only less relations"] = dataclasses.asdict(difference(gold, a, b))
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
