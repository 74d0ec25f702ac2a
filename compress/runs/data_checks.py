"""Finds faults of labels and texts before any training, and collects warnings that do not stop a run."""

from collections import Counter

from tokenizers import Tokenizer

from compress.data.examples import Splits, check_kind
from compress.data.label_checks import label_warnings, some
from compress.data.task import Task
from compress.data.text_checks import text_warnings
from compress.models.pretrained import Opened, check_labels, with_markers
from compress.models.shapes import Shape
from serve.errors import BadInput
from serve.wording import counted


def keeps_head(start: Opened, splits: Splits, task: Task, shape: Shape | None) -> bool:
    """Whether the checkpoint that a student of `shape` starts from is as wide and has a head for the data's labels and no others."""
    if shape and shape.hidden != start.config.hidden_size:
        return False
    theirs = start.head_for(task)
    if not task.names_labels:
        return theirs is not None
    if theirs is None or set(theirs) != set(task.model_labels(splits.labels(task))):
        return False
    has_markers = not (start if splits.relations else with_markers(start)).added
    return not task.has_kinds or (start.multi_label, has_markers) == (splits.multi_label, splits.relations)


def labels_for(opened: Opened, splits: Splits, task: Task, *, new_head: bool) -> tuple[tuple[str, ...], bool]:
    """The labels (classes, or tags) by index that teacher and student share, and whether the teacher's own head is used.

    Raises:
        BadInput: train has too few labels, or one number throughout; or the labels of the teacher's head for this task lack some of
            train's by name; or the head gives one label a text and the data any number, or the reverse.
    """
    task.check_train(splits)
    names = splits.labels(task)
    theirs = None if new_head else opened.head_for(task)
    if not task.names_labels:
        return theirs or names, theirs is not None
    ours = task.model_labels(names)
    if theirs is None:
        return ours, False
    check_labels(theirs, task, f"{opened.role} {opened.name}")
    if task.has_kinds:
        markers = not (opened if splits.relations else with_markers(opened)).added
        check_kind(splits.train, f"{opened.role} {opened.name}", multi_label=opened.multi_label, markers=markers)
    known = set(task.answer_labels(theirs))
    if task.labels_words and known >= set(names) and not set(ours) <= set(theirs):
        raise BadInput(
            f"{opened.role} {opened.name} has a head whose tags are not in BIO (it lacks "
            f"{some(sorted(set(ours) - set(theirs)))}). Use `run` or `finetune` with --new-head to make a new head."
        )
    if missing := [name for name in names if name not in known]:
        raise BadInput(
            f"{opened.role} {opened.name} has a head for {task.name} whose labels ({some(sorted(known))}) lack {some(missing)} "
            "of train; labels are matched by name. Rename the labels in the data, or use `run` or `finetune` with --new-head to make "
            "a new head."
        )
    return theirs, True


def warnings_of(splits: Splits, tokenizer: Tokenizer, task: Task, max_length: int) -> list[str]:
    """Warnings that do not stop a run, one sentence each."""
    found = [*splits.notes]
    if splits.answered:
        texts = counted(len(splits.train), "text of --teacher-labels is", "texts of --teacher-labels are")
        found.append(f"There is no train file: {texts} read as train, with their answers as labels.")
    if splits.held_out and splits.answered:
        found.append(
            f"There is no validation file: {counted(len(splits.validation), 'text of it is', 'texts of it are')} held out instead. "
            "Scores on them show how often a model agrees with the teacher, not how often it is right."
        )
    elif splits.held_out:
        found.append(
            f"There is no validation file: {counted(len(splits.validation), 'text of train was', 'texts of train were')} held out instead."
        )
    found += label_warnings(splits, task)
    found += _in_two_splits(splits)
    for split in ("train", "validation", "test"):
        encoded = task.encode(getattr(splits, split), tokenizer, task.model_labels(()))
        found += text_warnings(encoded, getattr(splits, split), max_length, split)
    return found


SPLIT_ORDER = ("train", "validation", "test")


def _in_two_splits(splits: Splits) -> list[str]:
    where: dict[str, set[str]] = {}
    for split in SPLIT_ORDER:
        for example in getattr(splits, split):
            where.setdefault(f"{example.text_read}\x00{example.text_pair or ''}", set()).add(split)
    shared = Counter(
        ", ".join(each for each in SPLIT_ORDER if each in names) for names in where.values() if len(names) > 1
    )
    return [
        f"{counted(count, 'text is', 'texts are')} in more than one split ({names}): scores on them are too high for every model."
        for names, count in sorted(shared.items())
    ]
