"""The settings of `stillroom export`."""

from dataclasses import dataclass
from pathlib import Path

from compress.settings import ALL_CORES, REVISION, SPLITS, DataSet
from export.settings import CHECKS, GRAPHS, PROMISE_DATA, Precision, VariantSettings
from serve.options import check, group, setting
from stillroom.settings.model_card import OfCard

WHAT, MACHINE = "What to make", "Machine"


@dataclass(frozen=True, kw_only=True)
class Exporting(OfCard, DataSet):
    """The settings of `stillroom export`."""

    out: str = setting(metavar="FOLDER", help="The bundle to write.", panel=WHAT)
    data: str = setting("", help=f"{SPLITS} It calibrates, gates and scores; without it nothing is scored.", panel=WHAT)
    texts: tuple[str, ...] = setting(
        (), help="File of unlabelled text to calibrate and check int8 on, in place of --data.", metavar="FILE",
        panel=WHAT,
    )  # fmt: skip
    revision: str = setting("", help=REVISION, shown="its main branch", panel=WHAT)
    variants: tuple[Precision, ...] = setting(
        (), help="Files to make.", shown="fp32,int8; without --data fp32", panel=WHAT
    )
    name: str | None = setting(None, help="Name of the model on the server.", shown="the bundle's folder", panel=WHAT)
    max_length: int = setting(
        0, help="Longest text in tokens.", at_least=0, shown="all that the model takes", panel=WHAT
    )
    out_of_scope: str = setting(
        "",
        help="Label of texts that the model has no answer to; they set the score below which it abstains.",
        shown="none",
        panel=CHECKS,
    )
    promise_data: str = setting("", help=PROMISE_DATA, metavar="FILE", shown="validation", panel=CHECKS)
    keep_words_of: tuple[Path, ...] = setting(
        (), help="Text whose words the trimmed vocabulary keeps.", metavar="FILE", panel=GRAPHS
    )
    latency_seconds: float = setting(
        20.0, help="Seconds for timing all variants and runtimes together; 0 skips it.", at_least=0, panel=MACHINE
    )
    threads: int = setting(0, help="Threads of one model call.", at_least=0, shown=ALL_CORES, panel=MACHINE)
    graphs: VariantSettings = group(VariantSettings)

    def __post_init__(self) -> None:
        check(self)
