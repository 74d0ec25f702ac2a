"""The settings of `stillroom benchmark`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from compress.settings import HubModel, Output, TrainingMachine
from serve.options import again, setting


@dataclass(frozen=True, kw_only=True)
class Benchmarking(HubModel, TrainingMachine):
    """Settings of `stillroom benchmark`."""

    suite: Literal["glue", "xnli", "conll2003", "wikiann", "crossner", "squad1", "squad2", "mlqa"] = setting(
        help="The suite."
    )
    data: str = setting(metavar="FOLDER", help="Folder of the suite's files as they are published.")
    out: str = again(
        Output, "out", help="Folder for benchmark.json and benchmark.html; trainings are kept in OUT.work."
    )
    tasks: tuple[str, ...] = setting(
        (), help="A task of the suite, such as SST-2. May be given again.", flag="--only", metavar="TASK", shown="all"
    )
    grid: Literal["one", "minilm", "compared"] = setting(
        "one",
        help="Rates and epochs that are tried: one, or those of MiniLM or of the comparative analysis (docs/benchmarking.md).",
    )
    seeds: int = setting(0, help="Trainings of each.", at_least=0, at_most=100, shown="1, or the paper's: 4 and 3")
    layout: ClassVar = {"Options": "suite data out tasks grid seeds revision device threads precision"}
