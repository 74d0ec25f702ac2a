"""Reads the texts that somebody or something is asked about, and turns a row of a file of answers into a teacher's answer to a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from compress.data.align_labels import WordAnswer, added_up
from compress.data.columns import USUAL, Columns
from compress.data.examples import Entity, Example
from compress.data.file_formats import SUFFIXES, looks_like_columns, rows_in, suffix_of
from compress.data.labelled_files import check_there
from compress.data.row_fields import BadRows, Fault, UnreadableFrom, label_of, note
from compress.data.rows import unlabelled_example
from compress.data.tags import from_tags
from compress.data.task import Task
from compress.data.texts import read_texts
from serve.errors import BadInput
from serve.text.labels import OUTSIDE, split_tag

MOST_SUM = 1.001  # of probabilities of one word's tags or one text's classes, which were rounded when they were written
HALF = 0.5  # from this probability on an entity is there, and a label applies where several may


@dataclass(frozen=True, slots=True)
class Answer:
    """The teacher's answer to one text."""

    example: Example
    """The text with the likeliest answer as its label or its entities."""
    labels: Mapping[str, float] = field(default_factory=dict)
    """The probability of each label; empty where the row has none."""
    words: tuple[WordAnswer, ...] | None = None
    """The probabilities of the tags of each word; None where the row has entities instead."""
    spans: tuple[tuple[Entity, float], ...] = ()
    """Each entity with its probability, also those that are not likely."""


def answer_in(row: object, task: Task, columns: Columns = USUAL) -> Answer | None:
    """The answer in `row`; None if it has the text alone, or null in place of an answer.

    A field that `columns` name otherwise may also have its usual name, which is what `stillroom label` writes. Raises ValueError:
    the row has a fault; the message describes it.
    """
    named = _names_in(row, columns)
    example = unlabelled_example(row, named, alone=task.labels_words)
    assert isinstance(row, dict)
    return task.teacher_answer(row, example, named)


def with_tags_as(answer: Answer, read: Mapping[str, str]) -> Answer:
    """`answer` with each tag of its words as `read` has it; tags that are read alike add up."""
    if answer.words is None:
        return answer
    words = tuple(
        word._replace(tags=added_up((read[tag], each) for tag, each in word.tags.items())) for word in answer.words
    )
    return replace(answer, example=replace(answer.example, entities=_entities(words)), words=words)


def named_in(answer: Answer) -> set[str]:
    """The labels that `answer` gives its text: classes, or labels of entities; not those that are only possible, and no numbers."""
    if answer.words is not None:
        tags = (max(word.tags, key=lambda tag: word.tags[tag]) for word in answer.words)
        return {split_tag(tag)[1] for tag in tags if tag != OUTSIDE}
    if answer.spans:
        return {entity.label for entity, _ in answer.spans}
    label = answer.example.label
    if isinstance(label, float):
        return set()
    return {label} if isinstance(label, str) else set(label or ())


def _names_in(row: object, columns: Columns) -> Columns:
    """`columns` with the usual name of each field that the row has by that name alone."""
    if columns == USUAL or not isinstance(row, dict):
        return columns
    usual = {
        name: getattr(USUAL, name)
        for name in ("text", "text_pair", "label", "entities")
        if getattr(columns, name) not in row and getattr(USUAL, name) in row
    }
    return replace(columns, **usual)


def word_answer(given: object, example: Example) -> Answer:
    """The answer of the field `words`. ValueError describes its fault."""
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
        tags = {
            label_of(tag, "tags"): probability_in(value, f"that of {tag}")
            for tag, value in item["tags"].items()
            if value is not None
        }
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


def probability_in(given: object, what: str) -> float:
    """`given` as a probability. ValueError if it is none; `what` says of what."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise ValueError(f"{what} is {given!r}; a probability from 0 to 1 is needed")
    return float(given)


def read_asked(path: Path, task: Task, columns: Columns, role: str) -> list[Example]:
    """The texts of the file that the flag `role` names, without their labels; words with tags are read as the text that they make.

    Raises BadInput: no such file, another format, or no text in it. BadRows: rows have faults, all of which it lists.
    """
    suffix = suffix_of(path)
    if suffix == ".txt" and task.labels_words and path.is_file() and looks_like_columns(path, tagged=True):
        suffix = ".conll"
    if suffix == ".txt":
        return [Example(text) for text in read_texts(path, columns)]
    check_there(path)
    if suffix not in SUFFIXES:
        raise BadInput(f"{role} {path} does not end in {', '.join(SUFFIXES)} or .txt. Give its texts in one of them.")
    found: list[Example] = []
    faults: list[Fault] = []
    try:
        for line, row in rows_in(path, suffix, columns, task if suffix == ".conll" else None, faults):
            try:
                found.append(_example(row, task, columns))
            except ValueError as reason:
                note(faults, Fault(str(path), line, str(reason)))
    except UnreadableFrom as error:
        faults += error.faults
    if faults:
        raise BadRows(faults)
    if not found:
        raise BadInput(f"{role} {path} holds no text. Give a file with one text a row.")
    return found


def _example(row: object, task: Task, columns: Columns) -> Example:
    if task.labels_words and isinstance(row, dict) and columns.text not in row and columns.tokens in row:
        tokens = row[columns.tokens]
        return Example(from_tags(tokens, [OUTSIDE] * len(tokens) if isinstance(tokens, list) else tokens).text)
    return unlabelled_example(row, columns, alone=task.labels_words)
