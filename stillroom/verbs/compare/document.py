"""The document of a comparison: a row per method and student, with scores, costs and curves."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from compress.evaluation.metrics import Metric, Score
from compress.runs import task_stages
from compress.runs.resumable_stages import Workdir
from compress.runs.stages import trained_with
from compress.runs.task_inputs import TaskInputs, scored_rows
from stillroom.verbs.compare import Comparison
from stillroom.verbs.compare.choices import CONTROL
from stillroom.verbs.compare.rows import Row
from stillroom.verbs.compare.training import ROW, STUDENT


def document_of(
    given: Comparison, inputs_of: dict[str, TaskInputs], work: Workdir, rows: Sequence[Row], teacher: dict[str, Any]
) -> dict[str, Any]:
    """The table: for each method, student and choice the mean over seeds, its standard deviation, interval and cost."""
    scored = {row: np.load(work.root / row.name / "counts.npy", allow_pickle=False) for row in rows}
    documents = {row: json.loads((work.root / row.name / ROW).read_text(encoding="utf-8")) for row in rows}
    inputs = next(iter(inputs_of.values()))
    found: list[dict[str, Any]] = []
    for first in dict.fromkeys(row.first for row in rows):
        mine = [row for row in rows if row.first == first]
        control = [scored[row] for row in _control(rows, first)]
        found.append(
            _row(inputs.task.metric, mine, [scored[row] for row in mine], control, [documents[row] for row in mine])
        )
    model = task_stages.load_stage(work.root / "teacher", inputs)
    reached, on_validation = (_score(model, inputs, split) for split in ("test", "validation"))
    return {
        "metric": inputs.metric,
        "teacher": asdict(reached) | {"steps": teacher["best_step"], "validation": asdict(on_validation)},
        "rows": sorted(found, key=lambda one: -one["mean"]),
        "best": _best(found, rows, documents),
        "settings": _settings(given)
        | {
            "teacher": inputs.opened.public_name,
            "precision": inputs.settings.precision,
            "device": inputs.settings.device,
        },
        "versions": trained_with(inputs.settings.device),
    }


def _control(rows: Sequence[Row], first: Row) -> list[Row]:
    """The rows of `labels` for the student of `first`: of its start, or of the first start if it has none of its own."""
    controls = [row for row in rows if row.student == first.student and row.method == CONTROL]
    return [row for row in controls if row.choice.start == first.choice.start] or [
        row for row in controls if row.choice == controls[0].choice
    ]


def _row(
    metric: Metric,
    mine: Sequence[Row],
    counted: Sequence[np.ndarray],
    control: Sequence[np.ndarray],
    documents: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """A row of the table, from the trainings of all its seeds; `counted` and `control` are the results of `counts`."""
    first = mine[0]
    values = [metric.value(one) for one in counted]
    mean, apart = metric.mean_score(counted), metric.mean_score(counted, less=control)
    rates = documents[0]["label_rates"]
    taken = documents[0]["label_learning_rate"]
    return {
        "method": first.method,
        "student": first.student,
        **first.choice._asdict(),
        "mean": mean.value,
        "low": mean.low,
        "high": mean.high,
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
        "values": values,
        "validation": statistics.mean(one["validation"] for one in documents),
        "less_labels": asdict(apart) if first.method != CONTROL else None,
        "label_learning_rate": taken,
        "label_rates": rates,
        "diverged_rates": documents[0]["diverged_rates"],
        "choice_seconds": sum(one["seconds"] for one in rates if one["learning_rate"] != taken),
        "checkpoints": [f"work/{row.name}/{STUDENT}" for row in mine],
        "seconds": statistics.mean(one["seconds"] for one in documents),
        "peak_memory_bytes": max(one["peak_memory_bytes"] for one in documents),
        "tokens": documents[0]["tokens"],
        "plain_tokens": documents[0]["plain_tokens"],
        "losses": _losses([one["curves"] for one in documents]),
        "curves": documents[0]["curves"],
        "doubts": [doubt for one in documents for doubt in one["doubts"]],
    }


def _best(found: Sequence[dict[str, Any]], rows: Sequence[Row], documents: dict[Row, dict[str, Any]]) -> dict[str, Any]:
    """The row of the best mean on validation and its best seed on validation; the first of equals, never by test."""
    best = max(found, key=lambda one: one["validation"])
    mine = [row for row in rows if f"work/{row.name}/{STUDENT}" in best["checkpoints"]]
    row = max(mine, key=lambda row: documents[row]["validation"])
    return {
        "method": row.method,
        "student": row.student,
        **row.choice._asdict(),
        "validation": best["validation"],
        "seed": row.seed,
        "checkpoint": f"work/{row.name}/{STUDENT}",
    }


def _score(model: Any, inputs: TaskInputs, split: str) -> Score:
    """The metric of `model` on a split."""
    return inputs.task.metric.interval_of(scored_rows(inputs, model, split))


def _settings(given: Comparison) -> dict[str, Any]:
    """What was given, without private paths and without what changes no result."""
    settings = {name: value for name, value in asdict(given).items() if name not in ("out", "jobs")}
    for name in ("data", "source_data"):
        settings[name] = _public(settings[name])
    settings["corpus"] = [_public(file) for file in given.corpus]
    return settings


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
