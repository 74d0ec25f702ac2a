"""Turns one row of a file into an example, or finds its fault."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unicodedata import normalize

from compress.data.columns import USUAL, Columns
from compress.data.examples import Entity, Example
from compress.data.row_fields import label_of, pair_of, text_of
from compress.data.task import Task
from serve.text.entity_markers import MARKERS

# The fields of an entity by the names that Prodigy, spaCy, doccano, Rasa, Label Studio and transformers give them.
PLACE_NAMES = (
    ("start", "start_offset", "start_char", "begin"),
    ("end", "end_offset", "end_char"),
    ("label", "labels", "entity_group", "type", "entity"),
)
OWN_TEXTS = ("text", "word", "value", "mention", "surface", "surface_form", "entity_text", "span", "phrase", "name")
NORMAL_FORMS = ("value", "name", "phrase")  # of these, where tools write what the text means
LANGUAGE = "language"  # the column that names a row's language


def example_of(row: object, task: Task, columns: Columns = USUAL) -> Example:
    """The example of one row of a file or data set. Raises ValueError: the row has a fault; the message describes it."""
    row = _object(row, columns)
    example, language = task.example_of(row, columns), row.get(LANGUAGE)
    # Another column of that name is not ours.
    return replace(example, language=language.strip()) if isinstance(language, str) else example


def _object(row: object, columns: Columns) -> dict[str, Any]:
    """`row` as an object; spaCy's pair of a text and an object of its labels is read as one. ValueError if it is neither."""
    if isinstance(row, list) and [*map(type, row)] == [str, dict]:
        return {columns.text: row[0], **row[1]}
    if not isinstance(row, dict):
        twice = "; it was written as JSON twice" if isinstance(row, str) and row.startswith("{") else ""
        raise ValueError(f"is {type(row).__name__}, not an object with fields{twice}")
    return row


def unlabelled_example(row: object, columns: Columns = USUAL, *, alone: bool = False) -> Example:
    """The text of a row, with the second one of a pair, or with head and tail, if it has these; or with `alone` without them.

    Raises ValueError: the row has a fault; the message describes it.
    """
    row = _object(row, columns)
    text, pair = texts_of(row, columns, pairs=not alone)
    given = [row.get("head"), row.get("tail")]
    if alone or (None in given and not any(isinstance(place, dict) for place in given)):
        return Example(text, pair)
    if pair:
        raise ValueError(f"has both `{columns.text_pair}` and `head`, which is part of one text; remove one of the two")
    head, tail = _head_and_tail(row, text)
    return Example(text, head=head, tail=tail)


def check_labelled(row: dict[str, Any], columns: Columns, task: Task) -> None:
    """ValueError if the row has no text with a label, or not the second text that `columns` names."""
    named_pair = columns.text_pair != USUAL.text_pair
    if columns.text not in row or columns.label not in row or (named_pair and columns.text_pair not in row):
        raise ValueError(columns.fault_of_row(row, task))


def answers_in(given: object, name: str) -> list[object]:
    """The answers in the field `name`, each as an object.

    They are a list of objects, each with `start` and `end` in the context, or with `text` and `answer_start` as in SQuAD; or one
    object that has lists under these two names, as the `datasets` library gives SQuAD. An empty list is a question without an
    answer. Raises ValueError: they are not; the message describes the fault.
    """
    if isinstance(given, dict) and {"text", "answer_start"} <= given.keys():
        texts, starts = given["text"], given["answer_start"]
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(given, list):
        raise ValueError(
            f"`{name}` is {type(given).__name__}; a list is needed, of objects with `text` and `answer_start`, or with `start` and `end`"
        )
    return given


def answer_place(given: object, context: str, name: str) -> tuple[int, int]:
    """The place of one answer in its context, without the white space around it. ValueError describes its fault."""
    if isinstance(given, dict) and {"text", "answer_start"} <= given.keys():
        text, start = given["text"], given["answer_start"]
        end = start + len(text) if isinstance(text, str) and type(start) is int else None
    elif isinstance(given, dict) and {"start", "end"} <= given.keys():
        text, start, end = given.get("text"), given["start"], given["end"]
    else:
        raise ValueError(
            f"`{name}` holds {given!r:.80}; an object with `text` and `answer_start`, or with `start` and `end`, is needed"
        )
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= len(context):
        raise ValueError(f"`{name}` holds {given!r:.80}, which is no place in the context ({len(context)} code points)")
    there = context[start:end]
    if "answer_start" in given and "text" in given:  # the text alone says how long the answer is
        differs = there != text
    else:
        differs = isinstance(text, str) and bool(text.strip()) and not _alike(text, there)
    if differs:
        looks = _guess(start, end, text, context) if isinstance(text, str) else ""
        raise ValueError(
            f"`{name}` holds {text!r:.60} at {start}, and the context has {there!r:.60} there; {looks}offsets count code points from 0"
        )
    if not there.strip():
        raise ValueError(f"`{name}` at {start}..{end} covers only whitespace")
    return start + len(there) - len(there.lstrip()), end - len(there) + len(there.rstrip())


def texts_of(row: object, columns: Columns, *, pairs: bool) -> tuple[str, str | None]:
    """The text of a row, and with `pairs` the second text, if there is one. Other fields are ignored.

    Raises ValueError: the row has a fault; the message describes it.
    """
    row = _object(row, columns)
    if columns.text not in row:
        raise ValueError(columns.fault_of_row(row, None))
    return text_of(row, columns.text), pair_of(row, columns.text_pair) if pairs else None


def _head_and_tail(row: dict[str, Any], text: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The places of the two parts of a relation, (start, end) each."""
    if found := [marker for marker in MARKERS if marker in text]:
        raise ValueError(f"`text` holds {found[0]}, which stillroom adds itself; give the text without it")
    places: list[tuple[int, int]] = []
    for name in ("head", "tail"):
        place = row.get(name)
        if not isinstance(place, dict) or not {"start", "end"} <= place.keys():
            raise ValueError(
                f"`{name}` is {place!r}; an object with `start` and `end` is needed (CSV and TSV cannot hold one)"
            )
        start, end = place["start"], place["end"]
        if type(start) is not int or type(end) is not int:
            raise ValueError(f"`{name}` is at {start}..{end}: whole numbers are needed, 0 <= start < end")
        if fault := _fault_of_place(start, end, place, text):
            raise ValueError(f"`{name}` {fault}")
        places.append((start, end))
    head, tail = places
    if head[0] < tail[1] and tail[0] < head[1]:
        raise ValueError(
            f"`head` {head[0]}..{head[1]} and `tail` {tail[0]}..{tail[1]} overlap; two parts of the text are needed"
        )
    return head, tail


def labels_of(given: object, name: str) -> str | tuple[str, ...]:
    """One class, or the sorted tuple of all labels that apply, in the field `name`.

    Raises ValueError: it is neither; the message describes the fault.
    """
    needed = "a non-empty string is needed, or a list of them where several labels may apply"
    if not isinstance(given, list):
        return label_of(given, name, needed)
    names = sorted(label_of(each, name, needed) for each in given)
    if len(set(names)) < len(names):
        raise ValueError(f"`{name}` holds {next(a for a, b in pairwise(names) if a == b)!r} twice")
    return tuple(names)


def entities_and_items(given: object, text: str, name: str) -> list[tuple[Entity, dict[str, Any]]]:
    """The entities of `text` in the field `name`, in order and without blanks at their ends, each with the object that it was read from.

    Raises ValueError: they are no list of entities, one contradicts the text, or two overlap; the message describes the fault.
    """
    found = sorted((_entity(item, text) for item in _entity_items(given, name)), key=lambda each: each[0].start)
    for (before, _), (after, _) in pairwise(found):
        if after.start < before.end:
            raise ValueError(
                f"entities overlap: {before.label} {before.start}..{before.end} and {after.label} {after.start}..{after.end}"
            )
    return found


def _entity_items(given: object, name: str) -> list[object]:
    """The entities in the field `name`, each as an object. One object of lists, as the `datasets` library gives them, is read too."""
    if isinstance(given, dict) and {"start", "end", "label"} <= given.keys():
        lists = {field: values for field, values in given.items() if isinstance(values, list)}
        if {"start", "end", "label"} <= lists.keys() and len({*map(len, lists.values())}) == 1:
            return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
        raise ValueError(
            f"`{name}` is one object; `start`, `end` and `label` are lists of equal length in it, or `{name}` is a list of such objects"
        )
    if not isinstance(given, list):
        twice = "; it was written as JSON twice" if isinstance(given, str) and given[:1] in "[{" else ""
        raise ValueError(
            f"`{name}` is {type(given).__name__}, not a list; a list of objects with `start`, `end` and `label` is needed{twice}"
        )
    return given


def _entity(item: object, text: str) -> tuple[Entity, dict[str, Any]]:
    if isinstance(item, list) and [*map(type, item)] in (
        [int, int, str],
        [int, int, str, str],
    ):  # as spaCy and doccano write entities
        item = dict(zip(("start", "end", "label", "text"), item, strict=False))
    named = (
        [next((name for name in names if name in item), "") for names in PLACE_NAMES] if isinstance(item, dict) else []
    )
    if not isinstance(item, dict) or "" in named or not named:
        raise ValueError(f"entity {item!r} is not an object with `start`, `end`, `label`")
    start, end, given = (item[name] for name in named)
    if type(start) is not int or type(end) is not int:
        raise ValueError(f"entity {item!r}: `start` and `end` are whole numbers")
    # Label Studio writes a list of labels.
    label = label_of(given[0] if isinstance(given, list) and len(given) == 1 else given, named[2])
    if fault := _fault_of_place(start, end, item, text):
        raise ValueError(f"entity {label} {fault}")
    there = text[start:end]
    return Entity(start + len(there) - len(there.lstrip()), end - len(there) + len(there.rstrip()), label), item


def _fault_of_place(start: int, end: int, given: Mapping[str, Any], text: str) -> str | None:
    """Why start..end is no part of the `text`, or not the `text` that the object `given` has itself; None if it is."""
    for name in OWN_TEXTS:
        own = given.get(name)
        if not isinstance(own, str) or not own.strip() or not 0 <= start <= end or _alike(own, text[start:end]):
            continue
        guess = _guess(start, end, own, text)
        unlike = name in NORMAL_FORMS and text[start:end] not in own
        if name != "text" and (unlike or (not guess and own not in text)):
            continue  # a normal form, such as a number without blanks
        return (
            f"at {start}..{end} is {text[start:end]!r:.60}, but its own `{name}` is {own!r:.60}; "
            f"{guess}offsets count code points from 0, and `end` is exclusive"
        )
    if not 0 <= start < end:
        return f"is at {start}..{end}: 0 <= start < end is needed"
    if end > len(text):
        return f"ends at {end}, past the end of the text ({len(text)} code points)"
    return None if text[start:end].strip() else f"at {start}..{end} covers only whitespace"


def _guess(start: int, end: int, own: str, text: str) -> str:
    """What the offsets look like, as the beginning of a remedy; empty if they look like nothing known."""
    utf16, utf8 = text.encode("utf-16-le", "surrogatepass"), text.encode("utf-8", "surrogatepass")
    readings = {
        "its end looks inclusive, add 1: ": text[start : end + 1],
        "its offsets look like UTF-16 units: ": utf16[2 * start : 2 * end].decode("utf-16-le", "replace"),
        "its offsets look like bytes of UTF-8: ": utf8[start:end].decode("utf-8", "replace"),
        "its offsets look counted from 1: ": text[max(0, start - 1) : max(0, end - 1)],
        "its offsets look counted from 1 with an inclusive end: ": text[max(0, start - 1) : end],
    }
    there = text[start:end]
    looks = next((looks for looks, found in readings.items() if found != there and _alike(own, found)), "")
    if not looks and text.count(own) == 1:
        return f"the text has it at {text.index(own)}: "
    return looks


def _alike(one: str, other: str) -> bool:
    """Whether two texts differ only in blanks, capitals and composed letters."""
    return one == other or len({" ".join(normalize("NFC", each).casefold().split()) for each in (one, other)}) == 1
