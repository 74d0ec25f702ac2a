"""The settings of `stillroom profile`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from compress.settings import Output, RowColumns, Seed
from latency.candidates.candidate import Runtime
from serve.bundle.runtimes import Device
from serve.options import again, setting
from stillroom.settings.capacity import Capacity
from stillroom.settings.export import Exporting

TorchPrecision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Profiling(RowColumns):
    """The settings of `stillroom profile`."""

    data: str = setting(
        "",
        help="Texts to time on, with labels for a metric too; of a folder of splits, the split test.",
        shown="a built-in sample",
        metavar="FILE",
    )
    out: str = again(
        Output, "out", "", help="Folder for report.html, report.json and table.md; graphs stay in OUT.work."
    )
    device: tuple[Device, ...] = setting((), help="Where models run.", shown="cpu, and cuda where a runtime needs it")
    runtimes: tuple[Runtime, ...] = setting(
        (),
        help="Runtimes that run the models.",
        shown="what each model pins; torch and onnxruntime for checkpoints",
    )
    precisions: tuple[TorchPrecision, ...] = setting(
        (), help="Arithmetic of models in torch.", shown="fp32; with --paper fp16 too on cuda"
    )
    threads: int = again(Exporting, "threads")
    seed: int = again(Seed, "seed", help="Seed of the choice of texts and of every order.", at_most=None)
    batches: tuple[int, ...] = setting((1, 8), help="Texts a call.", at_least=1)
    lengths: tuple[int, ...] = setting(
        (), help="Tokens a text.", at_least=1, shown="16,128, cut to what the models take"
    )
    seconds: float = setting(
        120.0,
        help="Seconds of timing, after exports, loading and scoring; every model runs at least six turns.",
        above=0,
    )
    tight: float = setting(0.02, help="Timing ends when speed-ups are known to plus or minus this share.", above=0)
    budget_ms: float | None = setting(
        None,
        help="Milliseconds that one text may take; the report names the best model within them.",
        above=0,
    )
    percentile: Literal[50, 90, 95, 99] = setting(
        99, help="Percentile of the latency that --budget-ms bounds.", metavar="N"
    )
    bound_ms: float | None = setting(
        None, help="Milliseconds that p99 must stay within; searches for the highest such rate of arrivals.", above=0,
    )  # fmt: skip
    price_per_core_hour: float | None = again(
        Capacity, "price_per_core_hour", help="Price of a core-hour in any currency; gives that of a million texts."
    )
    sweep: bool = setting(False, help="Try every split of the cores into threads and processes.")
    against: Path | None = setting(
        None,
        help="An earlier report.json, whose models run again beside these; exit code 3 if one is slower.",
        metavar="FILE",
    )
    paper: bool = setting(False, help="Time the papers' teacher and students (random weights) beside their figures.")
    layout: ClassVar = {
        "What to measure": "data out device runtimes precisions threads seed",
        "Grid": "batches lengths seconds tight",
        "Questions": "budget_ms percentile bound_ms price_per_core_hour sweep against paper",
    }
