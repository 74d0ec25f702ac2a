"""Finds faults of labels and texts before any training, and collects warnings that do not stop a run.

Labelled texts beside the data are read here too, on which nothing is trained, chosen or scored; and texts out of scope are separated,
whose label is not a class to learn.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from compress.data.columns import Columns
from compress.data.encoded import text_warnings
from compress.data.examples import SPLITS, Example, Splits, are_relations, check_kind, is_multi_label, normalised
from compress.data.label_checks import label_warnings, some
from compress.data.labelled_files import read_examples
from compress.data.task import Task
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

    Raises BadInput: train has too few labels, or one number throughout; or the labels of the teacher's head for this task lack
    some of train's by name; or the head gives one label a text and the data any number, or the reverse.
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
    where: dict[object, list[str]] = {}
    for split in SPLITS:
        for text in dict.fromkeys(map(normalised, getattr(splits, split))):
            where.setdefault(text, []).append(split)
    shared = Counter(", ".join(names) for names in where.values() if len(names) > 1)
    found += [
        f"{counted(count, 'text is', 'texts are')} in more than one split ({names}): scores on them are too high for every model."
        for names, count in sorted(shared.items())
    ]
    for split in SPLITS:
        encoded = task.encode(getattr(splits, split), tokenizer, task.model_labels(()))
        found += text_warnings(encoded, getattr(splits, split), max_length, split)
    return found


class FurtherTexts(NamedTuple):
    """Labelled texts of a file, each once, without those that are read otherwise."""

    examples: list[Example]
    outside: list[Example]
    """Those that are out of scope."""
    left_out: int
    """Texts that are repeated, or that the data has too."""
    notes: Sequence[str] = ()
    """What else was left out of the file."""

    def warnings(self, flag: str) -> list[str]:
        """What to know of the file that `flag` names."""
        one, several = (
            f"text of {flag} is repeated or in the data too and was",
            f"texts of {flag} are repeated or in the data too and were",
        )
        return [*self.notes, *([f"{counted(self.left_out, one, several)} left out."] if self.left_out else [])]


def read_further(
    flag: str,
    file: Path,
    task: Task,
    columns: Columns,
    splits: Sequence[Splits],
    labels: Sequence[str],
    *,
    out_of_scope: str = "",
    read_otherwise: Iterable[str] = (),
) -> FurtherTexts:
    """The texts in `file`, which `flag` names, for a model of `labels` (classes or tags).

    Args:
        flag: how messages name the file.
        file: labelled rows, in any format of the data.
        task: what the model answers.
        columns: the names of their columns.
        splits: the data, whose texts are left out; the first says of which kind the labels are.
        labels: classes or tags that the model has.
        out_of_scope: the label of texts out of scope, which are apart.
        read_otherwise: further texts to leave out, such as unlabelled ones that are learned from.

    Raises:
        BadInput: the file cannot be read, has labels of another kind or that the model lacks, or no text is left.
    """
    notes: list[str] = []
    every = read_examples(file, task, columns, notes)
    if (is_multi_label(every), are_relations(every)) != (splits[0].multi_label, splits[0].relations):
        raise BadInput(f"{flag} {file} has labels of another kind than the data. Give rows like those of --data.")
    known = {
        normalised(example) for each in splits for rows in (each.train, each.validation, each.test) for example in rows
    }
    known |= {normalised(Example(text)) for text in read_otherwise}
    new = list({key: e for e in reversed(every) if (key := normalised(e)) not in known}.values())[::-1]
    outside = [example for example in new if out_of_scope and example.label == out_of_scope]
    examples = [example for example in new if not (out_of_scope and example.label == out_of_scope)]
    if not new:
        raise BadInput(
            f"{flag} {file}: the data has each of its {len(every):,} texts too. Give a file of other labelled texts."
        )
    if not examples:
        raise BadInput(f"{flag} {file}: each of its texts is out of scope. Give a file with texts of the task too.")
    possible = set(task.answer_labels(labels))
    if unknown := sorted(set(task.labels_in(examples)) - possible):
        raise BadInput(
            f"{flag} {file} has labels that the model lacks: {some(unknown)}. It has {some(sorted(possible))}. Rename or remove them."
        )
    return FurtherTexts(examples, outside, len(every) - len(new), notes)


def hold_out_label(splits: Splits, label: str) -> tuple[Splits, Splits]:
    """`splits` without the texts labelled `label`, which are out of scope; and those texts.

    Raises BadInput: labels are not single strings, validation has no text of that label, or a split has no other texts.
    """
    if not all(isinstance(example.label, str) for example in splits.train):
        raise BadInput(f"--out-of-scope {label} needs data with one label a text. Leave the flag out.")
    scope, outside = (_part(splits, label, outside=outside) for outside in (False, True))
    if not outside.validation:
        raise BadInput(
            f"--out-of-scope {label}: no text of validation has that label, but the threshold is chosen on such texts. Add "
            "some to the validation file, or leave the flag out."
        )
    if empty := [name for name in SPLITS if not getattr(scope, name)]:
        raise BadInput(f"--out-of-scope {label}: every text of {' and '.join(empty)} has that label; add others.")
    return scope, outside


def refuse_in_scope(label: str, labels: Sequence[str], model: str) -> None:
    """BadInput if `label`, of texts out of scope, is one of the `labels` of `model`. An empty `label` passes."""
    if label and label in labels:
        raise BadInput(
            f"--out-of-scope {label}: {model} was trained with that label as a class. Leave the flag out, or give a model that was "
            "trained without those texts."
        )


def _part(splits: Splits, label: str, *, outside: bool) -> Splits:
    def chosen(examples: Sequence[Example]) -> list[Example]:
        return [example for example in examples if (example.label == label) is outside]

    train, validation, test, apart = map(chosen, (splits.train, splits.validation, splits.test, splits.apart))
    return replace(splits, train=train, validation=validation, test=test, apart=apart)
