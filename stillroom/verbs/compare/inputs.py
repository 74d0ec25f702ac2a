"""What all trainings of a comparison share: its checked inputs, settings, teacher and plain text."""

import dataclasses
from functools import partial
from pathlib import Path

from compress.data.corpus import tokenised
from compress.models.packed_inputs import row_tokens_for
from compress.runs.method_chain import check_method_name
from compress.runs.method_trainings import MethodInputs
from compress.runs.open_task import open_task
from compress.runs.stages import fingerprint, folder_fingerprint, texts_fingerprint, trained_with
from compress.runs.task_inputs import TaskInputs, unseen
from compress.settings import WHERE_DATA_IS, TaskSettings
from compress.training.stage import StageSettings
from serve.bundle.cpu_quota import available_cores
from serve.errors import BadInput
from stillroom.console import say, show
from stillroom.inputs.folders import check_out_folder
from stillroom.verbs.compare import Comparison
from stillroom.verbs.compare.choices import check_choices

BUNDLE = "bundle"
# In --out: the bundle's report stands beside it if a gate was missed, and a killed export leaves its work.
WRITTEN = (
    "work", "compare.json", "report.html", "table.md", BUNDLE, f"{BUNDLE}.report.html", f"{BUNDLE}.report.json",
    f"{BUNDLE}.export-work",
)  # fmt: skip


def checked(given: Comparison) -> dict[str, TaskInputs]:
    """The inputs of each student.

    Raises:
        BadInput: what is wrong with them, with methods that do not fit a student, and with values that are to be compared.
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


def source_of(given: Comparison, inputs: TaskInputs) -> TaskInputs:
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


def corpus_fingerprint(given: Comparison, inputs: TaskInputs, teacher: str) -> str:
    """The plain text and the teacher, whose fingerprint is `teacher`."""
    return fingerprint("corpus", teacher, texts_fingerprint(inputs.corpus), given.tokens)
