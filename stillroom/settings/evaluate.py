"""The settings of `stillroom evaluate`."""

from dataclasses import dataclass
from typing import Literal

from compress.settings import REVISION, TASKS, RowColumns
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
    task: str | None = setting(None, help="Task of a checkpoint.", choices=TASKS, shown="that of its head")
    revision: str = setting("", help=REVISION, shown="its main branch")

    def __post_init__(self) -> None:
        check(self)
