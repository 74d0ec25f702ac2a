"""The settings of `stillroom profile`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compress.settings import ALL_CORES, RowColumns
from latency.candidates.candidate import Runtime
from serve.bundle.runtimes import Device
from serve.options import check, setting

TorchPrecision = Literal["fp32", "bf16", "fp16"]
WHAT, GRID, QUESTIONS = "What to measure", "Grid", "Questions"


@dataclass(frozen=True, kw_only=True)
class Profiling(RowColumns):
    """The settings of `stillroom profile`."""

    data: str = setting(
        "",
        help="Texts to time on, with labels for a metric too; of a folder of splits, the split test.",
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
    seed: int = setting(0, help="Seed of the choice of texts and of every order.", at_least=0, panel=WHAT)
    batches: tuple[int, ...] = setting((1, 8), help="Texts a call.", at_least=1, panel=GRID)
    lengths: tuple[int, ...] = setting(
        (), help="Tokens a text.", at_least=1, shown="16,128, cut to what the models take", panel=GRID
    )
    seconds: float = setting(
        120.0,
        help="Seconds of timing, after exports, loading and scoring; every model runs at least six turns.",
        above=0,
        panel=GRID,
    )
    tight: float = setting(
        0.02, help="Timing ends when speed-ups are known to plus or minus this share.", above=0, panel=GRID
    )
    budget_ms: float | None = setting(
        None,
        help="Milliseconds that one text may take; the report names the best model within them.",
        above=0,
        panel=QUESTIONS,
    )
    percentile: Literal[50, 90, 95, 99] = setting(
        99, help="Percentile of the latency that --budget-ms bounds.", metavar="N", panel=QUESTIONS
    )
    bound_ms: float | None = setting(
        None, help="Milliseconds that p99 must stay within; searches for the highest such rate of arrivals.", above=0,
        panel=QUESTIONS,
    )  # fmt: skip
    price_per_core_hour: float | None = setting(
        None, help="Price of a core-hour in any currency; gives that of a million texts.", above=0, panel=QUESTIONS
    )
    sweep: bool = setting(False, help="Try every split of the cores into threads and processes.", panel=QUESTIONS)
    against: Path | None = setting(
        None,
        help="An earlier report.json, whose models run again beside these; exit code 3 if one is slower.",
        metavar="FILE",
        panel=QUESTIONS,
    )
    paper: bool = setting(
        False, help="Time the papers' teacher and students (random weights) beside their figures.", panel=QUESTIONS
    )

    def __post_init__(self) -> None:
        check(self)
