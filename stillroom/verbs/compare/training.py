"""One training of a comparison, from its start to its score, in a process of its own; and what all of them share."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compress.data.corpus import tokenised
from compress.models.families import row_tokens_for
from compress.models.initialise import RANDOM
from compress.models.pretrained import open_model
from compress.runs.hardware import same_bits
from compress.runs.lineage import read_lineage
from compress.runs.method_chain import Link, asks_words, check_method_name
from compress.runs.method_trainings import Labelled, MethodInputs, run_method
from compress.runs.open_task import open_task
from compress.runs.resumable_stages import STATE, Workdir
from compress.runs.stages import fingerprint, folder_fingerprint, texts_fingerprint, trained_with
from compress.runs.task_inputs import TaskInputs, scored_rows, unseen
from compress.runs.task_stages import load_stage
from compress.settings import FineTunedTeacher, TaskData, TaskSettings
from compress.training.loop import Diverged, StageSettings
from latency.measure.machine import resident_bytes
from serve.bundle.cpu import available_cores
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput
from serve.files import replacing
from stillroom.console import console, say, show
from stillroom.inputs.folders import check_out_folder
from stillroom.settings import shared
from stillroom.verbs.compare import WRITTEN, Comparison
from stillroom.verbs.compare.rows import NEW_LAYERS, Row, at_rate, check_choices, links_of, reads_source

STAGES = "stages"  # of one row under way
ROW = "row.json"  # the result of a finished one
STUDENT = "student"  # the checkpoint of a finished one


def checked(given: Comparison) -> dict[str, TaskInputs]:
    """The inputs of each student.

    Raises BadInput: what is wrong with them, with methods that do not fit a student, and with values that are to be compared.
    """
    out = Path(given.out)
    check_out_folder(out, WRITTEN)
    if Path(given.teacher).resolve().is_relative_to((out / "work").resolve()):
        raise BadInput(
            f"--teacher {given.teacher} lies in {out / 'work'}, where this comparison writes. Copy it elsewhere."
        )
    names = [partial(check_method_name, method) for method in given.methods]
    inputs_of: dict[str, TaskInputs] = {}
    for student in given.students:
        inputs_of[student] = open_task(settings_of(given, student), out / "work", more_checks=names, notify=show)
    warnings = [*next(iter(inputs_of.values())).warnings, *check_choices(given, inputs_of)]
    for warning in dict.fromkeys(warnings):
        say(f"warning: {warning}")
    return inputs_of


def settings_of(given: Comparison, student: str) -> TaskSettings:
    """The settings that all rows of one student share; a row's seed changes its training, not its data."""
    threads = given.threads or max(1, available_cores() // given.jobs)
    of_all = shared(given, FineTunedTeacher, TaskData) | {"threads": threads}
    return TaskSettings(**of_all, student=student, corpus=given.corpus)


def source_of(given: Comparison, inputs: TaskInputs) -> TaskInputs:
    """The inputs of the task from which methods transfer, without texts of the task's own validation and test."""
    # Its teacher is fine-tuned on the source task, whatever head the teacher came with.
    task = given.source_task or given.task
    settings = replace(inputs.settings, data=given.source_data, task=task, new_head=True, data_revision="")
    source = open_task(settings, Path(given.out) / "work", notify=show)
    train = unseen(source.splits.train, inputs.splits)
    data_fingerprint = fingerprint(
        source.splits.fingerprint, inputs.splits.fingerprint
    )  # depends on the texts left out
    splits = replace(source.splits, train=train, fingerprint=data_fingerprint)
    # Both tasks use one tokenizer, with the markers of relations where the task has them.
    return replace(source, splits=splits, opened=inputs.opened, tokenizer=inputs.tokenizer)


def method_inputs_of(given: Comparison, inputs: TaskInputs, *, seed: int) -> MethodInputs:
    """The teacher and the plain text, which is tokenised once, by the first row that needs it."""
    longest = min(given.tokens, inputs.max_length)
    pieces = tokenised(
        inputs.corpus,
        inputs.tokenizer,
        longest,
        Path(given.out) / "work" / "corpus",
        fingerprint=texts_fingerprint(inputs.corpus),
    )
    return MethodInputs(
        inputs.opened,
        inputs.tokenizer,
        pieces,
        {},
        given.batch,
        StageSettings(0, seed, inputs.settings.precision, device=inputs.settings.device),
        row_tokens=row_tokens_for(longest, inputs.opened.config),
        notify=show,
    )


def teacher_fingerprint(inputs: TaskInputs) -> str:
    """The inputs of the teacher that is fine-tuned on the task."""
    s = inputs.settings
    return fingerprint(
        "teacher", folder_fingerprint(inputs.opened.folder), s.task, inputs.splits.fingerprint, s.threads, s.precision, s.batch,
        inputs.max_length, trained_with(s.device), s.teacher_epochs, s.teacher_learning_rate,
    )  # fmt: skip


def make_row(given: Comparison, row: Row, rates: Sequence[float], decided_by: str) -> None:
    """One training from start to score, in the folder of its row; runs in its own process.

    With several `rates` the last stage is trained with each, and the student that is best on validation is kept. A rate whose loss
    is not finite is out; a row fails if all are.
    """
    console.quiet = True
    inputs = open_task(settings_of(given, row.student), Path(given.out) / "work", notify=show)
    same_bits(inputs.settings.threads)
    work = Workdir(Path(given.out) / "work")
    work.stage(row.name, decided_by, partial(_train_row, given=given, inputs=inputs, row=row, rates=rates))


def rate_taken(row: Path) -> float:
    """The peak learning rate of the last stage of the finished training in the folder `row`."""
    return float(json.loads((row / ROW).read_text(encoding="utf-8"))["label_learning_rate"])


class _Tried(NamedTuple):
    """The student that one rate gave."""

    rate: float
    stages: list[Path]
    validation: float
    """Its score."""


def _train_row(folder: Path, given: Comparison, inputs: TaskInputs, row: Row, rates: Sequence[float]) -> None:
    finished = folder / ROW
    if finished.is_file():  # it was killed while it removed its stages
        shutil.rmtree(folder / STAGES, ignore_errors=True)
        return
    started = time.monotonic()
    links = links_of(given, inputs, row)
    taught = _method_inputs(given, inputs, row, links)
    # The fitted head is only for students that learn from the teacher's answers on masked words.
    head = Path(given.out) / "work" / head_name(row) if asks_words(links[0].stages) else None
    inner = Workdir(folder / STAGES)
    tried, diverged = [], list[float]()
    for rate in rates:
        try:
            stages = run_method(inner, "row", at_rate(links, rate), taught, head)
        except Diverged:
            if len(diverged) + 1 == len(rates):
                raise
            diverged.append(rate)
            continue
        counted = scored_rows(inputs, load_stage(stages[-1], inputs), "validation")
        tried.append(_Tried(rate, stages, inputs.task.metric.value(counted)))
    best = max(tried, key=lambda one: one.validation)  # the first of equals
    counted = scored_rows(inputs, load_stage(best.stages[-1], inputs), "test")
    np.save(folder / "counts.npy", counted, allow_pickle=False)
    seconds = sum(inner.seconds.values()) or time.monotonic() - started
    seconds -= sum(inner.seconds[one.stages[-1].name] for one in tried if one is not best)
    document = {
        "seconds": round(seconds, 1),
        "peak_memory_bytes": memory.peak_bytes if (memory := resident_bytes()) else 0,
        "tokens": _tokens(links, "task", "source"),
        "plain_tokens": _tokens(links, "corpus"),
        "validation": best.validation,
        "label_learning_rate": best.rate,
        "label_rates": [
            {
                "learning_rate": one.rate,
                "validation": one.validation,
                "seconds": round(inner.seconds[one.stages[-1].name], 1),
            }
            for one in tried
        ],
        "diverged_rates": diverged,
        **_told(row, best),
    }
    with replacing(finished, alone=True) as beside:
        beside.write_bytes(canonical_json(document))
        shutil.rmtree(folder / STUDENT, ignore_errors=True)
        best.stages[-1].replace(folder / STUDENT)
        (folder / STUDENT / STATE).unlink()
    shutil.rmtree(folder / STAGES)


def _method_inputs(given: Comparison, inputs: TaskInputs, row: Row, links: Sequence[Link]) -> MethodInputs:
    """What the stages of `row` read, and what its student starts from."""
    root = Path(given.out) / "work"
    labelled = {"task": _labelled(inputs, root / "teacher")}
    if reads_source(links):
        labelled["source"] = _labelled(source_of(given, inputs), root / "teacher-source")
    return replace(
        method_inputs_of(given, inputs, seed=row.seed),
        labelled=labelled,
        start=RANDOM if row.method == NEW_LAYERS else row.choice.start or "spread",
    )


def head_name(row: Row) -> str:
    """The folder in OUT/work of the teacher with a head for masked words, fitted on a share of the row's plain text."""
    return f"teacher-head-{row.choice.distill_tokens}"


def _told(row: Row, best: _Tried) -> dict[str, Any]:
    """The curves and doubts of the stages by name, without the rate that ends the name of the last."""
    lineages = {stage.name.removesuffix(f"-{best.rate}"): read_lineage(stage) for stage in best.stages}
    return {
        "curves": {
            name: {key: said[key] for key in ("loss", "validation", "tokens_read")} for name, said in lineages.items()
        },
        "doubts": [f"{row}, {doubt}" for said in lineages.values() for doubt in said["doubts"]],
    }


def _labelled(inputs: TaskInputs, teacher: Path) -> Labelled:
    own = open_model(str(teacher)).head_for(inputs.task)
    if own != inputs.labels:
        raise ValueError(f"the teacher's labels {own} are not those of the data, {inputs.labels}")
    return Labelled(inputs.task, inputs.train, inputs.validation, inputs.splits.validation, teacher)


def _tokens(links: Sequence[Link], *texts: str) -> int:
    """Tokens that the stages on `texts` read."""
    return sum(
        round(tokens)
        for link in links
        for stage, tokens in zip(link.stages, link.tokens, strict=True)
        if stage.text in texts
    )
