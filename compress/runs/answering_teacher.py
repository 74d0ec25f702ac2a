"""A teacher that gives answers and no more: a file of them, or a model whose insides a student cannot learn from.

Its student starts from an encoder that --start names.
"""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from compress.data.examples import Splits, check_kind
from compress.data.label_checks import some
from compress.data.task import Task
from compress.models.answering import AnsweringTeacher, find_answering
from compress.models.families import FAMILIES
from compress.models.heads import head_of
from compress.models.initialise import differing_tokenizers, is_checkpoint, shape_in
from compress.models.pretrained import open_model, open_unread
from compress.settings import AUTO, TaskSettings
from compress.tasks import task_of
from serve.errors import BadInput

AnySettings = TypeVar("AnySettings", bound=TaskSettings)


def answering_teacher(settings: TaskSettings) -> AnsweringTeacher | None:
    """The model in --teacher, if it can only be asked: it is of another family, or reads text by other tokens than --start.

    None if it can be opened, or --start names no checkpoint that can.

    Raises:
        BadInput: a model of another family that is damaged, or has no head for a task.
    """
    name = settings.teacher
    if not name or settings.teacher_labels or not is_checkpoint(settings.start):
        return None
    folder, config = open_unread(name, "--teacher", "a transformers folder", settings.revision)
    if config.model_type not in FAMILIES or (head_of(config) and _reads_otherwise(folder, settings.start)):
        return find_answering(name, task_of, role="--teacher", revision=settings.revision)
    return None


def _reads_otherwise(teacher: Path, start: str) -> bool:
    """Whether the model in the folder `teacher` and --start can both be opened and have different tokenizers."""
    try:
        return bool(differing_tokenizers(open_model(str(teacher)), open_model(start, role="--start")))
    except BadInput:
        return False  # said by the caller


def with_body(settings: AnySettings, asked: AnsweringTeacher | None = None) -> AnySettings:
    """The settings of a run without a teacher to open: the encoder in --start takes the place of its layers.

    Args:
        settings: as given.
        asked: the model that is asked; None for a file of answers.

    Raises:
        BadInput: settings that only a teacher's model can follow, or no encoder in --start.
    """
    named = f"--teacher {settings.teacher}" if asked else f"--teacher-labels {settings.teacher_labels[0]}"
    if settings.teacher and not asked:
        raise BadInput(
            f"--teacher {settings.teacher} and {named} are both given, and a student has one teacher. Leave one of them out."
        )
    faults = []
    if not is_checkpoint(settings.start):
        faults.append("--start is needed: the encoder whose layers the student gets, such as bert-base-uncased")
    if settings.method not in (AUTO, "soft-labels", "labels"):
        faults.append(
            f"--method {settings.method} asks a teacher as it trains, or reads its layers; soft-labels learns from answers"
        )
    asks = {"--unlabelled": settings.unlabelled, "--augment": settings.augment} if not asked else {}
    faults += [f"{flag} needs a teacher that can be asked; leave it out" for flag, value in asks.items() if value]
    if asked and settings.new_head:
        faults.append("--new-head needs a teacher that can be fine-tuned here; leave it out")
    if settings.folds:
        faults.append("--folds needs a teacher that can be fine-tuned here; leave it out")
    if faults:
        why = (
            f"{named} gives answers alone, because it is of another family or has other tokens than --start"
            if asked
            else f"{named} is a teacher that cannot be asked"
        )
        raise BadInput(f"{why}. {'; '.join(faults)}.")
    student = settings.student
    if asked and not student:  # as with a teacher that can be opened, the checkpoint is the student
        student = str(shape_in(open_model(settings.start, role="--start")))
    return replace(
        settings, teacher=settings.start, start="spread", student=student, revision="" if asked else settings.revision
    )


def as_given(settings: AnySettings, asked: AnsweringTeacher | None = None) -> AnySettings:
    """The settings that `with_body` was given."""
    if asked:
        return replace(settings, teacher=asked.name, start=settings.teacher, revision=asked.revision)
    return replace(settings, teacher="", start=settings.teacher) if settings.teacher_labels else settings


def labels_of(asked: AnsweringTeacher, splits: Splits, task: Task, ours: tuple[str, ...]) -> tuple[str, ...]:
    """The labels by index that the student gets: `ours`, or all of the teacher's if it has more.

    Raises:
        BadInput: the teacher has a head for another task, gives one label a text where the data has any number or the reverse, or
            lacks labels of train.
    """
    named = f"{asked.role} {asked.name}"
    if asked.task.name != task.name:
        raise BadInput(
            f"{named} has a head for {asked.task.name}, and --task is {task.name}. Give a teacher of that task."
        )
    if task.has_kinds:
        remedy = "Give data of that kind, or another teacher."
        check_kind(splits.train, named, multi_label=asked.multi_label, markers=asked.has_markers, remedy=remedy)
    if not task.names_labels:
        return ours
    theirs = task.answer_labels(asked.labels)
    names = task.answer_labels(ours)
    if missing := sorted(set(names) - set(theirs)):
        raise BadInput(
            f"{named} answers with labels ({some(sorted(theirs))}) that lack {some(missing)} of train; labels are matched by name. "
            "Rename the labels in the data."
        )
    if set(theirs) == set(names):
        return ours
    return task.model_labels(theirs)
