"""A teacher that gives answers and no more: a file of them, which may come from anything that answers, or a model whose insides a student
cannot learn from. Its student starts from an encoder that --start names, and learns the answers as soft labels.
"""

from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from compress.data.encoded import Encoded
from compress.data.examples import Example, Splits, check_kind, clusters_of
from compress.data.label_checks import one_answer_warnings, some
from compress.data.task import Task
from compress.data.teacher_labels import CachedLabels, TeacherLabels
from compress.evaluation.metrics import Score
from compress.models.answering import AnsweringTeacher, find_answering
from compress.models.families import FAMILIES
from compress.models.heads import head_of
from compress.models.initialise import differing_tokenizers, is_checkpoint, shape_in
from compress.models.pretrained import open_config_only, open_model
from compress.runs.task_inputs import TaskInputs, TeacherOutputs
from compress.settings import AUTO, TaskSettings
from compress.tasks import task_of
from serve.errors import BadInput
from serve.wording import counted

# Texts of validation with an answer, or all of them, for a score no better than chance to be a fault of the teacher.
ENOUGH_TEXTS = 30

AnySettings = TypeVar("AnySettings", bound=TaskSettings)


def answering_teacher(settings: TaskSettings) -> AnsweringTeacher | None:
    """The model in --teacher, if it can only be asked: it is of another family, or reads text by other tokens than --start.

    None if it can be opened, or --start names no checkpoint that can. Raises BadInput: a model of another family that is damaged,
    or has no head for a task.
    """
    name = settings.teacher
    if not name or settings.teacher_labels or not is_checkpoint(settings.start):
        return None
    folder, config = open_config_only(name, "--teacher", "a transformers folder", settings.revision)
    asked = config.model_type not in FAMILIES
    if not asked and head_of(config):
        with suppress(BadInput):  # a model that cannot be opened is a fault that the caller finds
            asked = bool(differing_tokenizers(open_model(str(folder)), open_model(settings.start, role="--start")))
    return find_answering(name, task_of, role="--teacher", revision=settings.revision) if asked else None


def with_encoder_settings(settings: AnySettings, asked: AnsweringTeacher | None = None) -> AnySettings:
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
    """The settings that `with_encoder_settings` was given."""
    if asked:
        return replace(settings, teacher=asked.name, start=settings.teacher, revision=asked.revision)
    return replace(settings, teacher="", start=settings.teacher) if settings.teacher_labels else settings


def labels_of(asked: AnsweringTeacher, splits: Splits, task: Task, ours: tuple[str, ...]) -> tuple[str, ...]:
    """The labels by index that the student gets: `ours`, or all of the teacher's if it has more.

    Raises BadInput: the teacher has a head for another task, gives one label a text where the data has any number or the reverse,
    or lacks labels of train.
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


def with_answers(inputs: TaskInputs, teacher: TeacherLabels) -> TaskInputs:
    """`inputs` with the answers of `teacher`, the texts that it answers and no split has, and the soft labels of training.

    A text of train without an answer keeps its label, as if the teacher had given it. Texts that no split has are learned by the
    answer alone. A text whose labels are the answer, because there is no train file, is left out if the answer does not reach to
    its last word. Raises BadInput: the file has labels that the task lacks or answers of another kind, answers no text that can
    be learned, or is not shown to be better than chance on validation.
    """
    splits, task = inputs.splits, inputs.task
    if inputs.outside:  # these have no label of the task, whatever the teacher says
        outside = [*inputs.outside.train, *inputs.outside.validation, *inputs.outside.test]
        teacher = teacher.without(outside, inputs.settings.out_of_scope)
    teacher.check_kind(multi_label=splits.multi_label, relations=splits.relations)
    known = (*splits.labels(task, ("train", "validation", "test")), *inputs.labels)
    names = task.answer_labels(known)
    teacher.check_labels({*known, *names}, multi_label=splits.multi_label)
    known_labels = [
        *(() if splits.answered else splits.train),
        *(() if _held_out_of_answers(splits) else splits.validation),
    ]
    teacher, smoothing = teacher.smoothed(known_labels, inputs.labels) if task.has_kinds else (teacher, "")
    if splits.answered:
        splits = _whole(inputs, teacher)
        inputs = replace(inputs, splits=splits)
    held = CachedLabels((*splits.train, *splits.validation, *splits.test, *splits.apart))
    others = [each for each in teacher.examples(multi_label=splits.multi_label) if each not in held]
    of_others = teacher.logits(inputs.encoded(others), others) if others else []
    further = [
        replace(each, label=None, entities=None)
        for each, logits in zip(others, of_others, strict=True)
        if logits is not None
    ]
    inputs = replace(inputs, further=[] if splits.answered else further)
    of_train = teacher.logits(inputs.train, splits.train)
    asked = [
        logits if logits is not None else task.certain_logits(inputs.train, i) for i, logits in enumerate(of_train)
    ]
    soft = asked + [logits for logits in of_others if logits is not None and not splits.answered]
    there = sum(logits is not None for logits in of_train)
    if not there and not further:
        raise BadInput(
            f"{teacher.name} answers none of the {len(splits.train)} texts of train and has no other texts to learn "
            "from. Answers are matched by the text, which must be the same in both."
        )
    on_validation, looked_at = _score(inputs, teacher)
    lines = [
        *_lines(inputs, teacher, there, len(others), on_validation, looked_at),
        *([smoothing] if smoothing else []),
    ]
    whole = on_validation is not None and looked_at == len(splits.validation)
    return replace(inputs, answers=teacher, answered=TeacherOutputs(soft, on_validation, whole, lines))


def _whole(inputs: TaskInputs, teacher: TeacherLabels) -> Splits:
    """The splits without texts of train, and of a validation held out from it, whose answers do not reach to their last word."""

    def kept(examples: list[Example], encoded: Encoded) -> list[Example]:
        found = teacher.logits(encoded, examples)
        return [example for example, logits in zip(examples, found, strict=True) if logits is not None]

    splits = inputs.splits
    train = kept(splits.train, inputs.encoded(splits.train))
    held_out = kept(splits.validation, inputs.encoded(splits.validation)) if splits.held_out else splits.validation
    if not train or not held_out:
        raise BadInput(
            f"{teacher.name} has no answers that reach to the last word of their texts. Ask about shorter texts."
        )
    return replace(splits, train=train, validation=held_out)


def _held_out_of_answers(splits: Splits) -> bool:
    """Whether the labels of validation are the answers themselves."""
    return splits.held_out and splits.answered


def _score(inputs: TaskInputs, teacher: TeacherLabels) -> tuple[Score | None, int]:
    """The score of the answers to texts of validation, and how many have one. BadInput if it is not shown to be above chance."""
    gold = inputs.splits.validation
    found = teacher.logits(inputs.validation, gold)
    chosen = [i for i, logits in enumerate(found) if logits is not None]
    if not chosen or _held_out_of_answers(inputs.splits):
        return None, len(chosen)
    task = inputs.task
    texts = inputs.validation.take(chosen)
    said = task.predictions(texts, [logits for logits in found if logits is not None])
    right = [task.gold_of(gold[i]) for i in chosen]
    reached = task.metric.score(right, said, clusters=clusters_of([gold[i] for i in chosen]))
    blind = task.metric.chance(right, said, task.constant_predictions(texts))
    task.check_answers(teacher.name, right, said)
    if reached.low <= blind and len(chosen) >= min(ENOUGH_TEXTS, len(gold)):
        raise BadInput(
            f"{teacher.name} is not shown to be better than chance on this task: {inputs.metric} {reached} on "
            f"{len(chosen)} validation texts; {blind:.4f} is possible without reading the text. "
            + (
                " ".join(one_answer_warnings(inputs.splits, task))
                or "Check its labels, or answer more texts of validation."
            )
        )
    return reached, len(chosen)


def _lines(
    inputs: TaskInputs,
    teacher: TeacherLabels,
    of_train: int,
    others: int,
    on_validation: Score | None,
    of_validation: int,
) -> list[str]:
    train, extra = len(inputs.splits.train), len(inputs.further)
    of = teacher.name if teacher.asked[0] else "--teacher-labels"
    lines = [
        f"{of} has answers to {of_train:,} of {counted(train, 'text')} of train, and to "
        f"{counted(extra, 'text')} that the data lacks."
    ]
    if of_train < train:
        lines.append(f"{counted(train - of_train, 'text')} of train without an answer keep their labels alone.")
    if extra < others:
        lines.append(
            f"{counted(others - extra, 'text')} that the data lacks are left out: the answers do not reach to their last word."
        )
    if on_validation is not None:
        lines.append(f"The answers to {of_validation:,} texts of validation: {inputs.metric} {on_validation}.")
    return lines
