"""What a client may send: bodies within the limits, and the fields of each endpoint."""

import dataclasses
import json
import re
from typing import Annotated, TypeVar, get_type_hints

import msgspec
from msgspec import Meta
from starlette.requests import Request

from serve.errors import BadInput, BadRequest, TooLarge, UnsupportedMedia
from serve.settings import Limits
from serve.text.answers import AnswerOptions, OffsetUnit
from serve.text.spans import Aggregation

Text = Annotated[str | list[str], Meta(description="a string, or a list of strings")]
ModelName = Annotated[str | None, Meta(description="a name from /v1/models; without it, the first model of this task")]
Truncate = Annotated[
    bool,
    Meta(description="true or false: whether a text longer than the model is cut, and not read whole in windows"),
]


class EntitiesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Find the entities in one text or in each of a list."""

    text: Text
    model: ModelName = None
    min_score: Annotated[float, Meta(description="a number from 0 to 1; entities below it are left out")] = 0.0
    offsets: Annotated[
        OffsetUnit,
        Meta(description='"codepoints", "utf16" (as JavaScript counts) or "utf8" (bytes); what start and end count'),
    ] = "codepoints"
    aggregation: Annotated[
        Aggregation,
        Meta(
            description='"first" (a word has its first token\'s tag), "average" or "max" (of all its tokens), or "strict" '
            "(as first, and only entities whose tags are a valid sequence)"
        ),
    ] = "first"
    constrained: Annotated[
        bool, Meta(description="true or false: whether to find the likeliest tags that are a valid sequence")
    ] = False
    truncate: Truncate = False


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Classify one text or each of a list."""

    text: Text
    model: ModelName = None
    text_pair: Annotated[
        str | list[str] | None, Meta(description="the second texts of models of pairs; as many as in text")
    ] = None
    top_k: Annotated[
        int | None,
        Meta(
            description="a number from 1: how many labels to give; without it all, or where any number may apply, those"
        ),
    ] = None
    truncate: Truncate = False
    abstain: Annotated[
        bool, Meta(description="true or false: whether to give no label where the model is not sure enough")
    ] = False


def options_of(kind: type[msgspec.Struct]) -> list[str]:
    """Which fields of a request are options of its answers."""
    return [field.name for field in dataclasses.fields(AnswerOptions) if field.name in kind.__struct_fields__]


Asked = TypeVar("Asked", bound=msgspec.Struct)


async def read_request(request: Request, kind: type[Asked], limits: Limits) -> Asked:
    """The request's body as `kind`. Raises the BadInput that says what is wrong with it."""
    return decode(await read_json(request, limits.body_bytes), kind)


async def read_json(request: Request, limit_bytes: int) -> bytes:
    """The body, which is said to be JSON. UnsupportedMedia when it is not; what `read_body` raises."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMedia(
            f"the content type is {content_type or 'not given'}; send JSON with Content-Type: application/json"
        )
    return await read_body(request, limit_bytes)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body, kept no further than `limit_bytes`. TooLarge beyond, whether or not the length was declared.

    UnsupportedMedia when it is compressed: a few bytes could then stand for gigabytes.

    The connection stays open, and uvicorn throws away what still comes: closing it on a client that is sending would
    often lose the answer on its way.
    """
    coding = request.headers.get("content-encoding", "").strip()
    if coding.lower() not in {"", "identity"}:
        raise UnsupportedMedia(f"the content encoding is {coding}; send the body as it is, without Content-Encoding")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise TooLarge(
            f"the body has {int(declared):,} bytes; this server takes {limit_bytes:,}: send fewer texts at once"
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise TooLarge(f"the body has over {limit_bytes:,} bytes, which is the most: send fewer texts at once")
    return bytes(body)


def decode(body: bytes, kind: type[Asked]) -> Asked:
    """`body` as `kind`. BadRequest when it is not JSON; BadInput, with the field, when a field is not as needed."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if surrogate := _field_with_half_a_pair(body):
            raise BadInput(
                f"{surrogate} has half a surrogate pair, which is no character; send whole characters", field=surrogate
            ) from error
        raise BadRequest(f'the body is not JSON ({error}); send an object such as {{"text": "..."}}') from error


def _field_error(message: str, kind: type[Asked]) -> BadInput:
    """msgspec's message, with the field it speaks of and what that field needs."""
    # "... - at `$.text[3]`", "... required field `text`", "... unknown field `txt` - at `$.head`"
    inside, of_object = re.search(r"`\$\.([^`]+)`$", message), re.search(r"field `([^`]*)`", message)
    if found := inside or of_object:
        field = f"{inside[1]}.{of_object[1]}" if inside and of_object else found[1]
        name = re.split(r"[.\[]", field)[0]
        if name not in kind.__struct_fields__:
            return BadInput(
                f"there is no field {field!r}; the fields are {', '.join(kind.__struct_fields__)}", field=field
            )
        reason = message.partition(" - at ")[0]
        reason = "missing" if reason.startswith("Object missing") else reason[0].lower() + reason[1:]
        reason = "not a field" if reason.startswith("object contains unknown") else reason
        return BadInput(f"{field}: {reason}; give {_need(kind, name)}", field=field)
    return BadInput(f'the body: {message[0].lower()}{message[1:]}; send an object such as {{"text": "..."}}')


def _need(kind: type[Asked], name: str) -> str:
    """What field `name` takes, in the words of its description."""
    annotation = get_type_hints(kind, include_extras=True)[name]
    return str(annotation.__metadata__[0].description)


def _field_with_half_a_pair(body: bytes) -> str | None:
    """The field in which otherwise right JSON has half a surrogate pair (`"\\ud83d"`); None when it is not that."""
    try:
        return _half_a_pair_in(json.loads(body), "")
    except (ValueError, RecursionError):
        return None


def _half_a_pair_in(value: object, path: str) -> str | None:
    """Where in `value`, which stands at `path`, there is a string with half a surrogate pair."""
    if isinstance(value, str):
        return path if path and any("\ud800" <= character <= "\udfff" for character in value) else None
    if isinstance(value, dict):
        inner = ((each, f"{path}.{name}" if path else name) for name, each in value.items())
    elif isinstance(value, list):
        inner = ((each, f"{path}[{index}]") for index, each in enumerate(value))
    else:
        return None
    return next((found for each, at in inner if (found := _half_a_pair_in(each, at))), None)


def check_limits(texts: list[str], field: str, limits: Limits) -> None:
    """TooLarge when there are too many texts, or one is too long."""
    if len(texts) > limits.texts:
        raise TooLarge(f"{field} has {len(texts):,} texts; this server takes {limits.texts:,} at once", field=field)
    for index, text in enumerate(texts):
        if len(text) > limits.text_characters:
            name = field if len(texts) == 1 else f"{field}[{index}]"
            raise TooLarge(
                f"{name} has {len(text):,} characters; this server takes {limits.text_characters:,}: split it",
                field=name,
            )
