"""Models side by side: the best model, precision and runtime within a budget on this machine, and the costs."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.data.columns import columns_of
from compress.input_errors import Faults
from compress.models.configurations import LONGEST_TEXT
from latency.analysis.costs import Point, add_costs, pareto_front, within_budget
from latency.analysis.roofline import measured_peaks
from latency.candidates.candidate import Candidate
from latency.measure.interleave import start_workers
from latency.measure.machine import machine_facts
from latency.profile import Plan, Timed, grid, time_all, work_of
from latency.scenarios import sweep
from serve.bundle.cpu import available_cores
from serve.bundle.runtimes import Device
from serve.errors import BadInput
from serve.files import path_beside
from serve.text.tokenizer import load_tokenizer
from stillroom.console import bar, say
from stillroom.inputs.folders import check_out_folder
from stillroom.report.pages import can_write_pages, write_page, write_text
from stillroom.report.profile_page import profile_markdown, profile_page
from stillroom.verbs.profile import Profiling
from stillroom.verbs.profile.models import ON_CUDA_ALONE, Ways, candidates_of, check_model, task_of
from stillroom.verbs.profile.speed_regression import (
    BEFORE,
    given_models,
    models_of,
    named_before,
    refuse_strangers,
    regressions,
    speed_gates,
)
from stillroom.verbs.profile.texts import TIMED_TEXTS, Given, given_texts, metrics_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILES = ("report.html", "report.json", "table.md")  # what `write_profile` writes, and may replace
PEAKS_S = 6.0  # for the peaks of the machine; at most a tenth of `seconds`
UNENDED = "This report was written before the measurement ended; later parts are missing."
LENGTHS = (16, 128)  # tokens: a short message, a paragraph
SWEEP_SECONDS = 3.0  # per split of the cores and candidate


def ways_of(settings: Profiling) -> Ways:
    """The devices and runtimes to run the models in: the given devices, or those that the given runtimes need.

    Raises BadInput: a runtime runs only on CUDA, and `device` is only the CPU.
    """
    on_cuda = [runtime for runtime in settings.runtimes if runtime in ON_CUDA_ALONE]
    if on_cuda and settings.device == ("cpu",):
        raise BadInput(f"--runtimes {','.join(on_cuda)} needs cuda, and --device is cpu; give --device cuda.")
    devices: tuple[Device, ...] = ("cpu", "cuda") if on_cuda else ("cpu",)
    threads = settings.threads or available_cores()
    return Ways(settings.device or devices, settings.runtimes, settings.precisions, threads, settings.paper)


def grid_plan(settings: Profiling) -> Plan:
    """What is measured, and for how long."""
    return Plan(settings.batches, settings.lengths, settings.seconds, settings.tight, settings.bound_ms, operators=True)


def profile_models(models: Sequence[Path], settings: Profiling, command: str = "") -> dict[str, Any]:
    """Times `models` side by side, with their costs; the document that `stillroom profile --json` prints.

    With a folder `out`, the report is written there after each part, so that a killed call loses no finished part. Exported
    graphs of checkpoints stay beside it. The models of the earlier report `against` run too, and `regression` in the document
    compares with them. `command` is the command that the page shows for repeating the measurement. Raises BadInput: a model, the
    texts or a setting cannot be used, or no requested runtime works on this machine.
    """
    machine = machine_facts()  # before any work, which would count as load of the machine
    if not models:
        raise BadInput("No model was given to profile. Give bundles, checkpoint folders or .onnx files, or --paper.")
    faults = Faults()
    if settings.out:
        faults.check(partial(check_out_folder, settings.out, FILES, beside=True))
    for model in models:
        faults.check(partial(check_model, model))
    if settings.data and not Path(settings.data).exists():
        faults.messages.append(f"--data {settings.data} does not exist. Give a file of texts, or a folder of splits.")
    faults.raise_if_any()
    earlier = models_of(settings.against) if settings.against else []
    tasks = {task for model in (*models, *earlier) if (task := task_of(model))}
    with ExitStack() as stack:
        if settings.out:  # graphs that are exported stay there for later calls
            place = path_beside(settings.out, ".work")
        else:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stillroom-")))
        given = given_texts(settings.data, tasks.pop() if len(tasks) == 1 else None, columns_of(settings)).drawn(
            settings.seed
        )
        now = found_here(models, settings, place, given.calibration)
        before = found_here(earlier, settings, place, given.calibration)
        refuse_nothing(now, settings)
        if settings.against:
            refuse_strangers(now.candidates, before.candidates)
        left_out = list(dict.fromkeys([*now.left_out, *before.left_out]))
        for line in left_out:
            say(f"left out: {line}")
        candidates = [*now.candidates, *named_before(before.candidates)]
        exported = any(candidate.path.is_relative_to(place) for candidate in candidates)
        if exported and given.examples and not given.calibrated_apart:
            given.notes.append(
                "int8 graphs of checkpoints were calibrated on the texts that they were scored on. Give --data a folder of splits to "
                "calibrate on train."
            )
        say(
            f"timing takes about {settings.seconds:g} s, or longer until each of {len(candidates)} candidates has run 6 turns; loading, "
            "scoring and measuring the machine's peaks take extra time"
        )
        known = known_parts(machine, left_out, command, settings) | {"given": given_models(models)}
        origins = dict(zip([each.name for each in candidates], [*now.models, *before.models], strict=True))
        return _profiled(candidates, origins, given, settings, known)


class Found(NamedTuple):
    """What can be timed here."""

    candidates: list[Candidate]
    models: list[Path]  # the given model of each candidate
    left_out: list[str]  # what is not timed, and why


def found_here(models: Sequence[Path], settings: Profiling, work: Path, calibration: Sequence[str]) -> Found:
    """The candidates of `models`. BadInput for a model that no requested device and runtime can run on any machine."""
    found = Found([], [], [])
    for model in models:
        lacks: list[str] = []
        own = candidates_of(model, ways_of(settings), work, calibration, say, lacks.append)
        if not own and not lacks:
            raise BadInput(
                f"{model} cannot be run with {_asked(settings)}. Change these flags, or leave the model out."
            )
        found.candidates.extend(own)
        found.models.extend([model] * len(own))
        found.left_out.extend(line for line in dict.fromkeys(lacks) if line not in found.left_out)
    return found


def refuse_nothing(found: Found, settings: Profiling) -> None:
    """Raises BadInput with what was left out and why, if there is no candidate."""
    if not found.candidates:
        raise BadInput(f"No model can be run here with {_asked(settings)}. {'; '.join(found.left_out)}.")


def _asked(settings: Profiling) -> str:
    """The flags that choose devices, runtimes and precisions."""
    ways = ways_of(settings)
    asked = {"device": ways.devices, "runtimes": ways.runtimes, "precisions": ways.precisions}
    return ", ".join(f"--{name} {','.join(given)}" for name, given in asked.items() if given)


def known_parts(machine: dict[str, Any], left_out: list[str], command: str, settings: Profiling) -> dict[str, Any]:
    """The parts of a document that do not depend on measurements."""
    known: dict[str, Any] = {"machine": machine}
    if left_out:
        known["left_out"] = left_out
    if command:
        known["command"] = command
    if settings.out:
        known["report"] = str(Path(settings.out) / ("report.html" if can_write_pages() else "table.md"))
    return known


def keep(document: dict[str, Any], settings: Profiling, *, ended: bool = False) -> dict[str, Any]:
    """`document`, written into the folder `out`, if given; unless the measurement has `ended`, with a warning that it has not."""
    if not ended:
        document = {**document, "warnings": [*document.get("warnings", []), UNENDED]}
    if settings.out:
        write_profile(Path(settings.out), document)
    return document


def _profiled(
    candidates: Sequence[Candidate],
    origins: Mapping[str, Path],
    given: Given,
    settings: Profiling,
    known: dict[str, Any],
) -> dict[str, Any]:
    """`known` with all measurements; after each part, the document so far is kept."""
    settings = with_lengths(settings, candidates)
    tokenizer, notes = _tokenizer_for_all(candidates)
    plan = grid_plan(settings)
    workloads = grid(given.plain, tokenizer, plan)
    work = work_of(given.texts[:TIMED_TEXTS], tokenizer, given.source)
    known = {**known, "work": work, "warnings": [*given.notes, *notes]}
    with ExitStack() as stack:
        with bar("loading") as shown:
            workers = stack.enter_context(start_workers(candidates, workloads, given.texts, shown, cold_starts=True))
        with bar("scoring") as shown:
            metrics, refused = metrics_of(workers, given, shown)

        def so_far(timed: Timed) -> dict[str, Any]:
            return _document(known, timed, origins, metrics, refused, settings)

        with bar("timing") as shown:
            texts = min(TIMED_TEXTS, len(given.texts))
            timed = time_all(
                workers, workloads, texts, plan, seed=settings.seed, progress=shown,
                keep=lambda timed: keep(so_far(timed), settings),
            )  # fmt: skip
    known["peaks"] = measured_peaks(ways_of(settings).threads, min(PEAKS_S, settings.seconds / 10))
    add_costs(timed.models, candidates, work, known["peaks"], settings.price_per_core_hour)
    if settings.sweep:
        keep(so_far(timed), settings)
        known["sweep"] = []
        for candidate in candidates:  # each graph on the CPU, at every split of the cores into threads and processes
            if candidate.device == "cpu" and not candidate.runtime.startswith("torch"):
                with bar(f"threads of {candidate.name}") as shown:
                    known["sweep"] += sweep(
                        candidate, workloads[0], cores=available_cores(), seconds=SWEEP_SECONDS, seed=settings.seed, progress=shown,
                    )  # fmt: skip
    return keep(so_far(timed), settings, ended=True)


def _document(
    known: dict[str, Any],
    timed: Timed,
    origins: Mapping[str, Path],
    metrics: Mapping[str, dict[str, Any]],
    refused: Mapping[str, str],
    settings: Profiling,
) -> dict[str, Any]:
    """`known` with the times, the Pareto front, the answer to the budget and the comparisons with an earlier report.

    Front and budget are without the models of that report.
    """
    for name, row in timed.models.items():
        row["model"] = str(origins[name])
        if name in metrics:
            row["metric"] = metrics[name]
        if name in refused and refused[name] not in row["notes"]:
            row["notes"].append(refused[name])
    for each in timed.candidates:
        if each["name"] in metrics:
            each["metric"] = metrics[each["name"]]["value"]
    document: dict[str, Any] = {
        **known,
        "candidates": timed.candidates,
        "ratios": timed.ratios,
        "models": list(timed.models.values()),
    }
    models = [model for model in document["models"] if not model["name"].endswith(BEFORE)]
    if any("single_stream" in model for model in models):  # a model that reads no text has no such time
        models = [model for model in models if "single_stream" in model]
    document["front"] = pareto_front([_point(document, model, 50) for model in models])
    if settings.budget_ms is not None:
        points = [_point(document, model, settings.percentile) for model in models]
        document["budget"] = within_budget(points, settings.budget_ms, settings.percentile)
    if any(name.endswith(BEFORE) for name in timed.models):
        document["regression"] = regressions(document)
        document["gates"] = speed_gates(document["regression"])
    return document


def with_lengths(settings: Profiling, candidates: Sequence[Candidate]) -> Profiling:
    """`settings` with the lengths of the grid: the given ones, or LENGTHS cut to what all candidates take.

    Raises BadInput: a given length is longer than a candidate takes.
    """
    limits = [(each.max_length, each.name) for each in candidates if each.max_length is not None]
    most, name = min(limits, default=(max(LENGTHS), ""))
    if not settings.lengths:
        return replace(settings, lengths=tuple(dict.fromkeys(min(length, most) for length in LENGTHS)))
    if limits and max(settings.lengths) > most:
        raise BadInput(
            f"--lengths has {max(settings.lengths)} tokens, and {name} takes at most {most}. Give lengths up to {most}."
        )
    return settings


def _tokenizer_for_all(candidates: Sequence[Candidate]) -> "tuple[Tokenizer, list[str]]":
    """The tokenizer for the grid's rows: the one with the smallest vocabulary, whose ids are valid in all models."""
    folders = {candidate.reads.folder: candidate.max_length for candidate in candidates if candidate.reads}
    if not folders:
        raise BadInput(
            "No model has a tokenizer.json and a config.json of a model with a head beside it, so none can answer texts. "
            "Give at least one that has."
        )
    tokenizers = [load_tokenizer(folder, length or LONGEST_TEXT) for folder, length in folders.items()]
    smallest = min(tokenizers, key=lambda each: each.get_vocab_size())
    several = len({each.get_vocab_size() for each in tokenizers}) > 1
    note = "The models have different vocabularies: rows of the grid are tokenised with the smallest one, texts with each model's own."
    return smallest, [note] if several else []


def _point(document: dict[str, Any], model: dict[str, Any], percentile: int) -> Point:
    """The end-to-end latency where it was timed, else that of the grid's first workload."""
    key = f"p{percentile}_ms"
    times: Any = model.get("single_stream") or next(
        row for row in document["candidates"] if row["name"] == model["name"]
    )
    metric = model.get("metric")
    interval_ms = times["intervals_ms"].get(f"p{percentile}")
    low_ms, high_ms = interval_ms or (None, None)
    return Point(model["name"], float(times[key]), metric["value"] if metric else None, low_ms, high_ms)


def write_profile(out: Path, document: dict[str, Any]) -> None:
    """Writes report.html, report.json with every raw sample, and table.md into the folder `out`, each in one step.

    Without Jinja2, the page is left out and a message is printed.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_page(out / "report.html", partial(profile_page, document))
    write_text(out / "report.json", json.dumps(document, indent=1))
    write_text(out / "table.md", profile_markdown(document))
