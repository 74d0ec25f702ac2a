"""Soft labels from a file of a teacher's answers, which may come from anything that answers."""

import dataclasses

from compress.data.encoded import Encoded
from compress.data.examples import Example, Splits
from compress.data.teacher_labels import Held, TeacherLabels
from compress.evaluation.metrics import Score
from compress.runs.task_inputs import Answered, TaskInputs
from serve.errors import BadInput
from serve.wording import counted

ENOUGH_TEXTS = (
    30  # of validation with an answer, or all of them, for a score no better than chance to be a fault of the teacher
)


def with_answers(inputs: TaskInputs, teacher: TeacherLabels) -> TaskInputs:
    """`inputs` with the answers of `teacher`, the texts that it answers and no split has, and the soft labels of training.

    A text of train without an answer keeps its label, as if the teacher had given it. Texts that no split has are learned by the
    answer alone. A text whose labels are the answer, because there is no train file, is left out if the answer does not reach to its
    last word.

    Raises:
        BadInput: the file has labels that the task lacks or answers of another kind, answers no text that can be learned, or is not
            shown to be better than chance on validation.
    """
    splits, task = inputs.splits, inputs.task
    if inputs.outside:  # these have no label of the task, whatever the teacher says
        outside = [*inputs.outside.train, *inputs.outside.validation, *inputs.outside.test]
        teacher = teacher.without(outside, inputs.settings.out_of_scope)
    teacher.check_kind(multi_label=splits.multi_label, relations=splits.relations)
    known = (*splits.labels(task, ("train", "validation", "test")), *inputs.labels)
    names = task.answer_labels(known)
    teacher.check_labels({*known, *names}, multi_label=splits.multi_label)
    if splits.answered:
        splits = _whole(inputs, teacher)
        inputs = dataclasses.replace(inputs, splits=splits)
    held = Held((*splits.train, *splits.validation, *splits.test))
    others = [each for each in teacher.examples(multi_label=splits.multi_label) if each not in held]
    of_others = teacher.logits(inputs.encoded(others), others) if others else []
    further = [
        dataclasses.replace(each, label=None, entities=None)
        for each, logits in zip(others, of_others, strict=True)
        if logits is not None
    ]
    inputs = dataclasses.replace(inputs, further=[] if splits.answered else further)
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
    lines = _lines(inputs, teacher, there, len(others), on_validation, looked_at)
    whole = on_validation is not None and looked_at == len(splits.validation)
    return dataclasses.replace(inputs, answers=teacher, answered=Answered(soft, on_validation, whole, lines))


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
    return dataclasses.replace(splits, train=train, validation=held_out)


def _score(inputs: TaskInputs, teacher: TeacherLabels) -> tuple[Score | None, int]:
    """The score of the answers to texts of validation, and how many have one. BadInput if it is not shown to be above chance."""
    gold = inputs.splits.validation
    found = teacher.logits(inputs.validation, gold)
    chosen = [i for i, logits in enumerate(found) if logits is not None]
    if not chosen or (inputs.splits.held_out and inputs.splits.answered):
        return None, len(chosen)
    task = inputs.task
    texts = inputs.validation.take(chosen)
    said = task.predictions(texts, [logits for logits in found if logits is not None])
    right = [task.gold_of(gold[i]) for i in chosen]
    reached = task.metric.score(right, said)
    blind = task.metric.chance(right, said, task.constant_predictions(texts))
    task.check_answers(teacher.name, right, said)
    if reached.low <= blind and len(chosen) >= min(ENOUGH_TEXTS, len(gold)):
        raise BadInput(
            f"{teacher.name} is not shown to be better than chance on this task: {inputs.metric} {reached} on "
            f"{len(chosen)} validation texts; {blind:.4f} is possible without reading the text. Check its labels, or answer more texts of "
            "validation."
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
