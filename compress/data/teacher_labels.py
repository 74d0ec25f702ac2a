"""A teacher's answers from a file: a row a text, with its label, the probability of each label, or its entities.

Whatever gave them is not needed: a model of any family, a large language model, rules, or people. Answers are matched with texts
by the text, and with words by characters, so that the teacher may read text with another tokenizer than the student.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compress.data.columns import USUAL, Columns
from compress.data.encoded import Encoded
from compress.data.examples import Entity, Example, Task
from compress.data.fields import label_of
from compress.data.file_formats import SUFFIXES, rows_in
from compress.data.labelled_files import check_there
from compress.data.row_faults import BadRows, Fault, UnreadableFrom, note
from compress.data.rows import entities_of, labels_of, unlabelled_example
from serve.errors import BadInput
from serve.text.labels import OUTSIDE, split_tag
from serve.text.spans import words

LEAST = 1e-8
"""The probability of what a teacher does not name, so that its logarithm is finite; also the distance of the largest one from 1."""
MOST_SUM = 1.001  # of probabilities of one text's classes, which were rounded when they were written
ABOVE_HALF = 0.5  # from this probability on a label applies, where several may
SHOWN_LABELS = 5


class WordAnswer(NamedTuple):
    """A word, `text[start:end]`, and the probability of each of its tags; the rest goes to those that are not named."""

    start: int
    end: int
    tags: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """The teacher's answer to one text."""

    example: Example
    """The text with the likeliest answer as its label or its entities."""
    labels: Mapping[str, float] = field(default_factory=dict)
    """The probability of each label; empty where the row has none."""
    words: tuple[WordAnswer, ...] = ()
    scores: tuple[float, ...] = ()
    """The probability of each of the example's entities."""


@dataclass(frozen=True)
class TeacherLabels:
    """The answers of one or more files, by text."""

    files: tuple[str, ...]
    task: Task
    answers: Mapping[str, Answer]
    fingerprint: str
    """The SHA-256 of the files."""

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def name(self) -> str:
        """The files, for messages."""
        return ", ".join(self.files)

    @property
    def public_name(self) -> str:
        """The names of the files without their folders, which are private."""
        return " and ".join(Path(file).name for file in self.files)

    def answer_to(self, example: Example) -> Answer | None:
        """The answer to the text of `example`; None if there is none."""
        return self.answers.get(_key(example))

    def without(self, examples: Iterable[Example]) -> "TeacherLabels":
        """The answers to all texts but those of `examples`."""
        left_out = {_key(example) for example in examples}
        return replace(self, answers={key: answer for key, answer in self.answers.items() if key not in left_out})

    def examples(self, *, multi_label: bool) -> list[Example]:
        """The texts with their likeliest answers, in the order of the files.

        With `multi_label` these are the tuples of the labels whose probability is at least a half.
        """
        if not multi_label:
            return [answer.example for answer in self.answers.values()]
        return [
            replace(answer.example, label=tuple(sorted(name for name, p in answer.labels.items() if p >= ABOVE_HALF)))
            if answer.labels
            else answer.example
            for answer in self.answers.values()
        ]

    def check_labels(self, labels: Iterable[str], *, multi_label: bool) -> None:
        """Check that the task has all labels of the answers. `labels` are its classes, or the labels of its entities.

        Raises:
            BadInput: it lacks some; or probabilities of classes of which one applies sum to more than 1.
        """
        known = set(labels)
        strange = sorted({name for answer in self.answers.values() for name in named_in(answer)} - known)
        if strange:
            more = f" and {len(strange) - SHOWN_LABELS} more" if len(strange) > SHOWN_LABELS else ""
            raise BadInput(
                f"--teacher-labels {self.name} has labels that the task lacks: {', '.join(strange[:SHOWN_LABELS])}{more}. The task has "
                f"{', '.join(sorted(known)[:SHOWN_LABELS])}{' and others' if len(known) > SHOWN_LABELS else ''}. Rename or remove them."
            )
        if multi_label:
            return
        for answer in self.answers.values():
            if sum(answer.labels.values()) > MOST_SUM:
                raise BadInput(
                    f"--teacher-labels {self.name} gives the text {answer.example.text[:80]!r} probabilities that sum to "
                    f"{sum(answer.labels.values()):.3f}, and one label applies to a text. Give probabilities that sum to 1."
                )

    def logits(self, encoded: Encoded, examples: Sequence[Example]) -> list[np.ndarray | None]:
        """For each of `examples`, tokenised as `encoded`, logits (rows, labels) whose softmax are the answer's probabilities.

        With `encoded.multi_label` it is their sigmoid. None where there is no answer, or it does not reach to the last word.
        """
        return [
            self._logits(encoded, i, answer) if (answer := self.answer_to(example)) else None
            for i, example in enumerate(examples)
        ]

    def _logits(self, encoded: Encoded, index: int, answer: Answer) -> np.ndarray | None:
        if self.task == "text-classification":
            of_class = _of_classes(answer, encoded.labels, multi_label=encoded.multi_label)
            logits: np.ndarray = np.log(of_class) - np.log1p(-of_class) if encoded.multi_label else np.log(of_class)
            return logits[None].astype(np.float32)
        encoding = encoded.encodings[index]
        places = [(word.start, word.end) for word in words(encoded.texts[index], encoding.offsets, encoding.word_ids)]
        given = answer.words or words_of_entities(places, answer)
        carried = carry_words(places, given)
        return None if carried is None else np.log(_as_rows(carried, encoded.labels)).astype(np.float32)


def read_teacher_labels(paths: Sequence[Path], task: Task, columns: Columns = USUAL) -> TeacherLabels:
    """The answers in `paths`, files in any of the formats of labelled text.

    A row has the text and, for classes, `labels` (an object of probabilities by name) or `label` (a name, or a list of them where
    several may apply). For entities it has `entities`, each with an optional `score`, or `words`, each with `start`, `end` and
    `tags` (an object of probabilities by tag). Rows without any of these are texts without an answer.

    Raises:
        BadInput: no such file, an unknown suffix, or no answer in them.
        BadRows: rows that cannot be read, or that answer one text in two ways.
    """
    faults: list[Fault] = []
    answers: dict[str, Answer] = {}
    first: dict[str, tuple[Path, int]] = {}
    for path in paths:
        check_there(path)
        if path.suffix not in SUFFIXES or path.suffix == ".conll":
            raise BadInput(
                f"--teacher-labels {path} does not end in {', '.join(SUFFIXES[:-1])}. Give its rows in one of them."
            )
        try:
            for line, row in rows_in(path, path.suffix, columns, None, faults):
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
    if not answers:
        fields = "labels or label" if task == "text-classification" else "entities or words"
        raise BadInput(f"--teacher-labels {', '.join(files)} holds no answer: no row has {fields}, which {task} needs.")
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()
    return TeacherLabels(files, task, answers, digest)


def carry_words(
    places: Sequence[tuple[int, int]], given: Sequence[WordAnswer]
) -> list[Mapping[tuple[str, str], float]] | None:
    """The tags of words at `places` from those of the teacher's words `given`, which may begin and end elsewhere.

    Each word takes the tags of the teacher's word with which it shares most characters, of equal ones the first. Where several
    words share one of the teacher's, the entity that it begins goes on in the second; a word that holds the beginning of an entity
    and more of it begins it. In IO, `I` after a word that is not of its label begins an entity. A word between two of the teacher's,
    which its tokenizer dropped, is inside the entity that goes on behind it, and otherwise outside.

    Args:
        places: (start, end) of each word, in order and without overlap.
        given: the teacher's words, in order and without overlap.

    Returns:
        For each word its probabilities by (`B` or `I`, label) and (`O`, ""); None where the teacher's words end before the last one.
    """
    if places and (not given or given[-1].end <= places[-1][0]):
        return None
    theirs = [_in_bio(word.tags) for word in given]
    likeliest = [max(tags, key=lambda tag: tags[tag]) for tags in theirs]
    begins = any(prefix == "B" for tags in theirs for prefix, _ in tags)  # not in IO
    best = _shared_most(places, given)
    found: list[Mapping[tuple[str, str], float]] = []
    last, before = -1, ""
    for first, index in best:
        if index < 0:
            found.append({(OUTSIDE, ""): 1.0})
            continue
        tags, (prefix, label) = theirs[index], likeliest[index]
        if index == last:
            tags = _moved(tags, "B", "I")
        elif prefix == "I" and (
            (label != before and not begins) or ("B", label) in likeliest[max(first, last + 1) : index]
        ):
            tags = _moved(tags, "I", "B", label)
        found.append(tags)
        last, before = index, label
    _close_gaps(found, [index for _, index in best])
    return found


def _shared_most(places: Sequence[tuple[int, int]], given: Sequence[WordAnswer]) -> list[tuple[int, int]]:
    """For each of `places` two indices of words of `given`: the first that it shares characters with, and that with most of them.

    Of equals it is the first; -1 stands for none.
    """
    found: list[tuple[int, int]] = []
    at = 0
    for start, end in places:
        while at < len(given) and given[at].end <= start:
            at += 1
        best, most = -1, 0
        for index in range(at, len(given)):
            if given[index].start >= end:
                break
            shared = min(end, given[index].end) - max(start, given[index].start)
            if shared > most:
                best, most = index, shared
        found.append((at, best))
    return found


def _close_gaps(tags: list[Mapping[tuple[str, str], float]], best: Sequence[int]) -> None:
    """Give words that share nothing with the teacher's (-1 in `best`) the `I` of the word behind them, where that goes on."""
    for row in range(len(tags) - 2, -1, -1):
        prefix, label = max(tags[row + 1], key=lambda tag: tags[row + 1][tag])
        if best[row] < 0 and prefix == "I":
            tags[row] = {("I", label): 1.0}


def words_of_entities(places: Sequence[tuple[int, int]], answer: Answer) -> tuple[WordAnswer, ...]:
    """The words at `places` with the tags of the answer's entities; what a score lacks to 1 is the probability of `O`."""
    entities = answer.example.entities or ()
    found: list[WordAnswer] = []
    at, opened = 0, -1
    for start, end in places:
        while at < len(entities) and entities[at].end <= start:
            at += 1
        if at < len(entities) and entities[at].start < end:
            prefix = "I" if opened == at else "B"
            score = answer.scores[at]
            found.append(WordAnswer(start, end, {f"{prefix}-{entities[at].label}": score, OUTSIDE: 1.0 - score}))
            opened = at
        else:
            found.append(WordAnswer(start, end, {OUTSIDE: 1.0}))
    return tuple(found)


def _key(example: Example) -> str:
    return f"{example.text_read}\x00{example.text_pair or ''}"


def named_in(answer: Answer) -> set[str]:
    """The labels that `answer` names: classes, or labels of entities."""
    if answer.labels:
        return set(answer.labels)
    found = {split_tag(tag)[1] for word in answer.words for tag in word.tags if tag != OUTSIDE}
    found |= {entity.label for entity in answer.example.entities or ()}
    label = answer.example.label
    return found | ({label} if isinstance(label, str) else set(label or ()))


def _of_classes(answer: Answer, labels: Sequence[str], *, multi_label: bool) -> np.ndarray:
    """The probability of each of `labels`, (labels,), float32 above 0 and below 1."""
    label = answer.example.label
    given = answer.labels or dict.fromkeys([label] if isinstance(label, str) else label or (), 1.0)
    found = np.array([given.get(name, 0.0) for name in labels], dtype=np.float64)
    if not multi_label:
        found = _with_the_rest(found, np.array([name not in given for name in labels]))
    bounded: np.ndarray = np.clip(found, LEAST, 1 - LEAST)
    return bounded


def _with_the_rest(found: np.ndarray, unnamed: np.ndarray) -> np.ndarray:
    """`found` (labels,) with what it lacks to 1 shared out evenly to the `unnamed`, or if all are named in their proportion."""
    rest = max(0.0, 1.0 - float(found.sum()))
    if unnamed.any():
        return np.where(unnamed, rest / unnamed.sum(), found)
    total = float(found.sum())
    return found / total if total else np.full_like(found, 1 / len(found))


def _as_rows(tags: Sequence[Mapping[tuple[str, str], float]], labels: Sequence[str]) -> np.ndarray:
    """The probabilities of the tags `labels` for each word, (words, labels), each at least `LEAST`."""
    names = [split_tag(label) for label in labels]
    rows = np.array([[word.get(name, 0.0) for name in names] for word in tags]).reshape(len(tags), len(labels))
    unnamed = np.array([[name not in word for name in names] for word in tags]).reshape(len(tags), len(labels))
    whole = [_with_the_rest(row, missing) for row, missing in zip(rows, unnamed, strict=True)]
    found: np.ndarray = np.clip(np.array(whole).reshape(len(tags), len(labels)), LEAST, 1.0)
    return found


def _in_bio(tags: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """The probabilities by (`B`, label), (`I`, label) and (`O`, ""), of tags in BIO, BIOES or IO."""
    found: dict[tuple[str, str], float] = {}
    for tag, probability in tags.items():
        prefix, label = split_tag(tag)
        name = ({"S": "B", "E": "I"}.get(prefix, prefix), label)
        found[name] = found.get(name, 0.0) + probability
    return found


def _moved(
    tags: Mapping[tuple[str, str], float], source: str, target: str, label: str | None = None
) -> dict[tuple[str, str], float]:
    """`tags` with the probabilities of `source` given to `target`, of each label or of `label` alone."""
    found: dict[tuple[str, str], float] = {}
    for (prefix, of_label), probability in tags.items():
        name = (target if prefix == source and label in (None, of_label) else prefix, of_label)
        found[name] = found.get(name, 0.0) + probability
    return found


def answer_in(row: object, task: Task, columns: Columns = USUAL) -> Answer | None:
    """The answer in `row`; None if it has the text alone.

    Raises:
        ValueError: the row has a fault; the message describes it.
    """
    example = unlabelled_example(row, columns, alone=task == "token-classification")
    assert isinstance(row, dict)
    if task == "text-classification":
        return _class_answer(row, example, columns)
    if "words" in row:
        return _word_answer(row, example)
    if columns.entities not in row:
        return None
    entities = entities_of(row[columns.entities], example.text, columns.entities)
    by_place = {(item["start"], item["end"]): item for item in row[columns.entities]}
    scores = tuple(
        _probability(by_place[entity.start, entity.end].get("score", 1.0), f"the score of {entity.label}")
        for entity in entities
    )
    return Answer(Example(example.text, entities=entities), scores=scores)


def _class_answer(row: dict[str, object], example: Example, columns: Columns) -> Answer | None:
    given = row.get("labels") if columns.label != "labels" else None
    if isinstance(given, dict):
        if not given:
            raise ValueError("`labels` is empty; the probability of at least 1 label is needed")
        labels = {label_of(name, "labels"): _probability(value, f"that of {name}") for name, value in given.items()}
        likeliest = max(labels, key=lambda name: labels[name])
        said = row.get(columns.label)
        if isinstance(said, str) and said != likeliest:
            raise ValueError(
                f"`{columns.label}` is {said!r}, and by `labels` {likeliest!r} is the likeliest; give one of them"
            )
        return Answer(_labelled(example, likeliest), labels)
    if row.get(columns.label) is None:
        return None
    return Answer(_labelled(example, labels_of(row[columns.label], columns.label)))


def _labelled(example: Example, label: str | tuple[str, ...]) -> Example:
    return Example(example.text, example.text_pair, label=label, head=example.head, tail=example.tail)


def _word_answer(row: dict[str, object], example: Example) -> Answer:
    given = row["words"]
    if not isinstance(given, list):
        raise ValueError(f"`words` is {type(given).__name__}, not a list")
    found: list[WordAnswer] = []
    for item in given:
        if (
            not isinstance(item, dict)
            or not {"start", "end", "tags"} <= item.keys()
            or not isinstance(item["tags"], dict)
        ):
            raise ValueError(
                f"word {item!r} is not an object with `start`, `end` and `tags`, an object of probabilities by tag"
            )
        start, end = item["start"], item["end"]
        if type(start) is not int or type(end) is not int or not 0 <= start < end <= len(example.text):
            raise ValueError(
                f"a word is at {start!r}..{end!r}; whole numbers in the text ({len(example.text)} code points) are needed"
            )
        if found and start < found[-1].end:
            raise ValueError(f"words overlap: {found[-1].start}..{found[-1].end} and {start}..{end}")
        tags = {label_of(tag, "tags"): _probability(value, f"that of {tag}") for tag, value in item["tags"].items()}
        if not 0 < sum(tags.values()) <= MOST_SUM:
            raise ValueError(
                f"the tags of the word at {start}..{end} have probabilities that sum to {sum(tags.values()):.3f}, not to 1"
            )
        found.append(WordAnswer(start, end, tags))
    return Answer(Example(example.text, entities=_entities(found)), words=tuple(found))


def _entities(given: Sequence[WordAnswer]) -> tuple[Entity, ...]:
    """The entities that the likeliest tags of words make."""
    found: list[Entity] = []
    before = ""
    for word in given:
        prefix, label = split_tag(max(word.tags, key=lambda tag: word.tags[tag]))
        if prefix in ("I", "E") and label == before:
            found[-1] = Entity(found[-1].start, word.end, label)
        elif label:
            found.append(Entity(word.start, word.end, label))
        before = "" if prefix in ("E", "S") else label
    return tuple(found)


def _probability(given: object, what: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise ValueError(f"{what} is {given!r}; a probability from 0 to 1 is needed")
    return float(given)
