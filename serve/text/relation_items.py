"""Items of relations: a text and two parts of it -> the text with markers, which a model of relations reads."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from serve.errors import BadInput
from serve.text.answers import OffsetUnit, length_in
from serve.text.entity_markers import MARKERS, has_markers, marked

# The message for a text without its two parts, over HTTP and in Python.
UNMARKED = (
    'a model of relations needs two parts of the text; give "head" and "tail" beside "text", each as '
    '{"start": ..., "end": ...} (over HTTP at /v1/relations)'
)


class Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a text: from `start` to `end`, exclusive."""

    start: Annotated[int, Meta(ge=0)]
    end: Annotated[int, Meta(ge=1)]


class RelationItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A text, and the two parts whose relation is asked for."""

    text: str
    head: Part
    tail: Part


def item_of(given: Mapping[str, object], name: str) -> RelationItem:
    """The item in `given`, such as `{"text": ..., "head": {"start": ..., "end": ...}, "tail": ...}`; BadInput names the field `name`."""
    if not {"head", "tail"} <= given.keys():
        raise BadInput(f"{name}: {UNMARKED}", field=name)
    try:
        return msgspec.convert(dict(given), RelationItem)
    except msgspec.ValidationError as error:
        raise BadInput(
            f'{name}: {error}; give {{"text", "head", "tail"}}, the last two as {{"start", "end"}}', field=name
        ) from error


def check_marked(text: str) -> None:
    """BadInput when `text` has no markers."""
    if not has_markers(text):
        raise BadInput(f"text: {UNMARKED}", field="text")


def marked_text(text: str, head: Part, tail: Part, *, path: str = "", unit: OffsetUnit = "codepoints") -> str:
    """`text` with markers around `head` and `tail`, whose offsets count `unit`. `path` is put before names of fields in errors.

    BadInput, with the field, when a part is outside the text, is empty or ends inside a character, when the parts overlap, and
    when the text already has a marker.
    """
    if found := next((marker for marker in MARKERS if marker in text), None):
        raise BadInput(
            f"{path}text already has the marker {found}; send the text without markers; head and tail say where they go",
            field=f"{path}text",
        )
    head_place = _code_points(text, head, f"{path}head", unit)
    tail_place = _code_points(text, tail, f"{path}tail", unit)
    if head_place[0] < tail_place[1] and tail_place[0] < head_place[1]:
        raise BadInput(
            f"{path}tail ({tail.start} to {tail.end}) overlaps {path}head ({head.start} to {head.end}); "
            "give two parts that share no character",
            field=f"{path}tail",
        )
    return marked(text, head_place, tail_place)


def _code_points(text: str, part: Part, field: str, unit: OffsetUnit) -> tuple[int, int]:
    """The part's start and end in code points."""
    if part.start >= part.end:
        raise BadInput(
            f"{field} goes from {part.start} to {part.end}; end is exclusive and must be greater than start",
            field=f"{field}.end",
        )
    return (
        _code_point(text, part.start, f"{field}.start", unit),
        _code_point(text, part.end, f"{field}.end", unit),
    )


def _code_point(text: str, offset: int, field: str, unit: OffsetUnit) -> int:
    length = length_in(text, unit)
    if offset > length:
        raise BadInput(
            f"{field} {offset} is outside the text, which has {length} {unit}; check that `offsets` is the unit that you count",
            field=field,
        )
    if unit == "codepoints" or text.isascii():
        return offset
    encoding, width = ("utf-8", 1) if unit == "utf8" else ("utf-16-le", 2)
    try:
        return len(text.encode(encoding)[: offset * width].decode(encoding))
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{field} {offset} is inside a character; give the {unit} offset of its start or end", field=field
        ) from error
