"""The settings of `stillroom export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from compress.settings import ALL_CORES, SPLITS, DataSet, FineTunedTeacher, HubModel, Output, TaskData
from export.settings import PROMISE_DATA, Precision, VariantSettings
from serve.options import again, group, setting
from stillroom.settings.model_card import OfCard


@dataclass(frozen=True, kw_only=True)
class Exporting(OfCard, HubModel, DataSet):
    """The settings of `stillroom export`."""

    out: str = again(Output, "out", help="The bundle to write.")
    data: str = again(
        TaskData, "data", "", help=f"{SPLITS} It calibrates, gates and scores; without it nothing is scored."
    )
    texts: tuple[str, ...] = setting(
        (), help="File of unlabelled text to calibrate and check int8 on, in place of --data.", metavar="FILE",
    )  # fmt: skip
    variants: tuple[Precision, ...] = setting((), help="Files to make.", shown="fp32,int8; without --data fp32")
    name: str | None = setting(None, help="Name of the model on the server.", shown="the bundle's folder")
    max_length: int = again(FineTunedTeacher, "max_length", shown="all that the model takes")
    out_of_scope: str = setting(
        "",
        help="Label of texts that the model has no answer to; they set the score below which it abstains.",
        shown="none",
    )
    promise_data: str = setting("", help=PROMISE_DATA, metavar="FILE", shown="validation")
    keep_words_of: tuple[Path, ...] = setting((), help="Text whose words the trimmed vocabulary keeps.", metavar="FILE")
    latency_seconds: float = setting(
        20.0, help="Seconds for timing all variants and runtimes together; 0 skips it.", at_least=0
    )
    threads: int = setting(0, help="Threads of one model call.", at_least=0, shown=ALL_CORES)
    graphs: VariantSettings = group(VariantSettings)
    layout: ClassVar = {
        "What to make": "out data texts revision variants name max_length",
        "Checks": "out_of_scope promise_data gate keep_right promises promise_confidence atol",
        "Graphs": "keep_words_of int8 runtime fuse",
        "Machine": "latency_seconds threads",
    }
