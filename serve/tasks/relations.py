"""Relations, a kind of text classification: a text and two parts of it -> the relation of the first part to the second.

The model reads the text with markers around the parts.
"""

import codecs
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType
from tokenizers import Encoding

from serve.errors import BadInput
from serve.settings import Limits
from serve.tasks.request_fields import Abstain, ModelName, Offsets, Promise, TopK, Truncate, answer_options, options_of
from serve.tasks.served_task import Described, Endpoint, ModelFacts
from serve.tasks.text_classification import (
    LABEL_TENSORS,
    ClassifyRequest,
    ClassifyResponse,
    LabelsAnswer,
    TextClassification,
)
from serve.text.answers import OffsetUnit, length_in
from serve.text.entity_markers import MARKERS, has_markers, marked
from serve.text.inputs import TextWork, check_limits, estimated_tokens, require_unicode
from serve.text.windows import Row, WindowedText, marked_window

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
    offsets: Offsets = "codepoints"
    truncate: Truncate = False
    abstain: Abstain = False
    promise: Promise = None


class RelationItemsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Find the relation of head to tail in each of several texts."""

    items: Annotated[list[RelationItem], Meta(description='a list of {"text", "head", "tail"}')]
    model: ModelName = None
    top_k: TopK = None
    offsets: Offsets = "codepoints"
    truncate: Truncate = False
    abstain: Abstain = False
    promise: Promise = None


class Relations(TextClassification):
    """The relation of the head of a text to its tail."""

    def does(self, model: Described) -> str:
        opening, closing, second_opening, second_closing = MARKERS
        parts = f"`{opening} one {closing}` and `{second_opening} other {second_closing}`"
        return f"{super().does(model)} by two of its parts, {parts}"

    @property
    def tensor_options(self) -> list[str]:
        return options_of(ClassifyRequest)  # a text has its markers already, and so no offsets

    def request_type(self, body: bytes) -> type[msgspec.Struct]:
        try:
            several = msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8), type=_Form).items is not UNSET
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            several = b'"items"' in body  # a guess at the form; decoding it raises the error
        return RelationItemsRequest if several else RelationRequest

    def works_of(self, request: RelationRequest | RelationItemsRequest, limits: Limits) -> list[TextWork]:  # type: ignore[override]
        unit = request.offsets or "codepoints"
        if isinstance(request, RelationRequest):
            check_limits([request.text], "text", limits)
            texts = [marked_text(request.text, request.head, request.tail, unit=unit)]
        elif not request.items:
            raise BadInput("items is an empty list; give at least one text with its head and tail", field="items")
        else:
            check_limits([item.text for item in request.items], "items", limits)
            texts = [
                marked_text(item.text, item.head, item.tail, path=f"items[{index}].", unit=unit)
                for index, item in enumerate(request.items)
            ]
        options = answer_options(request)
        return [TextWork(text, None, options) for text in texts]

    def texts_of(self, given: object, unit: OffsetUnit) -> object:
        if isinstance(given, Mapping):
            return _marked_item(given, "text", "", unit)
        if not isinstance(given, list):
            return given
        return [
            _marked_item(each, f"text[{index}]", f"text[{index}].", unit) if isinstance(each, Mapping) else each
            for index, each in enumerate(given)
        ]

    def estimated_tokens(self, work: TextWork, max_length: int) -> int:
        return estimated_tokens(work, max_length)

    def check_work(self, work: TextWork, model: ModelFacts) -> None:
        if not has_markers(work.text):
            raise BadInput(f"text: {UNMARKED}", field="text")

    def read(self, work: TextWork, encoding: Encoding, model: ModelFacts) -> Row | WindowedText:
        long = len(encoding) > model.max_length and not work.options.truncate
        if long and not model.marker_ids.isdisjoint(encoding.ids):
            return marked_window(encoding, model.max_length, model.marker_ids)
        return super().read(work, encoding, model)


class _Form(msgspec.Struct):
    items: msgspec.Raw | UnsetType = UNSET


def _marked_item(given: Mapping[str, object], name: str, path: str, unit: OffsetUnit) -> str:
    """The text of the item in `given`, with markers. BadInput names the field `name`, and in it those that begin with `path`."""
    if not {"head", "tail"} <= given.keys():
        raise BadInput(f"{name}: {UNMARKED}", field=name)
    try:
        item = msgspec.convert(dict(given), RelationItem)
    except msgspec.ValidationError as error:
        raise BadInput(
            f'{name}: {error}; give {{"text", "head", "tail"}}, the last two as {{"start", "end"}}', field=name
        ) from error
    require_unicode(item.text, f"{path}text", 0, 1)
    return marked_text(item.text, item.head, item.tail, path=path, unit=unit)


def marked_text(text: str, head: Part, tail: Part, *, path: str = "", unit: OffsetUnit = "codepoints") -> str:
    """`text` with markers around `head` and `tail`, whose offsets count `unit`. `path` is put before names of fields in errors.

    BadInput, with the field, when a part is outside the text, is empty or ends inside a character, when the parts overlap, and
    when the text already has a marker.
    """
    if marker := next((marker for marker in MARKERS if marker in text), None):
        raise BadInput(
            f"{path}text already has the marker {marker}; send the text without markers; head and tail say where they go",
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


RELATIONS = Relations(
    name="text-classification",
    manifest_kinds=("multi_label", "relations", "pairs"),
    kind="relations",
    smaller_by="top_k",
    one_text="is for relations in",
    longer_texts="Of a longer text it reads the window around the two parts, and the answer says so.",
    endpoint=Endpoint(
        "/v1/relations",
        "relations",
        "Classify the relation of two parts of a text",
        (RelationRequest, RelationItemsRequest),
        ClassifyResponse,
        {"text": "Rome is in Italy", "head": {"start": 0, "end": 4}, "tail": {"start": 11, "end": 16}},
    ),
    answer_type=LabelsAnswer,
    tensors=LABEL_TENSORS,
    reads_markers=True,
)
