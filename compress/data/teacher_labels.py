"""A teacher's answers from a file: a row a text, with its label, the probability of each label, or its entities.

Whatever gave them is not needed: a model of any family, a large language model, rules, or people. Answers are matched with texts
by the text, and with words by characters, so that the teacher may read text with another tokenizer than the student.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from compress.data.answer_rows import HALF, MOST_SUM, Answer, answer_in, named_in, with_tags_as
from compress.data.columns import USUAL, Columns
from compress.data.encoded import Encoded
from compress.data.examples import Example, classes_of, normalised
from compress.data.file_formats import SUFFIXES, rows_in, suffix_of
from compress.data.labelled_files import check_there
from compress.data.row_fields import BadRows, Fault, UnreadableFrom, note
from compress.data.task import Task
from serve.errors import BadInput
from serve.text.entity_markers import has_markers
from serve.text.labels import split_tag, with_prefixes

LEAST = 1e-8
"""The probability of what a teacher does not name, so that its logarithm is finite; also the distance of the largest one from 1."""
SHOWN_LABELS = 5
LEAST_MEASURED = 30  # texts with a label and an answer, for the agreement of both


@dataclass(frozen=True)
class TeacherLabels:
    """The answers of one or more files, by text."""

    files: tuple[str, ...]
    task: Task
    answers: Mapping[str, Answer]
    fingerprint: str
    """The SHA-256 of the files."""
    asked: tuple[str, str] = ("", "")
    """The flag and name of the model that wrote them in this run, and its name for published files; empty where they were given."""

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def name(self) -> str:
        """The files or the model, with the flag that named them, for messages."""
        return self.asked[0] or f"--teacher-labels {', '.join(self.files)}"

    @property
    def public_name(self) -> str:
        """The name of the model, or those of the files without their folders, which are private."""
        return self.asked[1] or " and ".join(Path(file).name for file in self.files)

    def without(self, examples: Iterable[Example], label: str = "") -> "TeacherLabels":
        """The answers to all texts but those of `examples`, compared normalised, and those whose answer is `label`."""
        held = CachedLabels(examples)
        kept = {
            key: answer
            for key, answer in self.answers.items()
            if answer.example not in held and not (label and answer.example.label == label)
        }
        return replace(self, answers=kept)

    def only(self, examples: Iterable[Example]) -> "TeacherLabels":
        """The answers to the texts of `examples`."""
        keys = {_key(example) for example in examples}
        return replace(self, answers={key: answer for key, answer in self.answers.items() if key in keys})

    def examples(self, *, multi_label: bool) -> list[Example]:
        """The texts with their likeliest answers, in the order of the files.

        With `multi_label` these are the tuples of the labels whose probability is at least a half.
        """
        if not multi_label:
            return [answer.example for answer in self.answers.values()]
        found = []
        for answer in self.answers.values():
            likely = tuple(sorted(name for name, probability in answer.labels.items() if probability >= HALF))
            found.append(replace(answer.example, label=likely) if answer.labels else answer.example)
        return found

    def check_kind(self, *, multi_label: bool, relations: bool) -> None:
        """Check that the answers are of the data's kind: one label or a list of them, with head and tail or without.

        Raises BadInput: one is not.
        """
        if not self.task.has_kinds:
            return
        for answer in self.answers.values():
            example = answer.example
            fault = ""
            if not answer.labels and isinstance(example.label, tuple) is not multi_label:
                names = ("one string", "a list") if multi_label else ("a list", "one string")
                fault = f"`label` is {names[0]}, and in the data it is {names[1]}"
            marked = example.head is not None or (relations and has_markers(example.text))
            if marked is not relations:
                fault = f"there {'is no' if relations else 'are'} `head` and `tail`, unlike in the data"
            if fault:
                raise BadInput(
                    f"{self.name}, the text {example.text[:80]!r}: {fault}. Give answers of the data's kind."
                )

    def check_labels(self, labels: Iterable[str], *, multi_label: bool) -> None:
        """Check that the task has the labels that the answers give. `labels` are its classes, or the labels of its entities.

        A label that is only possible, and nowhere the likeliest, may be unknown: its probability goes to the others. Raises
        BadInput: it lacks some; or probabilities of classes of which one applies sum to more than 1.
        """
        known = set(labels)
        strange = sorted({name for answer in self.answers.values() for name in named_in(answer)} - known)
        if strange:
            more = f" and {len(strange) - SHOWN_LABELS} more" if len(strange) > SHOWN_LABELS else ""
            raise BadInput(
                f"{self.name} has labels that the task lacks: {', '.join(strange[:SHOWN_LABELS])}{more}. The task has "
                f"{', '.join(sorted(known)[:SHOWN_LABELS])}{' and others' if len(known) > SHOWN_LABELS else ''}. Rename or remove them."
            )
        if multi_label:
            return
        for answer in self.answers.values():
            if sum(answer.labels.values()) > MOST_SUM:
                raise BadInput(
                    f"{self.name} gives the text {answer.example.text[:80]!r} probabilities that sum to "
                    f"{sum(answer.labels.values()):.3f}, and one label applies to a text. Give probabilities that sum to 1."
                )

    def smoothed(self, labelled: Iterable[Example], labels: Sequence[str]) -> tuple["TeacherLabels", str]:
        """The answers with a probability in place of each class that came without one, and a line that says so.

        It is the share of such answers that the texts of `labelled` agree with, (right + 1) / (answers + 2), if there are `LEAST_MEASURED`
        or more; otherwise they stay certain. Where any number of `labels` may apply, so has each label that an answer does not name.
        """
        # Of labels that an answer names (True), and of the others: those that apply, and all; each begins as one of two.
        agree: dict[bool, list[int]] = {True: [1, 2], False: [1, 2]}
        measured = 0
        for example in labelled:
            answer = self.answers.get(_key(example))
            if answer and _names_alone(answer) and example.label is not None:
                measured += 1
                there, named = set(classes_of(example)), set(classes_of(answer.example))
                for label in labels if isinstance(example.label, tuple) else named:
                    agree[label in named][0] += label in there
                    agree[label in named][1] += 1
        if measured < LEAST_MEASURED:
            return self, ""
        sure, missed = (right / count for right, count in agree.values())

        def of(answer: Answer) -> Answer:
            if not _names_alone(answer):
                return answer
            named = classes_of(answer.example)
            if isinstance(answer.example.label, tuple):
                return replace(
                    answer,
                    labels={each: max(sure, HALF) if each in named else min(missed, HALF - LEAST) for each in labels},
                )
            # The rest is shared out evenly among the others, which must not become likelier.
            return replace(answer, labels={named[0]: max(sure, 1.1 / len(labels))})

        answers = {key: of(answer) for key, answer in self.answers.items()}
        line = f"Answers without probabilities are taken as {sure:.1%} sure, as {measured:,} texts with labels agree with them."
        return replace(self, answers=answers), line

    def logits(self, encoded: Encoded, examples: Sequence[Example]) -> list[np.ndarray | None]:
        """For each of `examples`, tokenised as `encoded`, logits (rows, labels) whose softmax are the answer's probabilities.

        With `encoded.multi_label` it is their sigmoid. None where there is no answer, or it does not reach to the last word.
        """
        return [
            encoded.task.teacher_logits(answer, encoded, i) if (answer := self.answers.get(_key(example))) else None
            for i, example in enumerate(examples)
        ]


def read_teacher_labels(paths: Sequence[Path], task: Task, columns: Columns = USUAL) -> TeacherLabels:
    """The answers in `paths`, files in any of the formats of labelled text.

    A row has the text and, for classes, `labels` (an object of probabilities by name) or `label` (a name, or a list of them where
    several may apply). For entities it has `entities`, each with an optional `score`, or `words`, each with `start`, `end` and
    `tags` (an object of probabilities by tag). Rows without any of these are texts without an answer. Raises BadInput: no such
    file, an unknown suffix, or no answer in them. BadRows: rows that cannot be read, or that answer one text in two ways.
    """
    faults: list[Fault] = []
    answers: dict[str, Answer] = {}
    first: dict[str, tuple[Path, int]] = {}
    for path in paths:
        check_there(path)
        suffix = suffix_of(path)
        if suffix not in SUFFIXES or suffix == ".conll":
            raise BadInput(
                f"--teacher-labels {path} does not end in {', '.join(SUFFIXES[:-1])}. Give its rows in one of them."
            )
        try:
            for line, row in rows_in(path, suffix, columns, None, faults):
                try:
                    answer = answer_in(row, task, columns)
                except ValueError as reason:
                    note(faults, Fault(str(path), line, str(reason)))
                    continue
                if answer is None:
                    continue
                key = _key(answer.example)
                if key in answers and answers[key] != answer:
                    where = first[key]
                    note(
                        faults,
                        Fault(str(path), line, f"answers the text of {where[0].name}, line {where[1]}, in another way"),
                    )
                    continue
                answers.setdefault(key, answer)
                first.setdefault(key, (path, line))
        except UnreadableFrom as error:
            faults += error.faults
    if faults:
        raise BadRows(faults)
    files = tuple(map(str, paths))
    tags = tuple({tag for answer in answers.values() for word in answer.words or () for tag in word.tags})
    read = dict(zip(tags, with_prefixes(tags), strict=True))
    if any(tag != as_read for tag, as_read in read.items()):
        answers = {key: with_tags_as(answer, read) for key, answer in answers.items()}
    if not answers:
        raise BadInput(
            f"--teacher-labels {', '.join(files)} holds no answer: no row has {task.answer_fields}, which {task.name} needs."
        )
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()
    return TeacherLabels(files, task, answers, digest)


class CachedLabels:
    """Texts that must not be learned. `in` compares them normalised."""

    def __init__(self, examples: Iterable[Example]) -> None:
        self._texts = {*map(normalised, examples)}

    def __contains__(self, example: Example) -> bool:
        return normalised(example) in self._texts


def _names_alone(answer: Answer) -> bool:
    """Whether `answer` names classes without probabilities."""
    return answer.example.label is not None and not answer.labels


def _key(example: Example) -> str:
    return f"{example.text_read}\x00{example.text_pair or ''}"


def with_the_rest(found: np.ndarray, unnamed: np.ndarray) -> np.ndarray:
    """`found` (labels,) with what it lacks to 1 shared out evenly to the `unnamed`, or if all are named in their proportion."""
    rest = max(0.0, 1.0 - float(found.sum()))
    if unnamed.any():
        return np.where(unnamed, rest / unnamed.sum(), found)
    total = float(found.sum())
    return found / total if total else np.full_like(found, 1 / len(found))


def word_logits(tags: Sequence[Mapping[tuple[str, str], float]], labels: Sequence[str]) -> np.ndarray:
    """Logits (words, labels) whose softmax are the probabilities of the `tags` of each word, as `align_labels` gives them."""
    logits: np.ndarray = np.log(_as_rows(tags, labels)).astype(np.float32)
    return logits


def _as_rows(tags: Sequence[Mapping[tuple[str, str], float]], labels: Sequence[str]) -> np.ndarray:
    """The probabilities of the tags `labels` for each word, (words, labels), each at least `LEAST`."""
    names = [split_tag(label) for label in with_prefixes(tuple(labels))]
    alike = Counter(names)
    rows = np.array([[word.get(name, 0.0) / alike[name] for name in names] for word in tags]).reshape(
        len(tags), len(labels)
    )
    unnamed = np.array([[name not in word for name in names] for word in tags]).reshape(len(tags), len(labels))
    whole = [with_the_rest(row, missing) for row, missing in zip(rows, unnamed, strict=True)]
    found: np.ndarray = np.clip(np.array(whole).reshape(len(tags), len(labels)), LEAST, 1.0)
    return found
