"""The settings of `stillroom profile`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compress.settings import ALL_CORES, RowColumns
from latency.candidates.candidate import Device, Runtime
from serve.options import check, setting

TorchPrecision = Literal["fp32", "bf16", "fp16"]
WHAT, GRID, QUESTIONS = "What to measure", "Grid", "Questions"


@dataclass(frozen=True, kw_only=True)
class Profiling(RowColumns):
    """The settings of `stillroom profile`."""

    data: str = setting(
        "",
        help="Texts to time on, labelled ones for a metric; or a folder of splits, of which test is taken.",
        shown="a built-in sample",
        metavar="FILE",
        panel=WHAT,
    )
    out: str = setting(
        "",
        metavar="FOLDER",
        help="Folder for report.html, report.json and table.md; graphs stay in OUT.work.",
        panel=WHAT,
    )
    device: tuple[Device, ...] = setting(
        (), help="Where models run.", shown="cpu, and cuda where a runtime needs it", panel=WHAT
    )
    runtimes: tuple[Runtime, ...] = setting(
        (),
        help="Runtimes that run the models.",
        shown="what each model pins; torch and onnxruntime for checkpoints",
        panel=WHAT,
    )
    precisions: tuple[TorchPrecision, ...] = setting(
        (), help="Arithmetic of models in torch.", shown="fp32; with --paper fp16 too on cuda", panel=WHAT
    )
    threads: int = setting(0, help="Threads of one model call.", at_least=0, shown=ALL_CORES, panel=WHAT)
    seed: int = setting(0, help="Fixes which texts are timed, and every order.", at_least=0, panel=WHAT)
    batches: tuple[int, ...] = setting((1, 8), help="Texts a call.", at_least=1, panel=GRID)
    lengths: tuple[int, ...] = setting(
        (), help="Tokens a text.", at_least=1, shown="16,128, cut to what the models take", panel=GRID
    )
    seconds: float = setting(
        120.0,
        help="Seconds of timing; exports, loading, scoring and six turns of every model at least come on top.",
        above=0,
        panel=GRID,
    )
    tight: float = setting(
        0.02, help="Timing ends when speed-ups are known to plus or minus this share.", above=0, panel=GRID
    )
    budget_ms: float | None = setting(
        None,
        help="Milliseconds that one text may take; the best model that meets it is named.",
        above=0,
        panel=QUESTIONS,
    )
    percentile: Literal[50, 90, 95, 99] = setting(
        99, help="Percentile of the latency that --budget-ms bounds.", metavar="N", panel=QUESTIONS
    )
    bound_ms: float | None = setting(
        None, help="Finds the highest rate of arrivals whose p99 stays within these milliseconds.", above=0,
        panel=QUESTIONS,
    )  # fmt: skip
    price_per_core_hour: float | None = setting(
        None, help="In any currency; gives the price of a million texts.", above=0, panel=QUESTIONS
    )
    sweep: bool = setting(False, help="Try every split of the cores into threads and processes.", panel=QUESTIONS)
    against: Path | None = setting(
        None,
        help="A report.json of before: its models run again beside these; slower ends with exit code 3.",
        metavar="FILE",
        panel=QUESTIONS,
    )
    paper: bool = setting(
        False, help="Time the papers' teacher and students (random weights) beside their figures.", panel=QUESTIONS
    )

    def __post_init__(self) -> None:
        check(self)
