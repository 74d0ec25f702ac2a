"""Soft labels from a file of a teacher's answers, which may come from anything that answers."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compress.data.encoded import IGNORED, Encoded
from compress.data.examples import Example, check_task
from compress.data.teacher_labels import LEAST, TeacherLabels
from compress.engine.data_checks import counted
from compress.evaluation.metrics import Score, chance, gold_of, score
from compress.evaluation.predictions import constant_predictions, predictions
from serve.errors import BadInput

if TYPE_CHECKING:
    from compress.engine.task_inputs import TaskInputs


@dataclass(frozen=True)
class Answered:
    """What a student learns of a file of answers."""

    soft: list[np.ndarray]
    """Logits (rows, labels) of each text of `TaskInputs.soft_labelled`."""
    on_validation: Score | None
    """The score of the answers to texts of validation; None where there is none, or where they are its labels."""
    whole_validation: bool
    """Whether all of these texts have an answer, so that the score can be compared with a student's."""
    lines: list[str]
    """What was read, as sentences."""


def with_answers(inputs: "TaskInputs", teacher: TeacherLabels) -> "TaskInputs":
    """`inputs` with the answers of `teacher`, the texts that it answers and no split has, and the soft labels of training.

    A text of train without an answer keeps its label, as if the teacher had given it.

    Raises:
        BadInput: the file has labels that the task lacks, answers no text that can be learned, or is not shown to be better than
            chance on validation.
    """
    splits, encode = inputs.splits, inputs.encoded
    if inputs.outside:  # these have no label of the task, whatever the teacher says
        teacher = teacher.without([*inputs.outside.train, *inputs.outside.validation, *inputs.outside.test])
    teacher.check_labels(
        splits.labels(check_task(inputs.settings.task), ("train", "validation", "test")), multi_label=splits.multi_label
    )
    known = {_key(example) for example in (*splits.train, *splits.validation, *splits.test)}
    others = [each for each in teacher.examples(multi_label=splits.multi_label) if _key(each) not in known]
    of_others = teacher.logits(encode(others), others) if others else []
    further = [each for each, logits in zip(others, of_others, strict=True) if logits is not None]
    inputs = dataclasses.replace(inputs, further=further)
    of_train = teacher.logits(inputs.train, splits.train)
    asked = [logits if logits is not None else _certain(inputs.train, i) for i, logits in enumerate(of_train)]
    soft = asked + [logits for logits in of_others if logits is not None]
    there = sum(logits is not None for logits in of_train)
    if not there and not further:
        raise BadInput(
            f"--teacher-labels {teacher.name} answers none of the {len(splits.train)} texts of train and has no other texts to learn "
            "from. Answers are matched by the text, which must be the same in both."
        )
    on_validation, looked_at = _score(inputs, teacher)
    lines = _lines(inputs, there, len(others), on_validation, looked_at)
    whole = on_validation is not None and looked_at == len(splits.validation)
    return dataclasses.replace(inputs, answers=teacher, answered=Answered(soft, on_validation, whole, lines))


def _score(inputs: "TaskInputs", teacher: TeacherLabels) -> tuple[Score | None, int]:
    """The score of the answers to texts of validation, and how many have one. BadInput if it is not shown to be above chance."""
    gold = inputs.splits.validation
    found = teacher.logits(inputs.validation, gold)
    chosen = [i for i, logits in enumerate(found) if logits is not None]
    if not chosen or (inputs.splits.held_out and inputs.splits.answered):
        return None, len(chosen)
    task = check_task(inputs.settings.task)
    texts = inputs.validation.take(chosen)
    said, right = (
        predictions(texts, [logits for logits in found if logits is not None]),
        [gold_of(gold[i], task) for i in chosen],
    )
    reached, blind = score(right, said), chance(right, said, constant_predictions(texts))
    if reached.low <= blind:
        raise BadInput(
            f"--teacher-labels {teacher.name} is not shown to be better than chance on this task: {inputs.metric} {reached} on "
            f"{len(chosen)} validation texts; {blind:.4f} is possible without reading the text. Check its labels, or answer more texts of "
            "validation."
        )
    return reached, len(chosen)


def _lines(
    inputs: "TaskInputs", of_train: int, others: int, on_validation: Score | None, of_validation: int
) -> list[str]:
    train, extra = len(inputs.splits.train), len(inputs.further)
    lines = [
        f"--teacher-labels has answers to {of_train:,} of {counted(train, 'text', 'texts')} of train, and to "
        f"{counted(extra, 'text', 'texts')} that the data lacks."
    ]
    if of_train < train:
        lines.append(
            f"{counted(train - of_train, 'text', 'texts')} of train without an answer keep their labels alone."
        )
    if extra < others:
        lines.append(
            f"{counted(others - extra, 'text', 'texts')} that the data lacks are left out: the answers do not reach to their last word."
        )
    if on_validation is not None:
        lines.append(f"The answers to {of_validation:,} texts of validation: {inputs.metric} {on_validation}.")
    return lines


def _certain(encoded: Encoded, index: int) -> np.ndarray:
    """Logits (rows, labels) by which the labels of text `index` are certain; a row without one leaves all of them alike."""
    targets, labels = encoded.targets[index], len(encoded.labels)
    if encoded.multi_label:
        sure = np.float32(np.log(1 - LEAST) - np.log(LEAST))
        return np.where(targets == 1, sure, np.where(targets == 0, -sure, 0)).astype(np.float32)
    logits = np.full((len(targets), labels), np.log(LEAST), dtype=np.float32)
    for row, target in enumerate(targets):
        logits[row, slice(None) if target == IGNORED else target] = 0.0
    return logits


def _key(example: Example) -> tuple[str, str | None]:
    return example.text_read, example.text_pair
