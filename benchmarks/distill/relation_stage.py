"""Does the relation stage earn its time? The same student, with and without it, given equal seconds of training.

    python benchmarks/distill/relation_stage.py --teacher T --task K --data DIR [--corpus F] --out FOLDER

Seconds a step are measured first; `--share` of the time of `--student-epochs` goes to MiniLMv2 relations, the rest to
soft labels and labels, against all of it to soft labels and labels. Both start alike. The answer is a JSON document with
validation and test scores and the paired bootstrap of their difference.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from compress.examples import check_task
from compress.scores import difference, gold_of, score
from compress.tasks import predictions, row_logits
from stillroom import training
from stillroom.ground import prepare, same_bits
from stillroom.plan import full_plan, seconds_a_step
from stillroom.recipe import Recipe
from stillroom.show import say
from stillroom.stages import fingerprint


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
    ground = prepare(recipe)
    same_bits(ground.recipe.threads)
    rates, _ = seconds_a_step(ground)
    plan = full_plan(ground)
    budget_s = plan.student_steps * rates["student"]
    relation_steps = max(1, round(given.share * budget_s / rates["relations"]))
    rest = round((1 - given.share) * plan.student_steps)
    say(
        f"{budget_s:.0f} s each: {plan.student_steps} task steps, or {relation_steps} relation steps and {rest} task steps"
    )

    def stage(name: str, make: object) -> Path:
        return ground.work.stage(name, fingerprint(name, dataclasses.asdict(recipe), relation_steps), make)  # type: ignore[arg-type]

    teacher = stage("teacher", lambda f: training.make_teacher(f, ground, plan.teacher_steps))
    soft = stage("soft-labels", lambda f: training.make_soft_labels(f, ground, teacher))
    start = stage("start", lambda f: training.make_start(f, ground, teacher))
    related = stage("relations", lambda f: training.make_relations(f, ground, teacher, start, relation_steps))
    arms = {
        "task only": stage("task-only", lambda f: training.make_student(f, ground, start, soft, plan.student_steps)),
        "relations, then task": stage("both", lambda f: training.make_student(f, ground, related, soft, rest)),
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
        model = training.load_stage(folder, ground)
        said[name] = predictions(ground.test, row_logits(model, ground.test))
        gold = [gold_of(example, task) for example in ground.splits.test]
        validation = training.read_lineage(folder)["validation"]
        document[name] = {
            "test": dataclasses.asdict(score(gold, said[name])),
            "validation": max(value for _, value in validation),
        }
    a, b = said.values()
    document["task only less relations"] = dataclasses.asdict(difference(gold, a, b))
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
