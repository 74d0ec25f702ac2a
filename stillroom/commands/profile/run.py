"""`stillroom profile`: which model, at which precision, in which runtime, meets a budget here, and what it costs."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compress.data.columns import USUAL, Columns, columns_of
from compress.data.examples import Example, check_kind
from compress.data.labelled_files import read_examples
from compress.data.splits import split_file
from compress.data.texts import read_texts
from compress.evaluation.metrics import gold_of, metric_name, prediction_of, score
from compress.input_errors import Faults
from latency.analysis.costs import add_costs
from latency.analysis.pareto import Point, pareto_front, within_budget
from latency.analysis.roofline import measured_peaks
from latency.candidates.candidate import Candidate
from latency.measure.interleave import Progress, Worker, at_work
from latency.measure.machine import machine_facts
from latency.measure.result_document import Metric, ModelRow, ProfileDocument, SweepRow
from latency.measure.workloads import Workload
from latency.profile import Plan, grid, time_all, time_grid, work_of
from latency.scenarios.sweep import sweep
from serve.bundle.cpu_quota import available_cores
from serve.errors import BadInput
from serve.text.entity_markers import knows_markers
from serve.text.tokenizer import load_tokenizer
from stillroom.commands.profile.models import LONGEST, Ways, candidates_of, check_model, task_of
from stillroom.commands.profile.papers_table import make_models, paper_rows, random_texts, runtimes
from stillroom.commands.profile.speed_regression import (
    BEFORE,
    given_models,
    models_of,
    named_before,
    refuse_strangers,
    regressions,
)
from stillroom.console import bar, say
from stillroom.report.profile_page import profile_markdown, profile_page
from stillroom.report.run_page import write_page
from stillroom.settings.profile import Profiling, TorchPrecision

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TIMED_TEXTS = 1_000  # of those given; all are scored
SAMPLE_TEXTS = 400  # of the built-in sample
PEAKS_S = 6.0  # for the peaks of the machine, or a tenth of the time that is given where that is less
SWEEP_SECONDS = 3.0  # of each way to spend the cores, of each candidate


def ways_of(settings: Profiling) -> Ways:
    """In what the models are run. BadInput where OpenVINO was asked for and is not installed."""
    return Ways(settings.device, settings.runtimes, settings.precisions, settings.threads or available_cores())


def grid_plan(settings: Profiling) -> Plan:
    """What is measured, and for how long."""
    return Plan(settings.batches, settings.lengths, settings.seconds, settings.tight, settings.bound_ms, operators=True)


@dataclass(frozen=True)
class Given:
    """The texts that are timed and scored."""

    texts: list[str | tuple[str, str]]
    source: str
    calibration: list[str]
    """What a checkpoint's int8 graph is calibrated on."""
    examples: list[Example] | None
    """With labels, one for each text; None: without."""
    notes: list[str]
    calibrated_apart: bool
    """Whether `calibration` is a split of its own."""

    @property
    def plain(self) -> list[str]:
        """The texts without their pairs."""
        return [text if isinstance(text, str) else text[0] for text in self.texts]


def profile_models(
    models: Sequence[Path], settings: Profiling, *, work: Path | None = None, against: Path | None = None
) -> ProfileDocument:
    """Times `models` side by side, and says what each costs; the document that `stillroom profile --json` prints.

    Graphs that checkpoints are exported to stay in `work`, where it is given. The models of the earlier report `against` run
    too, and the document's `regression` says what is slower. Raises BadInput for models, texts or settings that cannot be used.
    """
    if not models:
        raise BadInput("No model was given to profile. Give bundles, checkpoint folders or .onnx files, or --paper.")
    ways = ways_of(settings)
    _check_there(models, settings.data)
    earlier = models_of(against) if against else []
    with ExitStack() as stack:
        place = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stillroom-")))
        given = given_texts(settings.data, _task_of([*models, *earlier]), columns_of(settings))
        now: list[Candidate] = []
        before: list[Candidate] = []
        origins: dict[str, str] = {}
        for model in models:
            found = candidates_of(model, ways, place, given.calibration, say)
            if not found:
                raise BadInput(
                    f"{model} cannot be run with --device {','.join(settings.device)}"
                    f"{' and --runtimes ' + ','.join(settings.runtimes) if settings.runtimes else ''}"
                    f" and --precisions {','.join(settings.precisions)}. Give others, or leave it out."
                )
            now += found
            origins |= {candidate.name: str(model) for candidate in found}
        for model in earlier:
            found = named_before(candidates_of(model, ways, place, given.calibration, say))
            before += found
            origins |= {candidate.name: str(model) for candidate in found}
        if against:
            refuse_strangers(now, before)
        exported = any(candidate.path.is_relative_to(place) for candidate in [*now, *before])
        if exported and given.examples and not given.calibrated_apart:
            given.notes.append(
                "int8 graphs of checkpoints were calibrated on the texts that they were scored on. Give --data the folder of splits, "
                "so that train calibrates."
            )
        say(
            f"timing takes about {settings.seconds:g} s, and six turns of each of {len(now) + len(before)} candidates at least; loading, "
            "scoring and the machine's peak come on top"
        )
        document = _profiled([*now, *before], origins, given, settings)
    document["given"] = given_models(models)
    if against:
        document["regression"] = regressions(document)
    return document


def profile_paper(settings: Profiling) -> ProfileDocument:
    """The papers' teacher and students, of random weights, as rows of tokens; `paper` holds ours beside theirs."""
    with tempfile.TemporaryDirectory(prefix="stillroom-") as folder:
        say("paper: making 12x768, 6x768, 6x384, 4x576 and 3x384 of random weights")
        models = make_models(Path(folder) / "models")
        precisions: tuple[TorchPrecision, ...] = ("fp32", "fp16") if "cuda" in settings.device else ("fp32",)
        ways = ways_of(
            replace(settings, runtimes=settings.runtimes or runtimes(settings.device), precisions=precisions)
        )
        texts = random_texts(settings.seed)
        candidates = [
            replace(candidate, reads=None)
            for model in models
            for candidate in candidates_of(model, ways, Path(folder), texts, say)
        ]
        tokenizer = load_tokenizer(models[0], LONGEST)
        plan = replace(grid_plan(settings), batches=(1,))
        with bar("timing") as shown:
            document = time_grid(candidates, texts, tokenizer, plan, seed=settings.seed, progress=shown)
    document["paper"] = paper_rows(document)
    return document


def _check_there(models: Sequence[Path], data: str) -> None:
    """Nothing, when all models and the texts are there; otherwise all that are not, in one message."""
    faults = Faults()
    for model in models:
        faults.check(partial(check_model, model))
    if data and not Path(data).exists():
        faults.messages.append(f"--data {data} does not exist. Give a file of texts, or a folder of splits.")
    faults.raise_if_any()


def _profiled(
    candidates: Sequence[Candidate], origins: Mapping[str, str], given: Given, settings: Profiling
) -> ProfileDocument:
    machine = machine_facts()  # before the measuring, which would be the load that it sees
    _check_lengths(candidates, settings.lengths)
    tokenizer, notes = _tokenizer_for_all(candidates)
    plan = grid_plan(settings)
    workloads = grid(given.plain, tokenizer, plan)
    with ExitStack() as stack:
        with bar("loading") as shown:
            workers = stack.enter_context(at_work(candidates, workloads, given.texts, shown, cold_starts=True))
        with bar("scoring") as shown:
            metrics, refused = _metrics(workers, given, shown)
        with bar("timing") as shown:
            timed = min(TIMED_TEXTS, len(given.texts))
            rows, ratios, models = time_all(workers, workloads, timed, plan, seed=settings.seed, progress=shown)
    swept = _sweep(candidates, workloads[0], settings) if settings.sweep else []
    work = work_of(given.texts[:TIMED_TEXTS], tokenizer, given.source)
    peaks = measured_peaks(ways_of(settings).threads, min(PEAKS_S, settings.seconds / 10))
    add_costs(models, candidates, work, peaks, settings.price_per_core_hour)
    for name, row in models.items():
        row["model"] = origins[name]
        if name in metrics:
            row["metric"] = metrics[name]
        if name in refused:
            row["notes"].append(refused[name])
    for each in rows:
        if each["name"] in metrics:
            each["metric"] = metrics[each["name"]]["value"]
    document = ProfileDocument(
        machine=machine,
        candidates=rows,
        ratios=ratios,
        models=list(models.values()),
        work=work,
        peaks=peaks,
        warnings=[*given.notes, *notes],
    )
    if swept:
        document["sweep"] = swept
    _choose(document, settings)
    return document


def _sweep(candidates: Sequence[Candidate], workload: Workload, settings: Profiling) -> list[SweepRow]:
    """Every way to spend the cores on each graph that a processor runs."""
    rows: list[SweepRow] = []
    for candidate in candidates:
        if candidate.device == "cpu" and not candidate.runtime.startswith("torch"):
            with bar(f"threads of {candidate.name}") as shown:
                seconds, seed = SWEEP_SECONDS, settings.seed
                rows += sweep(candidate, workload, cores=available_cores(), seconds=seconds, seed=seed, progress=shown)
    return rows


def given_texts(data: str, task: str | None, columns: Columns = USUAL) -> Given:
    """What is timed: the texts of the file `data`, or of the test split in the folder `data`, with labels where it has them.

    int8 graphs made only to be timed are calibrated on the folder's train split, else on the texts themselves. Without
    `data` the texts are messages to a shop's support, which this program makes. BadInput for a file without texts.
    """
    if not data:
        from stillroom.inputs.sample_texts.messages import support_messages

        seen: set[str] = set()
        texts = [message["text"] for message in support_messages("test", SAMPLE_TEXTS, 0, seen)]
        train = [message["text"] for message in support_messages("train", SAMPLE_TEXTS, 0, seen)]
        note = "No --data was given: the texts are generated messages to a shop's support, so there is no metric."
        return Given(list(texts), "generated support messages", train, None, [note], calibrated_apart=True)
    path = Path(data)
    folder, file = (path, _split(path, "test")) if path.is_dir() else (None, path)
    examples, notes = _labelled(file, task, columns)
    texts_or_pairs: list[str | tuple[str, str]] = (
        [example.text_or_pair for example in examples] if examples else list(read_texts(file, columns))
    )
    if folder:
        to_calibrate = _split(folder, "train")
        labelled, _ = _labelled(to_calibrate, task, columns)
        calibration = [example.text_read for example in labelled] if labelled else read_texts(to_calibrate, columns)
    else:
        calibration = [text if isinstance(text, str) else text[0] for text in texts_or_pairs]
    return Given(texts_or_pairs, file.name, calibration, examples, notes, calibrated_apart=folder is not None)


def _split(folder: Path, name: str) -> Path:
    found = split_file(folder, name)
    if not found:
        raise BadInput(f"--data {folder} has no file {name}.*; give a folder of splits, or one file.")
    return found


def _labelled(file: Path, task: str | None, columns: Columns) -> tuple[list[Example] | None, list[str]]:
    """The examples of `file` where it has labels for `task`, and what to say where it has not."""
    if task is None:
        return None, ["The models have no head for one task, so there is no metric."]
    try:
        examples = read_examples(file, cast(Any, task), columns)
    except BadInput as error:
        if file.suffix != ".txt":
            return None, [
                f"No metric: {file.name} has no labels for {task} ({error.message.splitlines()[-1].strip()})."
            ]
        return None, [f"No metric: {file.name} is plain text."]
    return examples, []


def _task_of(models: Sequence[Path]) -> str | None:
    """The task that all `models` with a head share; None where there is none, or more than one."""
    tasks = {task for model in models if (task := task_of(model))}
    return tasks.pop() if len(tasks) == 1 else None


def _check_lengths(candidates: Sequence[Candidate], lengths: Sequence[int]) -> None:
    for candidate in candidates:
        if candidate.max_length is not None and max(lengths) > candidate.max_length:
            raise BadInput(
                f"--lengths asks for {max(lengths)} tokens, and {candidate.name} takes {candidate.max_length} at most. "
                "Give lengths up to that."
            )


def _tokenizer_for_all(candidates: Sequence[Candidate]) -> "tuple[Tokenizer, list[str]]":
    """The tokenizer that makes the grid's rows: of several that of the fewest tokens, whose ids all models know."""
    folders = {candidate.reads.folder: candidate.max_length for candidate in candidates if candidate.reads}
    if not folders:
        raise BadInput(
            "None of the models has both a tokenizer.json and a head with labels beside it, so no text can be given to them."
        )
    tokenizers = [load_tokenizer(folder, length or LONGEST) for folder, length in folders.items()]
    smallest = min(tokenizers, key=lambda each: each.get_vocab_size())
    several = len({each.get_vocab_size() for each in tokenizers}) > 1
    note = (
        "The models do not share a vocabulary: rows of the grid are cut by the smallest one, texts by each model's own."
    )
    return smallest, [note] if several else []


def _metrics(
    workers: Mapping[str, Worker], given: Given, progress: Progress
) -> tuple[dict[str, Metric], dict[str, str]]:
    """The task metric of every candidate that reads text, answered by the processes that are timed.

    And by name why there is none, where a candidate answers in another kind of labels.
    """
    found: dict[str, Metric] = {}
    refused: dict[str, str] = {}
    if given.examples is None:
        return found, refused
    for i, (name, worker) in enumerate(workers.items()):
        progress(i, len(workers), name)
        reads = worker.candidate.reads
        if reads is None:
            continue
        if reads.task == "text-classification":
            markers = knows_markers(load_tokenizer(reads.folder, LONGEST))
            try:
                check_kind(given.examples, name, multi_label=reads.multi_label, markers=markers)
            except BadInput as error:
                refused[name] = f"No metric: {error.message}"
                continue
        gold = [gold_of(example, reads.task) for example in given.examples]
        said = [prediction_of(answer, multi_label=reads.multi_label) for answer in worker.answers()]
        reached = score(gold, said)
        kind = metric_name(reads.task, multi_label=reads.multi_label)
        found[name] = Metric(
            name=kind, value=reached.value, low=reached.low, high=reached.high, examples=len(given.examples)
        )
    return found, refused


def _choose(document: ProfileDocument, settings: Profiling) -> None:
    """Adds the Pareto front, and the answer to the budget; models of before are there to be compared with, not to be taken."""
    models = [model for model in document["models"] if not model["name"].endswith(BEFORE)]
    if any("single_stream" in model for model in models):  # what reads no text was timed on something else
        models = [model for model in models if "single_stream" in model]
    document["front"] = pareto_front([_point(document, model, 50) for model in models])
    if settings.budget_ms is not None:
        points = [_point(document, model, settings.percentile) for model in models]
        document["budget"] = within_budget(points, settings.budget_ms, settings.percentile)


def _point(document: ProfileDocument, model: ModelRow, percentile: int) -> Point:
    """From end to end where that was timed, else of the grid's first workload."""
    key = f"p{percentile}_ms"
    times: Any = model.get("single_stream") or next(
        row for row in document["candidates"] if row["name"] == model["name"]
    )
    metric = model.get("metric")
    interval_ms = times["intervals_ms"].get(f"p{percentile}")
    low_ms, high_ms = interval_ms or (None, None)
    return Point(model["name"], float(times[key]), metric["value"] if metric else None, low_ms, high_ms)


def write_profile(out: Path, document: ProfileDocument) -> None:
    """Writes report.html, report.json with every raw sample, and table.md into the folder `out`, each in one step."""
    out.mkdir(parents=True, exist_ok=True)
    write_page(out / "report.html", profile_page(document))
    write_page(out / "report.json", json.dumps(document, indent=1))
    write_page(out / "table.md", profile_markdown(document))
