"""How far the latency model errs on students that it never saw, and whether the students that it chooses meet their budgets.

    python benchmarks/latency/latency_model.py --tokens 64 --threads 1 --out latency_model.json

The teacher has BERT-base's shape, and all weights are random. The model is fitted as `stillroom search` does. Then --unseen other
students, drawn from the whole space with seed 1, are timed in turns. For each budget, the student with the most weights in its layers
that is predicted to meet p50 is chosen from the Pareto list (no faster student has more weights), and is timed in turns with the next
row of that list. Budgets are spread evenly on a logarithmic scale from 1 ms.
"""

import argparse
import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

from compress.models.pretrained import open_model
from compress.models.shapes import Shape
from compress.tasks import TEXT_CLASSIFICATION
from latency.analysis.latency_model import LatencyModel
from latency.measure.machine import machine_facts
from stillroom.console import say
from stillroom.student_search.machine_latency import Call, machine_latency, time_students, timed_shapes
from stillroom.student_search.space import Space, encoder_weights, space_of
from stillroom.verbs.profile.papers_table import make_models


def pareto_list(space: Space, model: LatencyModel, deepest: int) -> list[Shape]:
    """The students, fastest first, of which no faster one has as many weights."""
    found: list[Shape] = []
    for shape in sorted(space.shapes(), key=model.p50_ms):
        if shape.layers <= deepest and (not found or encoder_weights(shape) > encoder_weights(found[-1])):
            found.append(shape)
    return found


def main() -> None:
    """Fit, predict, measure and write."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--tokens", type=int, default=64)
    reader.add_argument("--threads", type=int, default=1)
    reader.add_argument("--unseen", type=int, default=20)
    reader.add_argument("--budgets", type=int, default=10)
    reader.add_argument("--most-ms", type=float, default=20.0)
    reader.add_argument("--deepest", type=int, default=8, help="layers of a timed student, at most")
    reader.add_argument("--out", type=Path, required=True)
    given = reader.parse_args()
    machine = machine_facts()
    with tempfile.TemporaryDirectory() as folder:
        teacher = open_model(str(make_models(Path(folder))[0]))
        space = space_of(teacher)
        call = Call(teacher, TEXT_CLASSIFICATION, 2, given.tokens, given.threads)
        model = machine_latency(call, space, machine)
        known = set(timed_shapes(space))
        others = [shape for shape in space.shapes() if shape not in known and shape.layers <= given.deepest]
        timed = time_students(random.Random(1).sample(others, given.unseen), call)
        errors = model.model.errors_on(timed)
        say(f"{errors}")
        listed = pareto_list(space, model.model, given.deepest)
        budgets = []
        for i in range(given.budgets):
            budget_ms = math.exp(math.log(given.most_ms) * i / max(1, given.budgets - 1))
            within = [n for n, shape in enumerate(listed) if model.model.p50_ms(shape) <= budget_ms]
            pair = listed[within[-1] : within[-1] + 2] if within else []
            rows: list[dict[str, Any]] = [
                {"student": str(each.shape), "predicted_ms": model.model.p50_ms(each.shape), "p50_ms": each.p50_ms}
                for each in (time_students(pair, call, seconds=10) if pair else [])
            ]
            budgets.append({"budget_ms": budget_ms, "chosen_and_next": rows})
            say(json.dumps(budgets[-1]))
    document = {
        "machine": machine, "tokens": given.tokens, "threads": given.threads, "fitted": len(model.timed),
        "ms_by_operator": dict(model.model.ms_by_operator), "p99_over_p50": model.model.p99_over_p50,
        "errors_of_the_search": model.errors._asdict(), "errors_on_unseen": errors._asdict(),
        "unseen": [{"student": str(each.shape), "predicted_ms": model.model.p50_ms(each.shape), "p50_ms": each.p50_ms} for each in timed],
        "budgets": budgets,
        "met": sum(bool(row["chosen_and_next"]) and row["chosen_and_next"][0]["p50_ms"] <= row["budget_ms"] for row in budgets),
        "next_missed": sum(len(row["chosen_and_next"]) == 2 and row["chosen_and_next"][1]["p50_ms"] > row["budget_ms"] for row in budgets),
    }  # fmt: skip
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
