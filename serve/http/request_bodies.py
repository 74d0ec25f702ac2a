"""Request bodies: read within the limit of bytes, and decoded, with the field in errors."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import TypeVar, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, Request

from serve.errors import BadInput, BadRequest, TooLarge, UnsupportedMedia
from serve.observe.request_context import headers_of

RequestBody = TypeVar("RequestBody", bound=msgspec.Struct)
Decoded = TypeVar("Decoded")

# A string, up to the end if it has none, so that no part of the text is searched twice; or a number such as 5.0 or 5.0e+00.
INTEGER_AS_FLOAT = re.compile(
    rb'("(?:[^"\\]++|\\.)*+"?)|(?<![\d.eE+-])(-?\d++)(?:\.0++(?:[eE][+-]?0++)?|[eE][+-]?0++)(?![\d.])'
)
HALF_A_PAIR = re.compile("[\ud800-\udfff]")


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


def decode(body: bytes, kind: type[RequestBody]) -> RequestBody:
    """`body` as `kind`. BadRequest if it is not JSON; BadInput, with the field, if a field is missing, unknown or wrong."""
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        return decode_json(body, kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            # No number is converted: that takes time that grows with the square of its digits.
            steps = _steps_to_half_a_pair(json.loads(body, parse_int=bool, parse_float=bool))
        except (ValueError, RecursionError):
            steps = None
        if steps is not None:  # otherwise valid JSON
            path = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in steps)
            field = path.removeprefix(".") or None
            raise BadInput(
                f"{field or 'the body'} has half a surrogate pair; send whole characters", field=field
            ) from error
        raise BadRequest(f'the body is not JSON ({error}); send an object such as {{"text": "..."}}') from error


def decode_json(text: bytes, kind: type[Decoded]) -> Decoded:
    """`text` as `kind`. A number such as 5.0 is an integer too, as JSON Schema has it. Errors as of `msgspec.json.decode`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        if not re.match("Expected `int.* got `float`", str(error)):
            raise
        return msgspec.json.decode(INTEGER_AS_FLOAT.sub(rb"\1\2", text), type=kind)


def _field_error(message: str, kind: type[RequestBody]) -> BadInput:
    """The error for a message of msgspec, with the field that it names and the values that this field takes."""
    # "... - at `$.text[3]`", "... required field `text`", "... unknown field `txt` - at `$.head`"
    inside, of_object = re.search(r"`\$\.([^`]+)`$", message), re.search(r"field `([^`]*)`", message)
    if named := inside or of_object:
        field = f"{inside[1]}.{of_object[1]}" if inside and of_object else named[1]
        name = re.split(r"[.\[]", field, maxsplit=1)[0]
        if name not in kind.__struct_fields__:
            return BadInput(
                f"there is no field {field!r}; the fields are {', '.join(kind.__struct_fields__)}", field=field
            )
        reason = message.partition(" - at ")[0]
        reason = "missing" if reason.startswith("Object missing") else reason[0].lower() + reason[1:]
        reason = "not a field" if reason.startswith("object contains unknown") else reason
        needed = get_type_hints(kind, include_extras=True)[name].__metadata__[0].description
        return BadInput(f"{field}: {reason}; give {needed}", field=field)
    return BadInput(f'the body: {message[0].lower()}{message[1:]}; send an object such as {{"text": "..."}}')


def _steps_to_half_a_pair(body: object) -> list[str | int] | None:
    """The names and indices that lead to the first string of `body` with half a surrogate pair (`"\\ud83d"`); None if it has none.

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
