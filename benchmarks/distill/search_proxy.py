"""Whether the short trainings of `stillroom search` rank students as full trainings do.

    python benchmarks/distill/search_proxy.py --search FOUND/search.json --teacher TEACHER --data DATA --work FOLDER --out proxy.json

FOUND is a finished search. Of the students that it trained, --students are taken, evenly spread over their rank, the chosen one and
those that the papers name among them; each goes through `run`. Spearman's rank correlation is that of the short trainings' score on
validation and the int8 student's on test. TEACHER is the fine-tuned one. Everything finished in --work is kept.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

import stillroom
from compress.models.shapes import STUDENTS
from latency.measure.machine import machine_facts


def spread(rows: list[dict[str, Any]], chosen: str, count: int) -> list[dict[str, Any]]:
    """`count` of the rows, best first: the chosen one and named ones, and others evenly spread over the rank."""
    needed = [row for row in rows if row["student"] == chosen or row["student"] in STUDENTS]
    others = [row for row in rows if row not in needed]
    left = max(0, count - len(needed))
    taken = [others[round(i * (len(others) - 1) / max(1, left - 1))] for i in range(left)] if others else []
    return [row for row in rows if row in needed or row in taken]


def main() -> None:
    """Train, compare and write."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--search", type=Path, required=True)
    reader.add_argument("--teacher", required=True)
    reader.add_argument("--task", default="token-classification")
    reader.add_argument("--data", required=True)
    reader.add_argument("--students", type=int, default=8)
    reader.add_argument("--threads", type=int, default=1)
    reader.add_argument("--work", type=Path, required=True)
    reader.add_argument("--out", type=Path, required=True)
    given = reader.parse_args()
    machine = machine_facts()
    found = json.loads(given.search.read_text(encoding="utf-8"))
    rows = []
    for row in spread(found["trials"], found["chosen"], given.students):
        document = stillroom.run(
            teacher=given.teacher, task=given.task, data=given.data, student=row["student"], threads=given.threads,
            undistilled=False, soft_weight=0.5, gate=0.0, teacher_gate=0.0, latency_seconds=2.0, budget_ms=1_000.0,
            tokens=found["tokens"], out=given.work / row["student"].replace("=", "-").replace(",", "-"),
        )  # fmt: skip
        scores = document["scores"]
        report = json.loads((Path(document["bundle"]) / "report.json").read_text(encoding="utf-8"))
        timed = next(
            each
            for each in report["latency"]["candidates"]
            if (each["name"], each["batch"], each["tokens"]) == ("student ORT int8", 1, found["tokens"])
        )
        rows.append({
            "student": row["student"], "short": row["validation"], "predicted_ms": row["predicted_ms"], "p50_ms": timed["p50_ms"],
            "validation": scores["validation"]["int8"], "test": scores["test"]["int8"],
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    short = [row["short"]["value"] for row in rows]
    document = {
        "machine": machine, "search": str(found["trial_steps"]) + " steps", "chosen": found["chosen"], "rows": rows,
        "spearman": {
            split: float(spearmanr(short, [row[split]["value"] for row in rows]).statistic) for split in ("validation", "test")
        },
    }  # fmt: skip
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(document["spearman"])


if __name__ == "__main__":
    main()
