"""The document of a comparison: a row per method and student, with scores, costs and curves; and the bundle of the best student."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.examples import clusters_of
from compress.evaluation.metrics import Pairs, gain
from compress.runs import task_stages
from compress.runs.resumable_stages import Workdir
from compress.runs.stages import fingerprint, trained_with
from compress.runs.task_inputs import TaskInputs, scored_rows
from compress.settings import DataSet
from export.packing.builder import DOCUMENTED
from export.settings import VariantSettings
from serve.bundle.manifest import MANIFEST
from serve.errors import BadInput, BundleError, GateMissed
from serve.tasks import open_bundle
from stillroom.console import say
from stillroom.report.pages import page_or
from stillroom.settings import shared
from stillroom.verbs.compare import BUNDLE, Comparison
from stillroom.verbs.compare.queue import Queue
from stillroom.verbs.compare.rows import CONTROL, Row
from stillroom.verbs.compare.training import ROW, STUDENT
from stillroom.verbs.export import Exporting
from stillroom.verbs.export.checkpoint import TeacherReference, export_checkpoint

MADE_BY = "comparison"  # in the manifest's lineage: what decides the bundle


def document_of(
    given: Comparison, inputs_of: dict[str, TaskInputs], work: Workdir, rows: Sequence[Row], teacher: dict[str, Any]
) -> dict[str, Any]:
    """The table: for each method, student and choice the mean over seeds, its standard deviation, interval and cost."""
    scored = {row: np.load(work.root / row.name / "counts.npy", allow_pickle=False) for row in rows}
    documents = {row: json.loads((work.root / row.name / ROW).read_text(encoding="utf-8")) for row in rows}
    inputs = next(iter(inputs_of.values()))
    metric, clusters = inputs.task.metric, clusters_of(inputs.splits.test)
    found: list[dict[str, Any]] = []
    for first in dict.fromkeys(row.first for row in rows):
        mine = [row for row in rows if row.first == first]
        # The rows of `labels` for this student: of its start, or of the first start if it has none of its own.
        controls = [row for row in rows if row.student == first.student and row.method == CONTROL]
        own = [row for row in controls if row.choice.start == first.choice.start] or [
            row for row in controls if row.choice == controls[0].choice
        ]
        control = {row.seed: scored[row] for row in own}
        both = [row for row in mine if row.seed in control]
        pairs = Pairs(metric, [scored[row] for row in both], [control[row.seed] for row in both], clusters)
        found.append(_row(pairs, mine, [scored[row] for row in mine], [documents[row] for row in mine]))
    model = task_stages.load_stage(work.root / "teacher", inputs)
    reached, on_validation = (
        metric.interval_of(scored_rows(inputs, model, split), clusters=clusters_of(getattr(inputs.splits, split)))
        for split in ("test", "validation")
    )
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


def _row(
    pairs: Pairs,
    mine: Sequence[Row],
    counted: Sequence[np.ndarray],
    documents: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """A row of the table, from the trainings of all its seeds, whose results of `counts` are `counted`.

    `pairs` are these with the trainings on labels alone that share seed and start.
    """
    first, metric = mine[0], pairs.metric
    values = [metric.value(one) for one in counted]
    mean, apart = metric.mean_score(counted, clusters=pairs.clusters), gain([[pairs]])
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


def export_best(given: Comparison, document: dict[str, Any], queue: Queue) -> dict[str, Any]:
    """Make OUT/bundle of `document["best"]`, if it is not there already; what the document says of it, with paths in OUT.

    Raises BadInput: OUT/bundle is damaged, or made of another student. GateMissed: with that same part of the document.
    """
    out = Path(given.out).absolute()
    row = next(row for row in queue.rows if row.name == Path(document["best"]["checkpoint"]).parent.name)
    made_of = fingerprint(MADE_BY, queue.fingerprint(row), given.gate, given.teacher_gate)
    say(f"best on validation: {row}")
    if (out / BUNDLE / MANIFEST).is_file():
        return _already_there(out, made_of)
    settings = Exporting(
        out=str(out / BUNDLE),
        data=given.data,
        name=out.name,
        max_length=given.max_length,
        threads=given.threads,
        latency_seconds=given.latency_seconds,
        graphs=VariantSettings(gate=given.gate),
        **shared(given, DataSet),
    )
    scores = document["teacher"]
    on_test = {key: scores[key] for key in ("value", "low", "high")}
    beside = TeacherReference(
        scores={"validation": scores["validation"], "test": on_test},
        size_bytes=(out / "work" / "teacher" / "model.safetensors").stat().st_size,
        gate=given.teacher_gate,
        lineage={MADE_BY: made_of},
    )
    try:
        made = export_checkpoint(str(out / document["best"]["checkpoint"]), out / BUNDLE, settings, beside)
    except GateMissed as missed:
        inside = _inside(out, missed.document) if missed.document else None
        raise GateMissed(missed.message, document=inside) from None
    return _inside(out, made)


def _already_there(out: Path, made_of: str) -> dict[str, Any]:
    """What is said of the bundle of an earlier call, every file of which is verified."""
    try:
        bundle = open_bundle(out / BUNDLE)
    except BundleError as fault:
        raise BadInput(
            f"{out / BUNDLE} is a damaged bundle: {fault.message} The comparison is kept. Remove the bundle, and this command makes it "
            "again."
        ) from None
    if bundle.manifest.lineage.get(MADE_BY) != made_of:
        raise BadInput(
            f"{out / BUNDLE} is not the bundle of the student that is best now, at these gates. The comparison is kept. Remove the "
            "bundle or move it, and this command makes another."
        )
    say(f"{out / BUNDLE} is already the bundle of this student; every file of it was verified.")
    report = json.loads((out / BUNDLE / "report.json").read_text(encoding="utf-8"))
    page = page_or(out / BUNDLE / "report.html", "report.json")
    parts = {key: report[key] for key in DOCUMENTED}
    return _inside(out, {"bundle": out / BUNDLE, "report": page, "metric": bundle.manifest.metrics["metric"], **parts})


def _inside(out: Path, made: dict[str, Any]) -> dict[str, Any]:
    """`made` with paths inside `out`, which tell nothing of the folders above it."""
    paths = {key: str(Path(made[key]).relative_to(out)) if made[key] else None for key in ("bundle", "report")}
    return made | paths
