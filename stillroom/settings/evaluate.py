"""The settings of `stillroom evaluate`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from compress.settings import FineTuning, HubModel, RowColumns
from serve.bundle.runtimes import Device
from serve.options import again, setting
from serve.settings import ServeSettings


@dataclass(frozen=True, kw_only=True)
class Evaluation(HubModel, RowColumns):
    """The data that a model is scored on, and which of its files is scored."""

    data: str = setting(help="A file of labelled examples, or a folder of splits.")
    split: Literal["train", "validation", "test"] = setting("test", help="Which split of a folder is scored.")
    variant: str | None = again(
        ServeSettings, "variant", help="Exported file of a bundle to score.", shown="the bundle's"
    )
    device: Device = again(
        ServeSettings,
        "device",
        help="Where the model runs; cuda is an NVIDIA GPU, and a bundle needs onnxruntime-gpu there.",
    )
    teacher: str = setting(
        "", help="Model with whose vectors those of an encoder of sentences are compared: a bundle, a transformers folder or a Hub name.",
        metavar="MODEL", shown="none",
    )  # fmt: skip
    task: str | None = again(FineTuning, "task", None, help="Task of a checkpoint.", shown="that of its head")
    beams: int = setting(5, help="Targets under way in the search of a model that generates.", at_least=1, at_most=64)
    length_penalty: float = setting(
        1.0,
        help="Power of the length penalty of that search; a higher one prefers longer texts.",
        at_least=0,
        at_most=10,
    )
    target_column: str = again(FineTuning, "target_column", help="Column of the text to generate.")
    layout: ClassVar = {"Options": "data split variant device teacher task beams length_penalty revision"}
