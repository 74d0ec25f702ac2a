"""The example that one row of a file says, or what is wrong with the row."""

from itertools import pairwise
from typing import Any

from compress.data.examples import Entity, Example, Task
from compress.data.fields import pair_of, text_of, whole_characters
from compress.data.tags import from_tags
from serve.text.entity_markers import MARKERS


def example_of(row: object, task: Task) -> Example:
    """The example that one row of a file or dataset says.

    Raises:
        ValueError: what is wrong with the row, in words.
    """
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, not an object with fields")
    if task == "token-classification":
        return _token_example(row)
    text = text_of(row, "text")
    pair = pair_of(row)
    if "label" not in row:
        raise ValueError(f"has no `label` (its fields: {', '.join(map(str, row)) or 'none'})")
    label = _label(row["label"])
    given = [row.get("head"), row.get("tail")]
    if None in given and not any(isinstance(place, dict) for place in given):
        return Example(text, pair, label=label)
    if pair:
        raise ValueError("has both `text_pair` and `head`; head and tail are parts of one text")
    head, tail = _head_and_tail(row, text)
    return Example(text, label=label, head=head, tail=tail)


def _head_and_tail(row: dict[str, Any], text: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the two parts of a relation stand."""
    if found := [marker for marker in MARKERS if marker in text]:
        raise ValueError(f"`text` holds {found[0]}, which will mark the head or the tail; give the text without it")
    places: list[tuple[int, int]] = []
    for name in ("head", "tail"):
        place = row.get(name)
        if not isinstance(place, dict) or not {"start", "end"} <= place.keys():
            raise ValueError(
                f"`{name}` is {place!r}; an object with `start` and `end` is needed, which CSV and TSV cannot hold"
            )
        start, end = place["start"], place["end"]
        if type(start) is not int or type(end) is not int or not 0 <= start < end:
            raise ValueError(f"`{name}` is at {start}..{end}: whole numbers are needed, 0 <= start < end")
        if end > len(text):
            raise ValueError(f"`{name}` ends at {end}, past the end of the text ({len(text)} code points)")
        if not text[start:end].strip():
            raise ValueError(f"`{name}` at {start}..{end} covers only whitespace")
        places.append((start, end))
    head, tail = places
    if head[0] < tail[1] and tail[0] < head[1]:
        raise ValueError(
            f"`head` {head[0]}..{head[1]} and `tail` {tail[0]}..{tail[1]} overlap; two parts of the text are needed"
        )
    return head, tail


def _label(given: object) -> str | tuple[str, ...]:
    """One class, or all labels that apply."""
    several: list[Any] = given if isinstance(given, list) else [given]
    for name in several:
        if not isinstance(name, str) or not name:
            where = f"`label` holds {name!r}" if isinstance(given, list) else f"`label` is {given!r}"
            raise ValueError(f"{where}; a non-empty string is needed, or a list of them where several labels may apply")
    names = tuple(sorted(whole_characters(name, "label") for name in several))
    if len(set(names)) < len(names):
        raise ValueError(f"`label` holds {next(a for a, b in pairwise(names) if a == b)!r} twice")
    return names if isinstance(given, list) else names[0]


def _token_example(row: dict[str, Any]) -> Example:
    if "entities" not in row:
        tags = next((row[name] for name in ("tags", "ner_tags") if name in row), None)
        if "tokens" in row and tags is not None:
            return from_tags(row["tokens"], tags)
        raise ValueError(
            f"has neither `text` + `entities` nor `tokens` + `tags` (its fields: {', '.join(map(str, row))})"
        )
    text = text_of(row, "text")
    if not isinstance(row["entities"], list):
        raise ValueError(f"`entities` is {type(row['entities']).__name__}, not a list")
    entities = sorted((_entity(item, text) for item in row["entities"]), key=lambda entity: entity.start)
    for before, after in pairwise(entities):
        if after.start < before.end:
            raise ValueError(
                f"entities overlap: {before.label} {before.start}..{before.end} and {after.label} {after.start}..{after.end}"
            )
    return Example(text, entities=tuple(entities))


def _entity(item: object, text: str) -> Entity:
    if not isinstance(item, dict) or not {"start", "end", "label"} <= item.keys():
        raise ValueError(f"entity {item!r} is not an object with `start`, `end`, `label`")
    start, end, label = item["start"], item["end"], item["label"]
    if type(start) is not int or type(end) is not int or not isinstance(label, str) or not label:
        raise ValueError(f"entity {item!r}: `start` and `end` are whole numbers, `label` a non-empty string")
    if not 0 <= start < end:
        raise ValueError(f"entity {label} is at {start}..{end}: 0 <= start < end is needed")
    if end > len(text):
        raise ValueError(f"entity {label} ends at {end}, past the end of the text ({len(text)} code points)")
    if not text[start:end].strip():
        raise ValueError(f"entity {label} at {start}..{end} covers only whitespace")
    return Entity(start, end, whole_characters(label, "label"))
