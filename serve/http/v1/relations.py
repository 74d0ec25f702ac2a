"""Request bodies of `/v1/relations`: a text and two parts of it -> the text with markers, which a model of relations reads."""

import codecs
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from serve.errors import BadInput
from serve.http.v1.requests import ABSTAIN, OFFSETS, TOP_K, ModelName, Promise, Truncate, check_limits, decode
from serve.settings import Limits
from serve.text.answers import OffsetUnit
from serve.text.relation_items import Part, RelationItem, marked_text

TopK = Annotated[int | None, Meta(description=TOP_K)]
Unit = Annotated[OffsetUnit | None, Meta(description=OFFSETS)]
Abstain = Annotated[bool | None, Meta(description=ABSTAIN)]
PartOfText = Annotated[
    Part, Meta(description='an object {"start": ..., "end": ...}: a part of the text, end exclusive')
]


class RelationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Find the relation of the head of a text to its tail."""

    text: Annotated[str, Meta(description="a string")]
    head: PartOfText
    tail: PartOfText
    model: ModelName = None
    top_k: TopK = None
    offsets: Unit = "codepoints"
    truncate: Truncate = False
    abstain: Abstain = False
    promise: Promise = None


class RelationItemsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Find the relation of head to tail in each of several texts."""

    items: Annotated[list[RelationItem], Meta(description='a list of {"text", "head", "tail"}')]
    model: ModelName = None
    top_k: TopK = None
    offsets: Unit = "codepoints"
    truncate: Truncate = False
    abstain: Abstain = False
    promise: Promise = None


class _Form(msgspec.Struct):
    items: msgspec.Raw | UnsetType = UNSET


def decode_relations(body: bytes) -> RelationRequest | RelationItemsRequest:
    """The body as one item or as a list of items; errors as in `serve.http.v1.requests.decode`."""
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        several = msgspec.json.decode(body, type=_Form).items is not UNSET
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        several = b'"items"' in body  # a guess at the form; decoding it raises the error
    return decode(body, RelationItemsRequest) if several else decode(body, RelationRequest)


def marked_texts(asked: RelationRequest | RelationItemsRequest, limits: Limits) -> list[str]:
    """Each text with markers around its head and its tail.

    BadInput, with the field, when there is no item, and as in `marked_text`. TooLarge beyond the limits.
    """
    if isinstance(asked, RelationRequest):
        check_limits([asked.text], "text", limits)
        return [_marked(asked, "", asked.offsets)]
    if not asked.items:
        raise BadInput("items is an empty list; give at least one text with its head and tail", field="items")
    check_limits([item.text for item in asked.items], "items", limits)
    return [_marked(item, f"items[{index}].", asked.offsets) for index, item in enumerate(asked.items)]


def _marked(item: RelationRequest | RelationItem, path: str, unit: OffsetUnit | None) -> str:
    return marked_text(item.text, item.head, item.tail, path=path, unit=unit or "codepoints")
