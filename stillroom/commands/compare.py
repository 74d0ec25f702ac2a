"""`stillroom compare`: one teacher, several methods and students, equal budgets of tokens, several seeds."""

import dataclasses
import json
import multiprocessing
import re
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compress.data.corpus import tokenised
from compress.data.examples import check_task
from compress.engine import task_stages
from compress.engine.fingerprints import fingerprint, folder_fingerprint, texts_fingerprint, trained_with
from compress.engine.hardware import same_bits
from compress.engine.lineage import read_lineage
from compress.engine.method_chain import Chain, check_method_name, method_chain
from compress.engine.method_runner import RANDOM, Labelled, Link, MethodInputs, asks_words, fit_head, run_method
from compress.engine.resumable_stages import STATE, Workdir
from compress.engine.task_inputs import TaskInputs, open_task, unseen
from compress.evaluation.metrics import counts, gold_of, mean_score, score
from compress.evaluation.predictions import predictions, row_logits
from compress.input_errors import Faults
from compress.methods.catalogue import LABELS
from compress.models.pretrained import load, open_model
from compress.settings import WHERE_DATA_IS, TaskSettings
from serve.bundle.cpu_quota import available_cores
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput
from stillroom.console import bar, console, say, show
from stillroom.inputs.out_folder import check_out_folder
from stillroom.report.comparison_page import markdown, page
from stillroom.report.pages import write_page, write_text
from stillroom.settings.compare import Comparison

# What every method is compared with: the same student on labels alone, in as many steps on the task. It starts
# from new layers, from layers of the teacher as it was given, and from layers and head of the teacher fine-tuned on the task.
NEW_LAYERS, GENERAL_LAYERS, CONTROL = "labels-new-layers", "labels-general-layers", "labels"
CONTROLS = (NEW_LAYERS, GENERAL_LAYERS, CONTROL)
WRITTEN = ("work", "compare.json", "report.html", "table.md")  # in --out
STAGES = "stages"  # of one row under way
STUDENT = "student"  # the checkpoint of a finished one


class Row(NamedTuple):
    """One training: a method, a student, a seed."""

    method: str
    student: str
    seed: int

    def __str__(self) -> str:
        return f"{self.method}, {self.student}, seed {self.seed}"


def compare(given: Comparison) -> dict[str, Any]:
    """Train every method on every student with every seed, and score each; the document that `--json` prints.

    Methods that begin on plain text start from the given teacher, and end with training on labels. Methods that begin on the
    task start from the teacher fine-tuned on it. All read the same number of tokens of the task's text, and plain text on top.
    Finished rows and their students are kept, so a stopped comparison resumes, and methods can be added.

    Raises:
        BadInput: anything wrong with what was given, before any training.
    """
    given = dataclasses.replace(
        given, methods=tuple(dict.fromkeys(given.methods)), students=tuple(dict.fromkeys(given.students))
    )
    inputs_of = _checked(given)
    inputs = next(iter(inputs_of.values()))
    out = Path(given.out)
    work = Workdir(out / "work")
    rows = [Row(m, s, seed) for s in given.students for m in _methods(given) for seed in range(given.seeds)]
    links = {row: _links(given, inputs_of[row.student], row) for row in rows}
    source = _source(given, inputs) if any(_reads_source(several) for several in links.values()) else None
    fingerprints = {row: _row_fingerprint(given, inputs_of[row.student], source, row, links[row]) for row in rows}
    with work.locked():
        same_bits(inputs.settings.threads)
        teacher = work.stage("teacher", _teacher_fingerprint(inputs), partial(_make_teacher, inputs=inputs))
        if source:
            work.stage("teacher-source", _teacher_fingerprint(source), partial(_make_teacher, inputs=source))
        if any(asks_words(link.stages) for several in links.values() for link in several):
            method_inputs = _method_inputs(given, inputs, seed=0)
            fit = partial(fit_head, given=method_inputs, tokens=given.distill_tokens)
            work.stage("teacher-head", _corpus_fingerprint(given, inputs), fit)
        waiting = [row for row in rows if not work.finished(_name(row), fingerprints[row])]
        say(f"{len(rows)} trainings, {len(rows) - len(waiting)} of them finished earlier")
        _run(given, waiting, fingerprints)
        document = _document(given, inputs_of, work, rows, read_lineage(teacher))
    for row in document["rows"]:
        for doubt in row["doubts"]:
            say(f"warning: {doubt}")
    write_text(out / "compare.json", canonical_json(document).decode())
    write_page(out / "report.html", partial(page, document))
    write_text(out / "table.md", markdown(document))
    return document


def _methods(given: Comparison) -> list[str]:
    """The controls, then the methods asked for."""
    return [*CONTROLS, *(method for method in given.methods if method not in CONTROLS)]


def _checked(given: Comparison) -> dict[str, TaskInputs]:
    """The inputs of each student. BadInput for what is wrong with them, and for methods that do not fit a student."""
    out = Path(given.out)
    check_out_folder(out, WRITTEN)
    if Path(given.teacher).resolve().is_relative_to((out / "work").resolve()):
        raise BadInput(
            f"--teacher {given.teacher} lies in {out / 'work'}, where this comparison writes. Copy it elsewhere."
        )
    names = [partial(check_method_name, method) for method in given.methods]
    inputs_of: dict[str, TaskInputs] = {}
    faults = Faults()
    for student in given.students:
        inputs_of[student] = inputs = open_task(_settings(given, student), out / "work", more_checks=names, notify=show)
        for method in given.methods:
            faults.check(partial(_check_method, method, inputs, given))
    faults.raise_if_any()
    of_methods = [w for one in inputs_of.values() for method in given.methods for w in _chain(method, one).warnings]
    for warning in dict.fromkeys([*next(iter(inputs_of.values())).warnings, *of_methods]):
        say(f"warning: {warning}")
    return inputs_of


def _check_method(method: str, inputs: TaskInputs, given: Comparison) -> None:
    """BadInput where `method` cannot work with this teacher, this student and what was given."""
    texts = _chain(method, inputs).texts
    if "corpus" in texts and not inputs.corpus:
        raise BadInput(f"--method {method} learns from plain text, and no --corpus was given. Give --corpus too.")
    if "source" in texts and not given.source_data:
        raise BadInput(
            f"--method {method} learns another task first, and no --source-data was given. Give a folder of that task's "
            "examples (and --source-task, if it differs from --task)."
        )


def _settings(given: Comparison, student: str) -> TaskSettings:
    """The settings that all rows of one student share; a row's seed changes its training, not its data."""
    return TaskSettings(
        teacher=given.teacher,
        task=given.task,
        data=given.data,
        student=student,
        corpus=given.corpus,
        threads=given.threads or max(1, available_cores() // given.jobs),
        precision=given.precision,
        max_length=given.max_length,
        batch=given.batch,
        teacher_epochs=given.teacher_epochs,
        teacher_learning_rate=given.teacher_learning_rate,
        device=given.device,
        revision=given.revision,
        **{name: getattr(given, name) for name in WHERE_DATA_IS},
    )


def _chain(method: str, inputs: TaskInputs) -> Chain:
    return method_chain(method, inputs.shape, inputs.opened.config)


def _teacher_fingerprint(inputs: TaskInputs) -> str:
    s = inputs.settings
    common = [
        s.task,
        inputs.data_fingerprint,
        s.threads,
        s.precision,
        s.batch,
        inputs.max_length,
        trained_with(s.device),
    ]
    rates = [s.teacher_epochs, s.teacher_learning_rate]
    return fingerprint("teacher", folder_fingerprint(inputs.opened.folder), *common, *rates)


def _corpus_fingerprint(given: Comparison, inputs: TaskInputs) -> str:
    """The inputs of all rows: the teacher and the plain text."""
    return fingerprint(
        "corpus", _teacher_fingerprint(inputs), texts_fingerprint(inputs.corpus), given.tokens, given.distill_tokens
    )


def _row_fingerprint(
    given: Comparison, inputs: TaskInputs, source: TaskInputs | None, row: Row, links: Sequence[Link]
) -> str:
    described = [dataclasses.asdict(link) for link in links]
    of_source = _teacher_fingerprint(source) if source and _reads_source(links) else ""
    return fingerprint("row", _corpus_fingerprint(given, inputs), of_source, row.method, row.seed, described)


def _reads_source(links: Sequence[Link]) -> bool:
    return any(stage.text == "source" for link in links for stage in link.stages)


def _name(row: Row) -> str:
    return f"{row.method}-{row.student}-{row.seed}".replace(",", "-").replace("=", "")


def _make_teacher(folder: Path, inputs: TaskInputs) -> None:
    steps = inputs.teacher_steps
    say(f"teacher: {steps} steps at most" if steps else "teacher: it has a head for this task")
    task_stages.make_teacher(folder, inputs, steps)


def _method_inputs(given: Comparison, inputs: TaskInputs, *, seed: int) -> MethodInputs:
    # Tokenised once, by the first row that needs it.
    pieces = tokenised(
        inputs.corpus,
        inputs.tokenizer,
        min(given.tokens, inputs.max_length),
        Path(given.out) / "work" / "corpus",
        fingerprint=texts_fingerprint(inputs.corpus),
    )
    return MethodInputs(
        inputs.opened,
        inputs.tokenizer,
        pieces,
        {},
        given.batch,
        seed,
        inputs.settings.precision,
        inputs.settings.device,
        notify=show,
    )


def _labelled(inputs: TaskInputs, teacher: Path) -> Labelled:
    task = check_task(inputs.settings.task)
    own = open_model(str(teacher)).head_for(task)
    if own != inputs.labels:
        raise ValueError(f"the teacher's labels {own} are not those of the data, {inputs.labels}")
    return Labelled(task, inputs.train, inputs.validation, inputs.splits.validation, teacher)


def _source(given: Comparison, inputs: TaskInputs) -> TaskInputs:
    """The inputs of the task from which methods transfer, without texts of the task's own validation and test."""
    # Its teacher is fine-tuned on the source task, whatever head the teacher came with.
    task = given.source_task or given.task
    settings = dataclasses.replace(inputs.settings, data=given.source_data, task=task, new_head=True, data_revision="")
    source = open_task(settings, Path(given.out) / "work", notify=show)
    train = unseen(source.splits.train, inputs.splits)
    data_fingerprint = fingerprint(source.splits.fingerprint, inputs.data_fingerprint)  # depends on the texts left out
    splits = dataclasses.replace(source.splits, train=train, fingerprint=data_fingerprint)
    # Both tasks use one tokenizer, with the markers of relations where the task has them.
    return dataclasses.replace(source, splits=splits, opened=inputs.opened, tokenizer=inputs.tokenizer)


def _run(given: Comparison, rows: Sequence[Row], fingerprints: dict[Row, str]) -> None:
    """Trains each row in its own process, so that its peak memory is its own; `given.jobs` at a time."""
    if not rows:
        return
    context = multiprocessing.get_context("spawn")
    with (
        bar("trainings") as shown,
        ProcessPoolExecutor(given.jobs, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        shown(0, len(rows))
        futures = {pool.submit(make_row, given, row, fingerprints[row]): row for row in rows}
        failed: list[str] = []
        try:
            for done, future in enumerate(as_completed(futures), 1):
                try:
                    future.result()
                except BadInput as error:
                    failed.append(f"{futures[future]}: {error}")
                say(f"  {done}/{len(rows)}  {futures[future]}")
                shown(done, len(rows), str(futures[future]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        raise BadInput(
            f"{len(failed)} of {len(rows)} trainings failed; the others are kept. Leave these methods out, or change the tokens or "
            "--batch:\n" + "\n".join(failed)
        )


def make_row(given: Comparison, row: Row, row_fingerprint: str) -> None:
    """One training from start to score, in the folder of its row; runs in its own process."""
    console.quiet = True
    inputs = open_task(_settings(given, row.student), Path(given.out) / "work", notify=show)
    same_bits(inputs.settings.threads)
    work = Workdir(Path(given.out) / "work")
    work.stage(_name(row), row_fingerprint, partial(_train_row, given=given, inputs=inputs, row=row))


def _train_row(folder: Path, given: Comparison, inputs: TaskInputs, row: Row) -> None:
    finished = folder / "row.json"
    if finished.is_file():  # it was killed while it removed its stages
        shutil.rmtree(folder / STAGES, ignore_errors=True)
        return
    started = time.monotonic()
    root = Path(given.out) / "work"
    links = _links(given, inputs, row)
    labelled = {"task": _labelled(inputs, root / "teacher")}
    if _reads_source(links):
        labelled["source"] = _labelled(_source(given, inputs), root / "teacher-source")
    method_inputs = dataclasses.replace(
        _method_inputs(given, inputs, seed=row.seed),
        labelled=labelled,
        # The fitted head is only for students that learn from the teacher's answers on masked words.
        words=root / "teacher-head" if asks_words(links[0].stages) else None,
        start=RANDOM if row.method == NEW_LAYERS else "spread",
    )
    inner = Workdir(folder / STAGES)
    stages = run_method(inner, "row", links, method_inputs)
    task = check_task(given.task)
    model = load(open_model(str(stages[-1])), task)
    gold = [gold_of(example, task) for example in inputs.splits.test]
    said = counts(gold, predictions(inputs.test, row_logits(model, inputs.test)))
    np.save(folder / "counts.npy", said, allow_pickle=False)
    curves = {stage.name: read_lineage(stage) for stage in stages}
    document = {
        "seconds": round(sum(inner.seconds.values()) or time.monotonic() - started, 1),
        "peak_memory_bytes": _peak_bytes(),
        "tokens": _tokens(links, "task", "source"),
        "plain_tokens": _tokens(links, "corpus"),
        "curves": {
            name: {key: said[key] for key in ("loss", "validation", "tokens_read")} for name, said in curves.items()
        },
        "doubts": [f"{row}, {doubt}" for said in curves.values() for doubt in said["doubts"]],
    }
    beside = finished.with_name("row.json.partial")
    beside.write_bytes(canonical_json(document))
    shutil.rmtree(folder / STUDENT, ignore_errors=True)
    stages[-1].replace(folder / STUDENT)
    (folder / STUDENT / STATE).unlink()
    beside.replace(finished)
    shutil.rmtree(folder / STAGES)


def _tokens(links: Sequence[Link], *texts: str) -> int:
    """Tokens that the stages on `texts` read."""
    return sum(
        round(tokens)
        for link in links
        for stage, tokens in zip(link.stages, link.tokens, strict=True)
        if stage.text in texts
    )


def _public(name: str) -> str:
    """`name`, without the folders above it if it is a path: they may be private."""
    return Path(name).name if Path(name).exists() else name


def _peak_bytes() -> int:
    """The peak memory of this process in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        # On Linux the peak of `getrusage` starts at that of the parent process.
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _links(given: Comparison, inputs: TaskInputs, row: Row) -> list[Link]:
    """What trains the student of `row`, its assistants first.

    Every row reads as many tokens of the task's text, so that methods are compared at equal numbers of label steps. Plain text
    comes on top, and its cost stands in the table.
    """
    if row.method in (NEW_LAYERS, GENERAL_LAYERS):
        return [Link(inputs.shape, (LABELS,), (given.task_tokens,))]
    return _chain(row.method, inputs).links(given.distill_tokens, given.task_tokens, (LABELS,))


def _document(
    given: Comparison, inputs_of: dict[str, TaskInputs], work: Workdir, rows: Sequence[Row], teacher: dict[str, Any]
) -> dict[str, Any]:
    """The table: for each method and student the mean over seeds, its standard deviation, interval and cost."""
    task = check_task(given.task)
    found: list[dict[str, Any]] = []
    scored = {row: np.load(work.root / _name(row) / "counts.npy", allow_pickle=False) for row in rows}
    documents = {row: json.loads((work.root / _name(row) / "row.json").read_text(encoding="utf-8")) for row in rows}
    for student in given.students:
        control = [scored[row] for row in rows if row.student == student and row.method == CONTROL]
        for method in _methods(given):
            mine = [row for row in rows if row.student == student and row.method == method]
            counted = [scored[row] for row in mine]
            values = [float(mean_score([one]).value) for one in counted]
            mean, apart = mean_score(counted), mean_score(counted, less=control)
            found.append(
                {
                    "method": method,
                    "student": student,
                    "mean": mean.value,
                    "low": mean.low,
                    "high": mean.high,
                    "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
                    "values": values,
                    "less_labels": dataclasses.asdict(apart) if method != CONTROL else None,
                    "checkpoints": [f"work/{_name(row)}/{STUDENT}" for row in mine],
                    "seconds": statistics.mean(documents[row]["seconds"] for row in mine),
                    "peak_memory_bytes": max(documents[row]["peak_memory_bytes"] for row in mine),
                    "tokens": documents[mine[0]]["tokens"],
                    "plain_tokens": documents[mine[0]]["plain_tokens"],
                    "losses": _losses([documents[row]["curves"] for row in mine]),
                    "curves": documents[mine[0]]["curves"],
                    "doubts": [doubt for row in mine for doubt in documents[row]["doubts"]],
                }
            )
    inputs = next(iter(inputs_of.values()))
    model = task_stages.load_stage(work.root / "teacher", inputs)
    gold = [gold_of(example, task) for example in inputs.splits.test]
    reached = score(gold, predictions(inputs.test, row_logits(model, inputs.test)))
    settings = {name: value for name, value in dataclasses.asdict(given).items() if name not in ("out", "jobs")}
    for name in ("data", "source_data"):
        settings[name] = _public(settings[name])
    settings["corpus"] = [_public(file) for file in given.corpus]
    return {
        "metric": inputs.metric,
        "teacher": dataclasses.asdict(reached) | {"steps": teacher["best_step"]},
        "rows": sorted(found, key=lambda one: -one["mean"]),
        "settings": settings
        | {
            "teacher": inputs.opened.public_name,
            "precision": inputs.settings.precision,
            "device": inputs.settings.device,
        },
        "versions": trained_with(inputs.settings.device),
    }


def _losses(curves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each stage the first and last loss (means over a tenth of the curve) and the best validation: minimum and maximum over seeds."""
    found: dict[str, Any] = {}
    for stage in curves[0]:
        losses = [[value for _, value in curve[stage]["loss"]] for curve in curves]
        tenth = max(1, len(losses[0]) // 10)
        ends = {
            "first": [statistics.mean(loss[:tenth]) for loss in losses],
            "last": [statistics.mean(loss[-tenth:]) for loss in losses],
            "best_on_validation": [max(v for _, v in c[stage]["validation"]) for c in curves if c[stage]["validation"]],
        }
        ranges = {name: [min(values), max(values)] for name, values in ends.items() if values}
        found[stage] = {"steps": curves[0][stage]["loss"][-1][0]} | ranges
    return found
