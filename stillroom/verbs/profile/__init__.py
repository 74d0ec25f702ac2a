"""Latency and accuracy of models side by side, on this machine.

Names the best model, precision and runtime within a budget.

MODELS are bundles, checkpoint folders and .onnx files; the others are compared with the first. Candidates take turns, each
in its own process, until the intervals of their ratios are narrow or the time is up.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from compress.settings import Output, RowColumns, Seed
from latency.candidates.candidate import Runtime
from serve.bundle.runtimes import Device
from serve.errors import BadInput, GateMissed
from serve.observe.logs import plain
from serve.options import again, make, setting
from stillroom.console import KEPT, result
from stillroom.inputs.folders import local_bundle
from stillroom.settings import Timing
from stillroom.verb import Argument, Document, FolderOrUrl, Verb

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
    threads: int = again(Timing, "threads")
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
    price_per_core_hour: float | None = setting(
        None, help="Price of a core-hour in any currency; gives that of a million texts.", above=0
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


def profile(models: Sequence[Path | str] | Path | str, **settings: Any) -> dict[str, Any]:
    """Time bundles (folders or URLs), checkpoints and ONNX files side by side on real text, with their metric and what they cost.

    The others are compared with the first. Settings are the fields of `Profiling`: data, device, seconds, budget_ms, and so on.
    Returns the document that `stillroom profile --json` prints. Raises BadInput: a model, the file or a setting cannot be used.
    """
    return _profile(models, "", settings)


def _from_command_line(models: tuple[Path | str, ...], **settings: Any) -> Document:
    return _profile(models, " ".join(["stillroom", *map(shlex.quote, sys.argv[1:])]), settings)


def _profile(models: Sequence[Path | str] | Path | str, command: str, settings: dict[str, Any]) -> Document:
    from stillroom.verbs.profile.papers_table import profile_paper
    from stillroom.verbs.profile.run import profile_models

    chosen = make(Profiling, settings, verb="profile")
    models = [models] if isinstance(models, str | Path) else list(models)
    if not chosen.paper:
        return dict(profile_models([*map(local_bundle, models)], chosen, command))
    if models or chosen.against:
        raise BadInput("--paper makes its own models; leave MODEL and --against out.")
    return dict(profile_paper(chosen, command))


def show_profile(document: Document) -> None:
    """Prints the report's table, its answers, and the comparisons with an earlier report."""
    from stillroom.report.profile_page import answer_lines, profile_markdown
    from stillroom.verbs.profile.papers_table import paper_markdown
    from stillroom.verbs.profile.speed_regression import regression_lines

    paper = "paper" in document
    report = paper_markdown(document["paper"]) if paper else profile_markdown(document)
    sys.stdout.write(plain(report, KEPT))
    lines = [] if paper else [*answer_lines(document), *regression_lines(document.get("regression", []))]
    for line in lines:
        result(line)
    if "report" in document:
        result(f"Report  {document['report']}")


def gate_of_profile(document: Document) -> None:
    """Checks the comparisons with an earlier report. Raises GateMissed: a model is slower than before, beyond the interval."""
    gates = document.get("gates", [])
    if missed := [gate for gate in gates if not gate["passed"]]:
        raise GateMissed(f"{len(missed)} of {len(gates)} comparisons: slower than before, beyond the interval.")


VERB = Verb(
    "profile",
    _from_command_line,
    Profiling,
    help=__doc__,
    arguments=(
        Argument(
            "models",
            "Bundles (folders or URLs), checkpoint folders and .onnx files; the others are compared with the first.",
            nargs=-1,
            type=FolderOrUrl(),
        ),
    ),
    show=show_profile,
    then=gate_of_profile,
    examples=(
        "stillroom profile my_teacher ner.bundle --data my-data \\\n      --out timings --budget-ms 5",
        "stillroom profile ner.bundle --against timings/report.json --out again",
        "stillroom profile --paper",
    ),
)
