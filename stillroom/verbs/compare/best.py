"""`--export best`: the student that is best on validation as a bundle, as `stillroom export` makes it, beside its teacher."""

import json
from pathlib import Path
from typing import Any

from compress.runs.stages import fingerprint
from compress.settings import WHERE_DATA_IS
from export.packing.builder import DOCUMENTED
from export.settings import VariantSettings
from serve.bundle.manifest import MANIFEST
from serve.errors import BadInput, BundleError, GateMissed
from serve.tasks import open_bundle
from stillroom.console import say
from stillroom.report.pages import page_or
from stillroom.verbs.compare import Comparison
from stillroom.verbs.compare.inputs import BUNDLE
from stillroom.verbs.compare.queue import Queue
from stillroom.verbs.export import Exporting
from stillroom.verbs.export.checkpoint import Beside, export_checkpoint

MADE_BY = "comparison"  # in the manifest's lineage: what decides the bundle


def export_best(given: Comparison, document: dict[str, Any], queue: Queue) -> dict[str, Any]:
    """Make OUT/bundle of `document["best"]`, if it is not there already; what the document says of it, with paths in OUT.

    Raises:
        BadInput: OUT/bundle is damaged, or made of another student.
        GateMissed: with that same part of the document.
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
        **{name: getattr(given, name) for name in WHERE_DATA_IS},
    )
    scores = document["teacher"]
    on_test = {key: scores[key] for key in ("value", "low", "high")}
    beside = Beside(
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
