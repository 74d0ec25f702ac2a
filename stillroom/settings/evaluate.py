"""The settings of `stillroom evaluate`."""

from dataclasses import dataclass
from typing import Literal

from compress.data.examples import GENERATION
from compress.settings import COLUMNS, REVISION, TASKS, RowColumns
from serve.bundle.runtimes import Device
from serve.options import check, setting


@dataclass(frozen=True, kw_only=True)
class Evaluation(RowColumns):
    """The data that a model is scored on, and which of its files is scored."""

    data: str = setting(help="A file of labelled examples, or a folder of splits.")
    split: Literal["train", "validation", "test"] = setting("test", help="Which split of a folder is scored.")
    variant: str | None = setting(
        None, help="Exported file of a bundle to score.", choices=("fp32", "fp16", "int8"), shown="the bundle's"
    )
    device: Device = setting(
        "cpu", help="Where the model runs; cuda is an NVIDIA GPU, and a bundle needs onnxruntime-gpu there."
    )
    teacher: str = setting(
        "", help="Model with whose vectors those of an encoder of sentences are compared: a bundle, a transformers folder or a Hub name.",
        metavar="MODEL", shown="none",
    )  # fmt: skip
    task: str | None = setting(
        None, help="Task of a checkpoint.", choices=(*TASKS, GENERATION), shown="that of its head"
    )
    beams: int = setting(5, help="Targets under way in the search of a model that generates.", at_least=1, at_most=64)
    length_penalty: float = setting(
        1.0,
        help="Power of the length penalty of that search; a higher one prefers longer texts.",
        at_least=0,
        at_most=10,
    )
    target_column: str = setting(
        "", help="Column of the text to generate.", shown="target", metavar="NAME", panel=COLUMNS
    )
    revision: str = setting("", help=REVISION, shown="its main branch")

    def __post_init__(self) -> None:
        check(self)
