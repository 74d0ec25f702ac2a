"""What all trainings of a comparison share: its checked inputs, settings, teacher and plain text."""

import dataclasses
from functools import partial
from pathlib import Path

from compress.data.corpus import tokenised
from compress.engine.fingerprints import fingerprint, folder_fingerprint, texts_fingerprint, trained_with
from compress.engine.method_chain import Chain, check_method_name, method_chain
from compress.engine.method_runner import MethodInputs
from compress.engine.task_inputs import TaskInputs, open_task, unseen
from compress.input_errors import Faults
from compress.settings import WHERE_DATA_IS, TaskSettings
from serve.bundle.cpu_quota import available_cores
from serve.errors import BadInput
from stillroom.console import say, show
from stillroom.inputs.out_folder import check_out_folder
from stillroom.settings.compare import Comparison

WRITTEN = ("work", "compare.json", "report.html", "table.md")  # in --out


def checked(given: Comparison) -> dict[str, TaskInputs]:
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
        inputs_of[student] = inputs = open_task(
            settings_of(given, student), out / "work", more_checks=names, notify=show
        )
        for method in given.methods:
            faults.check(partial(_check_method, method, inputs, given))
    faults.raise_if_any()
    of_methods = [
        w for one in inputs_of.values() for method in given.methods for w in chain_of_method(method, one).warnings
    ]
    for warning in dict.fromkeys([*next(iter(inputs_of.values())).warnings, *of_methods]):
        say(f"warning: {warning}")
    return inputs_of


def _check_method(method: str, inputs: TaskInputs, given: Comparison) -> None:
    """BadInput where `method` cannot work with this teacher, this student and what was given."""
    texts = chain_of_method(method, inputs).texts
    if "corpus" in texts and not inputs.corpus:
        raise BadInput(f"--method {method} learns from plain text, and no --corpus was given. Give --corpus too.")
    if "source" in texts and not given.source_data:
        raise BadInput(
            f"--method {method} learns another task first, and no --source-data was given. Give a folder of that task's "
            "examples (and --source-task, if it differs from --task)."
        )


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


def chain_of_method(method: str, inputs: TaskInputs) -> Chain:
    """The stages of `method` for this teacher and student."""
    return method_chain(method, inputs.shape, inputs.opened.config)


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


def corpus_fingerprint(given: Comparison, inputs: TaskInputs) -> str:
    """The inputs of all rows: the teacher and the plain text."""
    return fingerprint(
        "corpus", teacher_fingerprint(inputs), texts_fingerprint(inputs.corpus), given.tokens, given.distill_tokens
    )
