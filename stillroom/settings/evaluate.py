"""The settings of `stillroom evaluate`."""

from dataclasses import dataclass

from compress.settings import TASKS
from serve.options import check, setting


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """On what a model is scored, and as which file of it."""

    data: str = setting(help="A file of labelled examples.", metavar="FILE")
    variant: str | None = setting(
        None, help="Exported file of a bundle.", choices=("fp32", "fp16", "int8"), shown="the bundle's"
    )
    task: str | None = setting(None, help="Of a checkpoint.", choices=TASKS, shown="what its head tells")

    def __post_init__(self) -> None:
        check(self)
