"""Request bodies of the endpoints of `/v1` but `/v1/relations`: their fields, and the checks of bodies and limits."""

import codecs
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Annotated, TypeVar, get_type_hints

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request

from serve.errors import BadInput, BadRequest, TooLarge, UnsupportedMedia
from serve.observe.request_context import headers_of
from serve.settings import Limits
from serve.text.answers import AnswerOptions, EncodingFormat, OffsetUnit
from serve.text.spans import Aggregation

# Each description is also the end of an error message: "top_k: ...; give a whole number from 1, ...".
TOP_K = "a whole number from 1, how many labels to return; default: all labels, or those that apply if any number of labels may apply"
OFFSETS = '"codepoints" (default), "utf16" (as in JavaScript) or "utf8" (bytes), the unit of start and end'
PROMISE = "a promise of the model, as in /v1/models (default: none): no answer is given below its score"
ABSTAIN = "true or false (default): true returns no label if the highest score is below the bundle's abstain_below"

# A field that may be left out may also be null, which is the same.
Text = Annotated[str | list[str], Meta(description="a string, or a list of strings")]
ModelName = Annotated[
    str | None, Meta(description="a name or alias from /v1/models; default: the first model for this endpoint")
]
Promise = Annotated[str | None, Meta(description=PROMISE)]
TextPair = Annotated[
    str | list[str] | None, Meta(description="the second text of each pair: a string, or a list as long as text")
]
Truncate = Annotated[
    bool | None,
    Meta(
        description="true or false (default): true cuts a text longer than the model instead of reading it in windows"
    ),
]


class EntitiesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Find the entities in one text, or in each text of a list."""

    text: Text
    model: ModelName = None
    min_score: Annotated[
        float | None, Meta(description="a number from 0 (default) to 1; entities with a lower score are left out")
    ] = 0.0
    offsets: Annotated[OffsetUnit | None, Meta(description=OFFSETS)] = "codepoints"
    aggregation: Annotated[
        Aggregation | None,
        Meta(
            description='"first" (default: a word gets the tag of its first token), "average" or "max" (of all its tokens), or '
            '"strict" (as "first", without incomplete entities)'
        ),
    ] = "first"
    constrained: Annotated[
        bool | None,
        Meta(description="true or false (default): true finds the likeliest tags that form a valid sequence"),
    ] = False
    truncate: Truncate = False
    promise: Promise = None


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Classify one text, or each text of a list."""

    text: Text
    model: ModelName = None
    text_pair: TextPair = None
    top_k: Annotated[int | None, Meta(description=TOP_K)] = None
    truncate: Truncate = False
    abstain: Annotated[bool | None, Meta(description=ABSTAIN)] = False
    promise: Promise = None


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Give one text or pair of texts a number, or each one of a list."""

    text: Text
    model: ModelName = None
    text_pair: TextPair = None
    truncate: Truncate = False


class AnswerRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Answer one question from its context, or each question of a list from its own, or all from one context."""

    question: Annotated[str | list[str], Meta(description="a question, or a list of questions")]
    context: Annotated[
        str | list[str],
        Meta(description="the text that may hold the answer: one for all questions, or a list as long as question"),
    ]
    model: ModelName = None
    min_score: Annotated[
        float | None, Meta(description="a number from 0 (default) to 1; an answer with a lower score is not given")
    ] = 0.0
    offsets: Annotated[OffsetUnit | None, Meta(description=OFFSETS)] = "codepoints"


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Give one text, or each text of a list, its vector. The form is that of OpenAI's endpoint of this name."""

    input: Text
    model: ModelName = None
    encoding_format: Annotated[
        EncodingFormat | None,
        Meta(description='"float" (default: numbers) or "base64" (their float32 bytes, little-endian)'),
    ] = "float"
    dimensions: Annotated[
        int | None,
        Meta(description="a whole number from 1, how many numbers to keep, at length 1 again; default: all"),
    ] = None
    truncate: Truncate = False
    user: Annotated[str | None, Meta(description="a string, which is not used")] = None


def options_of(kind: type[msgspec.Struct]) -> list[str]:
    """The fields of a request that are fields of `AnswerOptions`."""
    return [field.name for field in dataclasses.fields(AnswerOptions) if field.name in kind.__struct_fields__]


def answer_options(asked: msgspec.Struct) -> AnswerOptions:
    """The options in a request; null is the default. BadInput for a value out of range."""
    given = {name: getattr(asked, name) for name in options_of(type(asked))}
    return AnswerOptions(**{name: value for name, value in given.items() if value is not None})


Asked = TypeVar("Asked", bound=msgspec.Struct)
Decoded = TypeVar("Decoded")

# A string, up to the end if it has none, so that no part of the text is searched twice; or a number such as 5.0 or 5.0e+00.
INTEGER_AS_FLOAT = re.compile(
    rb'("(?:[^"\\]++|\\.)*+"?)|(?<![\d.eE+-])(-?\d++)(?:\.0++(?:[eE][+-]?0++)?|[eE][+-]?0++)(?![\d.])'
)
HALF_A_PAIR = re.compile("[\ud800-\udfff]")


async def read_request(request: Request, kind: type[Asked], limits: Limits) -> Asked:
    """The request's body as `kind`. Errors as in `read_json` and `decode`."""
    return decode(await read_json(request, limits.body_bytes), kind)


async def read_json(request: Request, limit_bytes: int) -> bytes:
    """The body. UnsupportedMedia if its content type is not JSON; other errors as in `read_body`."""
    content_type = headers_of(request.scope).get(b"content-type", b"").decode("latin-1")
    if content_type != "application/json" and content_type.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMedia(
            f"the content type is {content_type or 'missing'}; send JSON with Content-Type: application/json"
        )
    return await read_body(request, limit_bytes)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body. TooLarge if it has more than `limit_bytes`, whether or not the length was declared.

    UnsupportedMedia if it is compressed, since a few bytes could become gigabytes.

    After an error the connection stays open, and the rest of the body is discarded. If it were closed while the client sends,
    the client would often not receive the answer.
    """
    headers = headers_of(request.scope)
    coding = headers.get(b"content-encoding", b"").decode("latin-1").strip()
    if coding.lower() not in {"", "identity"}:
        raise UnsupportedMedia(f"the content encoding is {coding}; send the body without compression")
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise TooLarge(
            f"the body has {int(declared):,} bytes; this server takes {limit_bytes:,} bytes: send fewer texts at once"
        )
    parts: list[bytes] = []
    size_bytes, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body, more = message.get("body", b""), message.get("more_body", False)
        size_bytes += len(body)
        if size_bytes > limit_bytes:
            raise TooLarge(
                f"the body has more than the {limit_bytes:,} bytes that this server takes: send fewer texts at once"
            )
        parts.append(body)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decode(body: bytes, kind: type[Asked]) -> Asked:
    """`body` as `kind`. BadRequest if it is not JSON; BadInput, with the field, if a field is missing, unknown or wrong."""
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        return decode_json(body, kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if half := _half_a_pair(body):
            raise half from error
        raise BadRequest(f'the body is not JSON ({error}); send an object such as {{"text": "..."}}') from error


def decode_json(text: bytes, kind: type[Decoded]) -> Decoded:
    """`text` as `kind`. A number such as 5.0 is an integer too, as JSON Schema has it. Errors as of `msgspec.json.decode`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        if not re.match("Expected `int.* got `float`", str(error)):
            raise
        return msgspec.json.decode(INTEGER_AS_FLOAT.sub(rb"\1\2", text), type=kind)


def _field_error(message: str, kind: type[Asked]) -> BadInput:
    """The error for a message of msgspec, with the field that it names and the values that this field takes."""
    # "... - at `$.text[3]`", "... required field `text`", "... unknown field `txt` - at `$.head`"
    inside, of_object = re.search(r"`\$\.([^`]+)`$", message), re.search(r"field `([^`]*)`", message)
    if found := inside or of_object:
        field = f"{inside[1]}.{of_object[1]}" if inside and of_object else found[1]
        name = re.split(r"[.\[]", field, maxsplit=1)[0]
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
    """The description of field `name`."""
    annotation = get_type_hints(kind, include_extras=True)[name]
    return str(annotation.__metadata__[0].description)


def _half_a_pair(body: bytes) -> BadInput | None:
    """The error, with the field, for otherwise valid JSON that has half a surrogate pair (`"\\ud83d"`); None if it has none."""
    try:
        # No number is converted: that takes time that grows with the square of its digits.
        value = json.loads(body, parse_int=bool, parse_float=bool)
    except (ValueError, RecursionError):
        return None
    steps = _steps_to_half_a_pair(value)
    if steps is None:
        return None
    path = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in steps)
    field = path.removeprefix(".") or None
    return BadInput(f"{field or 'the body'} has half a surrogate pair; send whole characters", field=field)


def _steps_to_half_a_pair(body: object) -> list[str | int] | None:
    """The names and indices that lead to the first string of `body` with half a surrogate pair; None if it has none.

    If it is a name, they lead to its object. The work for each value is the same however deep it is and however long the
    names around it are: no value gets its path, and no function calls itself.
    """
    steps: list[str | int] = []
    left = [_entries(body)]  # at each depth
    while left:
        for step, value in left[-1]:
            if isinstance(step, str) and HALF_A_PAIR.search(step):
                return steps
            if isinstance(value, str) and HALF_A_PAIR.search(value):
                return [*steps, step]
            if isinstance(value, dict | list):
                steps.append(step)
                left.append(_entries(value))
                break
        else:
            left.pop()
            del steps[-1:]
    return None


def _entries(value: object) -> Iterator[tuple[str | int, object]]:
    """What is directly in `value`, each with its name or index."""
    return iter(value.items()) if isinstance(value, dict) else enumerate(value if isinstance(value, list) else [])


def check_limits(texts: list[str], field: str, limits: Limits) -> None:
    """TooLarge if there are too many texts, or one is too long."""
    if len(texts) > limits.texts:
        raise TooLarge(f"{field} has {len(texts):,} texts; this server takes {limits.texts:,} at once", field=field)
    for index, text in enumerate(texts):
        if len(text) > limits.text_characters:
            name = field if len(texts) == 1 else f"{field}[{index}]"
            raise TooLarge(
                f"{name} has {len(text):,} characters; this server takes {limits.text_characters:,} in one text: split it",
                field=name,
            )
