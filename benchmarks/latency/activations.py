"""Time students with ReLU beside the same ones with the teacher's activation: int8, random weights, in turns.

python benchmarks/latency/activations.py --teacher TEACHER [--tokens 16 64] [--threads 1] [--rounds 3] [--out F]
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.models.pretrained import open_model
from compress.models.shapes import shape_of
from compress.tasks import TOKEN_CLASSIFICATION
from latency.measure.machine import machine_facts
from stillroom.student_search.machine_latency import Call, time_students

SHAPES = ("3x384", "6x384", "layers=3,hidden=384,heads=12,ffn=384", "layers=4,hidden=192,heads=6,ffn=768")
LABELS = 23


def main() -> None:
    """Time and write."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--teacher", required=True)
    reader.add_argument("--tokens", type=int, nargs="+", default=[16, 64])
    reader.add_argument("--threads", type=int, default=1)
    reader.add_argument("--rounds", type=int, default=3)
    reader.add_argument("--out", type=Path)
    given = reader.parse_args()
    machine, teacher = machine_facts(), open_model(given.teacher)
    shapes = [replace(shape_of(name), activation=activation) for name in SHAPES for activation in ("", "relu")]
    rows: list[dict[str, Any]] = []
    for tokens in given.tokens:
        call = Call(teacher, TOKEN_CLASSIFICATION, LABELS, tokens, given.threads)
        rounds = [time_students(shapes, call, seconds=20.0) for _ in range(given.rounds)]
        for i, name in enumerate(SHAPES):
            ratios = [timed[2 * i + 1].p50_ms / timed[2 * i].p50_ms for timed in rounds]
            own_ms, relu_ms = (statistics.median(timed[2 * i + j].p50_ms for timed in rounds) for j in (0, 1))
            rows.append({"student": name, "tokens": tokens, "own_ms": own_ms, "relu_ms": relu_ms, "ratios": ratios})
            print(json.dumps(rows[-1]), flush=True)
    if given.out:
        document = {"machine": machine, "threads": given.threads, "rows": rows}
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
