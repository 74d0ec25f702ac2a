"""Export a checkpoint to a bundle of ONNX files: fp32, fp16, int8.

Each file is checked against torch and gated on the task metric.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click

from compress.settings import SPLITS, TAKEN, DataSet, FineTunedTeacher, HubModel, Output, TaskData, TaskSettings
from export.settings import Precision, VariantSettings
from serve.options import again, group, make, setting
from stillroom.console import result, say, table
from stillroom.settings import BundleChecks, ModelCard, Timing
from stillroom.verb import Argument, Document, Verb, ourselves


@dataclass(frozen=True, kw_only=True)
class Exporting(ModelCard, HubModel, DataSet):
    """The settings of `stillroom export`."""

    out: str = again(Output, "out", help="The bundle to write.")
    data: str = again(
        TaskData, "data", "", help=f"{SPLITS} It calibrates, gates and scores; without it nothing is scored."
    )
    texts: tuple[str, ...] = setting(
        (), help="File of unlabelled text to calibrate and check int8 on, in place of --data.", metavar="FILE",
        excludes="data",
    )  # fmt: skip
    variants: tuple[Precision, ...] = setting((), help="Files to make.", shown="fp32,int8; without --data fp32")
    name: str | None = setting(None, help="Name of the model on the server.", shown="the bundle's folder")
    max_length: int = again(FineTunedTeacher, "max_length", shown=TAKEN)
    out_of_scope: str = again(
        TaskSettings, "out_of_scope", shown="none", needs="data",
        help="Label of texts that the model has no answer to; they set the score below which it abstains.",
    )  # fmt: skip
    promise_data: str = again(BundleChecks, "promise_data", needs="promises data")
    keep_words_of: tuple[Path, ...] = setting((), help="Text whose words the trimmed vocabulary keeps.", metavar="FILE")
    latency_seconds: float = again(BundleChecks, "latency_seconds")
    threads: int = again(Timing, "threads")
    graphs: VariantSettings = group(VariantSettings)
    layout: ClassVar = {
        "What to make": "out data texts revision variants name max_length",
        "Checks": "out_of_scope promise_data gate keep_right promises promise_confidence atol",
        "Graphs": "keep_words_of int8 runtime fuse",
        "Machine": "latency_seconds threads",
    }


def export(checkpoint: Path | str, out: Path | str, data: Path | str = "", **settings: Any) -> dict[str, Any]:
    """Export a checkpoint with a head to a bundle, every graph of it checked against torch and on the task metric.

    `data` is a folder of splits: int8 is calibrated on train, chosen and gated on validation, and reported on test. Without it
    nothing is scored, and int8 needs `texts`. Settings are the fields of `Exporting`: variants, gate,
    int8, runtime, and so on. The report is in the bundle. Returns the document that `stillroom export --json` prints.

    Raises:
        BadInput: the checkpoint or the data cannot be used.
        GateMissed: a graph disagrees with torch, or keeps less than `gate` of fp32's metric. The report is beside `out`.
    """
    from stillroom.verbs.export.checkpoint import export_checkpoint

    chosen = make(Exporting, settings | {"out": out, "data": data}, verb="export")
    return export_checkpoint(str(checkpoint), Path(chosen.out), chosen)


def show_export(document: Document) -> None:
    """Prints a row per variant, with its score on test where there is one, and the next command."""
    test = document["scores"].get("test") or {}
    rows = []
    for name, variant in document["variants"].items():
        score = test.get(name if variant["runtime"] == "onnxruntime" else f"{name} {variant['runtime']}")
        cells = [f"{score['value']:.4f}", f"{score['low']:.4f} .. {score['high']:.4f}"] if score else ["", ""]
        share = "" if variant["share"] is None else f"{variant['share']:.4f}"
        rows.append([name, variant["runtime"], variant["scheme"], *cells, share, f"{variant['size_bytes'] / 1e6:.1f}"])
    header = ["variant", "runtime", "scheme", document["metric"], "95 % interval", "share of fp32", "MB"]
    table("scores on test, shares on validation" if test else "nothing was scored", header, rows)
    for claim in document["claims"]:
        result(claim)
    result(f"Bundle  {document['bundle']}\nReport  {document['report']}")
    say(f"Next    {ourselves()} serve {document['bundle']}")


VERB = Verb(
    "export",
    export,
    Exporting,
    help=__doc__,
    arguments=(
        Argument(
            "checkpoint", "Transformers folder or Hub name with a head for a task.", type=click.Path(path_type=Path)
        ),
    ),
    show=show_export,
    examples=(
        "stillroom export my_checkpoint --out ner.bundle",
        "stillroom export my_checkpoint --data my-data --out ner.bundle",
        "stillroom export my_checkpoint --data my-data --out ner.bundle \\\n"
        "      --variants fp32,fp16,int8 --runtime openvino",
    ),
)
