"""The document of a comparison: a row per method and student, with scores, costs and curves."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.examples import check_task
from compress.engine import task_stages
from compress.engine.fingerprints import trained_with
from compress.engine.resumable_stages import Workdir
from compress.engine.task_inputs import TaskInputs
from compress.evaluation.metrics import gold_of, mean_score, score
from compress.evaluation.predictions import predictions, row_logits
from stillroom.commands.compare.rows import CONTROL, Row, methods_of, name_of
from stillroom.commands.compare.training import STUDENT
from stillroom.settings.compare import Comparison


def document_of(
    given: Comparison, inputs_of: dict[str, TaskInputs], work: Workdir, rows: Sequence[Row], teacher: dict[str, Any]
) -> dict[str, Any]:
    """The table: for each method and student the mean over seeds, its standard deviation, interval and cost."""
    task = check_task(given.task)
    found: list[dict[str, Any]] = []
    scored = {row: np.load(work.root / name_of(row) / "counts.npy", allow_pickle=False) for row in rows}
    documents = {row: json.loads((work.root / name_of(row) / "row.json").read_text(encoding="utf-8")) for row in rows}
    for student in given.students:
        control = [scored[row] for row in rows if row.student == student and row.method == CONTROL]
        for method in methods_of(given):
            mine = [row for row in rows if row.student == student and row.method == method]
            counted = [scored[row] for row in mine]
            values = [float(mean_score([one]).value) for one in counted]
            mean, apart = mean_score(counted), mean_score(counted, less=control)
            found.append(
                {
                    "method": method,
                    "student": student,
                    "mean": mean.value,
                    "low": mean.low,
                    "high": mean.high,
                    "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
                    "values": values,
                    "less_labels": dataclasses.asdict(apart) if method != CONTROL else None,
                    "checkpoints": [f"work/{name_of(row)}/{STUDENT}" for row in mine],
                    "seconds": statistics.mean(documents[row]["seconds"] for row in mine),
                    "peak_memory_bytes": max(documents[row]["peak_memory_bytes"] for row in mine),
                    "tokens": documents[mine[0]]["tokens"],
                    "plain_tokens": documents[mine[0]]["plain_tokens"],
                    "losses": _losses([documents[row]["curves"] for row in mine]),
                    "curves": documents[mine[0]]["curves"],
                    "doubts": [doubt for row in mine for doubt in documents[row]["doubts"]],
                }
            )
    inputs = next(iter(inputs_of.values()))
    model = task_stages.load_stage(work.root / "teacher", inputs)
    gold = [gold_of(example, task) for example in inputs.splits.test]
    reached = score(gold, predictions(inputs.test, row_logits(model, inputs.test)))
    settings = {name: value for name, value in dataclasses.asdict(given).items() if name not in ("out", "jobs")}
    for name in ("data", "source_data"):
        settings[name] = _public(settings[name])
    settings["corpus"] = [_public(file) for file in given.corpus]
    return {
        "metric": inputs.metric,
        "teacher": dataclasses.asdict(reached) | {"steps": teacher["best_step"]},
        "rows": sorted(found, key=lambda one: -one["mean"]),
        "settings": settings
        | {
            "teacher": inputs.opened.public_name,
            "precision": inputs.settings.precision,
            "device": inputs.settings.device,
        },
        "versions": trained_with(inputs.settings.device),
    }


def _losses(curves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each stage the first and last loss (means over a tenth of the curve) and the best validation: minimum and maximum over seeds."""
    found: dict[str, Any] = {}
    for stage in curves[0]:
        losses = [[value for _, value in curve[stage]["loss"]] for curve in curves]
        tenth = max(1, len(losses[0]) // 10)
        ends = {
            "first": [statistics.mean(loss[:tenth]) for loss in losses],
            "last": [statistics.mean(loss[-tenth:]) for loss in losses],
            "best_on_validation": [max(v for _, v in c[stage]["validation"]) for c in curves if c[stage]["validation"]],
        }
        ranges = {name: [min(values), max(values)] for name, values in ends.items() if values}
        found[stage] = {"steps": curves[0][stage]["loss"][-1][0]} | ranges
    return found


def _public(name: str) -> str:
    """`name`, without the folders above it if it is a path: they may be private."""
    return Path(name).name if Path(name).exists() else name
