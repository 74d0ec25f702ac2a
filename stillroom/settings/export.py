"""The settings of `stillroom export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compress.settings import ALL_CORES, REVISION, SPLITS, DataSet
from serve.options import check, setting
from stillroom.settings.model_card import OfCard

Variant = Literal["fp32", "fp16", "int8"]
WHAT, CHECKS, GRAPHS, MACHINE = "What to make", "Checks", "Graphs", "Machine"


@dataclass(frozen=True, kw_only=True)
class Exporting(OfCard, DataSet):
    """The settings of `stillroom export`."""

    out: str = setting(help="The bundle to write.", panel=WHAT)
    data: str = setting("", help=f"{SPLITS} It calibrates, gates and scores; without it nothing is scored.", panel=WHAT)
    texts: tuple[str, ...] = setting(
        (), help="File of unlabelled text, without --data: int8 is calibrated on it and judged by it.", metavar="FILE",
        panel=WHAT,
    )  # fmt: skip
    revision: str = setting("", help=REVISION, shown="its main branch", panel=WHAT)
    variants: tuple[Variant, ...] = setting(
        (), help="Files to make.", shown="fp32,int8; without --data fp32", panel=WHAT
    )
    name: str | None = setting(None, help="What the server calls the model.", shown="the bundle's folder", panel=WHAT)
    max_length: int = setting(
        0, help="Longest text in tokens.", at_least=0, shown="all that the model takes", panel=WHAT
    )
    gate: float = setting(
        0.99, help="Least share of the fp32 metric that int8 and fp16 keep.", at_least=0, at_most=1, panel=CHECKS
    )
    out_of_scope: str = setting(
        "", help="Label of texts that the model has no answer to, to tell these apart.", shown="none", panel=CHECKS
    )
    keep_right: float = setting(
        0.95, help="Or the share of right answers to keep when it abstains; 0 is never to abstain.", at_least=0,
        at_most=1, panel=CHECKS,
    )  # fmt: skip
    atol: float = setting(
        1e-4, help="What a logit of fp32 may differ by from torch's, beside a share of it.", at_least=0, panel=CHECKS
    )
    int8: Literal["static", "weight-only", "dynamic"] = setting(
        "static",
        help="How int8 is made. weight-only is near fp32 and no faster; the answers of dynamic depend on the batch.",
        panel=GRAPHS,
    )
    runtime: Literal["onnxruntime", "openvino"] = setting("onnxruntime", help="What serves int8.", panel=GRAPHS)
    fuse: bool = setting(False, help="Join kernels in fp32 and fp16, for GPUs.", panel=GRAPHS)
    keep_words_of: tuple[Path, ...] = setting(
        (), help="Text to whose words the vocabulary is trimmed.", metavar="FILE", panel=GRAPHS
    )
    latency_seconds: float = setting(
        20.0, help="Seconds for timing every variant and runtime; 0 leaves it out.", at_least=0, panel=MACHINE
    )
    threads: int = setting(0, help="Of one model call.", at_least=0, shown=ALL_CORES, panel=MACHINE)

    def __post_init__(self) -> None:
        check(self)
