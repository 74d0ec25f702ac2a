"""The fine-tunings of a task: rates, epochs and seeds by the paper whose table the scores stand beside, or one of each."""

from dataclasses import dataclass
from typing import Literal

from stillroom.verbs.benchmark.suites import SMALL, SuiteTask

Grid = Literal["one", "minilm", "compared"]
SEEDS: dict[Grid, int] = {"one": 1, "minilm": 4, "compared": 3}


@dataclass(frozen=True)
class Tuning:
    """How a task is fine-tuned."""

    learning_rate: float
    epochs: float
    batch: int
    max_length: int
    """In tokens; shorter where the model reads less."""

    @property
    def name(self) -> str:
        """As in the names of folders."""
        return f"{self.learning_rate:g}-{self.epochs:g}"


def tunings(task: SuiteTask, grid: Grid) -> list[Tuning]:
    """The fine-tunings that are tried, of which the best on validation counts.

    `minilm` is MiniLM's (long version, appendix B), `compared` that of the comparative analysis (appendix D), whose length is MiniLM's.
    Neither names any for tagged words, which are ours, nor MiniLM a rate for MLQA, which is SQuAD's here. `one` is one of MiniLM's.
    """
    if task.kind.has_contexts:
        length = 512 if task.name == "MLQA" else 384
        return [Tuning(rate, 3, 32, length) for rate in ((6e-5,) if grid != "compared" else (2e-5,))]
    xnli, tagged = task.name == "XNLI", task.kind.labels_words
    batch, length = (128 if xnli and grid != "compared" else 32), (256 if tagged else 128)
    rates: tuple[float, ...]
    epochs: tuple[float, ...]
    if grid == "compared":
        rates, epochs = (2e-5,), (6,) if task.name == "CoLA" else (5,) if xnli else (3,)
    elif grid == "one":
        rates, epochs = (5e-5,), (10,) if task.name in SMALL else (5,) if xnli else (3,)
    else:
        rates = (3e-5, 4e-5, 5e-5, 6e-5) if xnli else (2e-5, 3e-5, 4e-5, 5e-5)
        epochs = (5,) if xnli else (3, 5, 10) if task.name in SMALL else (3, 4, 5)
    return [Tuning(rate, count, batch, length) for rate in rates for count in epochs]
