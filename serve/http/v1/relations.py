"""Questions of `/v1/relations`: a text and two parts of it -> the marked text that a model of relations reads."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from serve.errors import BadInput
from serve.http.v1.requests import ModelName, Truncate, check_limits, decode
from serve.settings import Limits
from serve.text.answers import OffsetUnit, length_in
from serve.text.entity_markers import MARKERS, marked


class Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a text: from `start` to `end`, exclusive."""

    start: Annotated[int, Meta(ge=0)]
    end: Annotated[int, Meta(ge=1)]


TopK = Annotated[
    int | None,
    Meta(description="a number from 1: how many labels to give; without it all, or where any number may apply, those"),
]
Unit = Annotated[
    OffsetUnit,
    Meta(description='"codepoints", "utf16" (as JavaScript counts) or "utf8" (bytes); what start and end count'),
]
Abstain = Annotated[
    bool, Meta(description="true or false: whether to give no label where the model is not sure enough")
]
PartOfText = Annotated[
    Part, Meta(description='an object {"start": ..., "end": ...}: a part of the text, end exclusive')
]


class RelationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Say what the head of a text is to its tail."""

    text: Annotated[str, Meta(description="a string")]
    head: PartOfText
    tail: PartOfText
    model: ModelName = None
    top_k: TopK = None
    offsets: Unit = "codepoints"
    truncate: Truncate = False
    abstain: Abstain = False


class RelationItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One text of several, and the two parts asked about."""

    text: str
    head: Part
    tail: Part


class RelationItemsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Say for each of several texts what its head is to its tail."""

    items: Annotated[list[RelationItem], Meta(description='a list of {"text", "head", "tail"}')]
    model: ModelName = None
    top_k: TopK = None
    offsets: Unit = "codepoints"
    truncate: Truncate = False
    abstain: Abstain = False


class _Form(msgspec.Struct):
    items: msgspec.Raw | UnsetType = UNSET


def decode_relations(body: bytes) -> RelationRequest | RelationItemsRequest:
    """The body as the one form or the other; errors as `serve.http.v1.requests.decode`."""
    try:
        several = msgspec.json.decode(body, type=_Form).items is not UNSET
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        several = b'"items"' in body  # a guess at what was meant; what is wrong with it is found again, and told
    return decode(body, RelationItemsRequest) if several else decode(body, RelationRequest)


def marked_texts(asked: RelationRequest | RelationItemsRequest, limits: Limits) -> list[str]:
    """Each text with markers round its head and its tail.

    BadInput, with the field, when there is no item, when a part lies outside its text, is empty or ends inside a character,
    when the two overlap, and when a text holds markers already. TooLarge beyond the limits.
    """
    if isinstance(asked, RelationRequest):
        check_limits([asked.text], "text", limits)
        return [_marked(asked, "", asked.offsets)]
    if not asked.items:
        raise BadInput("items is an empty list; give at least one text with its head and tail", field="items")
    check_limits([item.text for item in asked.items], "items", limits)
    return [_marked(item, f"items[{index}].", asked.offsets) for index, item in enumerate(asked.items)]


def _marked(item: RelationRequest | RelationItem, path: str, unit: OffsetUnit) -> str:
    text = item.text
    if found := next((marker for marker in MARKERS if marker in text), None):
        raise BadInput(
            f"{path}text holds the marker {found} already; send the plain text, head and tail say what is marked",
            field=f"{path}text",
        )
    head = _code_points(text, item.head, f"{path}head", unit)
    tail = _code_points(text, item.tail, f"{path}tail", unit)
    if head[0] < tail[1] and tail[0] < head[1]:
        raise BadInput(
            f"{path}tail ({item.tail.start} to {item.tail.end}) overlaps {path}head ({item.head.start} to {item.head.end}); "
            "give two parts that share no character",
            field=f"{path}tail",
        )
    return marked(text, head, tail)


def _code_points(text: str, part: Part, field: str, unit: OffsetUnit) -> tuple[int, int]:
    """The part's start and end in code points."""
    if part.start >= part.end:
        raise BadInput(
            f"{field} goes from {part.start} to {part.end}; end is exclusive and must be beyond start",
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
            f"{field} {offset} lies outside the text, which has {length} {unit}; is `offsets` the unit that you count in?",
            field=field,
        )
    if unit == "codepoints" or text.isascii():
        return offset
    encoding, width = ("utf-8", 1) if unit == "utf8" else ("utf-16-le", 2)
    try:
        return len(text.encode(encoding)[: offset * width].decode(encoding))
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{field} {offset} lies inside a character; give where it begins or ends, counted in {unit}", field=field
        ) from error
