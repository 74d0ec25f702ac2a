"""One request and its answer, between the connection and the ASGI app; and the answer to one that no app reads."""

import asyncio
import http
import math
import re
from typing import TYPE_CHECKING

import msgspec
from starlette.types import Message, Scope

from serve.errors import InternalError, Overloaded, StillroomError, Unavailable, in_form_of
from serve.http.access import RawHeaders

if TYPE_CHECKING:
    from serve.http.connections.protocol import Connection

# What a header's value must not hold, so that no answer can be split into two.
CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in http.HTTPStatus}
WITHOUT_BODY = frozenset({204, 304})

# The key in a request's scope of the future that is done once its client has gone.
GONE = "stillroom.gone"


class Exchange:
    """One request and its answer: the `receive` and `send` of the ASGI app."""

    __slots__ = (
        "_arrived",
        "_asks_first",
        "_connection",
        "_head",
        "_left_bytes",
        "_read",
        "answered",
        "begun",
        "body",
        "fault",
        "gone",
        "keeps",
        "scope",
        "whole",
    )

    def __init__(self, connection: "Connection", scope: Scope, *, keeps: bool, asks_first: bool) -> None:
        self._connection = connection
        self.scope = scope
        self.keeps = keeps
        """Whether the connection stays open after the answer."""
        self.body = bytearray()
        """What has arrived and was not received yet."""
        self.whole = False
        """Whether all of the body has arrived."""
        self.fault: StillroomError | None = None
        """Why the body will never be whole; `receive` raises it."""
        self.begun = False
        """Whether a part of the answer was sent."""
        self.answered = False
        self.gone: asyncio.Future[None] = connection.loop.create_future()
        scope[GONE] = self.gone
        self._asks_first = asks_first  # the client waits for 100 before it sends the body
        self._arrived = asyncio.Event()
        self._read = False  # whether all of the body was received
        self._head = b""  # of the answer, until the first of its body is sent with it
        self._left_bytes = 0  # of the answer's body

    async def receive(self) -> Message:
        """More of the body; after all of it, waits for the client to go or the answer to end.

        Raises:
            StillroomError: the body came too slowly, or was invalid.
        """
        if self._asks_first:
            self._asks_first = False
            self._connection.ask_for_body(self)
        while not (self.fault or self.gone.done() or self.answered or self.body or (self.whole and not self._read)):
            self._arrived.clear()
            await self._arrived.wait()
        if self.fault:
            raise self.fault
        if self.gone.done() or self.answered:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        self._read = self.whole
        self._connection.regulate()
        return {"type": "http.request", "body": body, "more_body": not self.whole}

    async def send(self, message: Message) -> None:
        """Sends a part of the answer; nothing once the client has gone. The head goes with the first of the body."""
        await self._connection.writable.wait()
        if self.gone.done():
            return
        if message["type"] == "http.response.start":
            self._head = self._begin(message["status"], message["headers"])
            return
        body = b"" if self.scope["method"] == "HEAD" else message.get("body", b"")
        self._left_bytes -= len(body)
        ends = not message.get("more_body", False)
        if self._left_bytes < 0 or (ends and self._left_bytes):
            raise InternalError("an answer is not as long as its Content-Length says")
        self.answered = ends
        self._connection.write(self._head + body)
        self.begun = True
        self._head = b""
        if ends:
            self.notice()
            self._connection.answered(self)

    def notice(self) -> None:
        """Wakes `receive`: something has changed."""
        self._arrived.set()

    def _begin(self, status: int, headers: RawHeaders) -> bytes:
        """The head of the answer."""
        self._asks_first = False
        lines, says_close, length = [STATUS_LINES[status], self._connection.watch.date], False, None
        for name, value in headers:
            if CONTROL.search(value):
                raise InternalError(f"the header {name.decode('latin-1')} has a control character")
            if name == b"content-length":
                length = int(value)
            elif name == b"connection" and value.lower() == b"close":
                says_close, self.keeps = True, False
            lines += (name, b": ", value, b"\r\n")
        if self.scope["method"] == "HEAD" or status in WITHOUT_BODY:
            length = 0
        if length is None:
            raise InternalError("an answer has no Content-Length")
        self._left_bytes = length
        if not self.keeps and not says_close:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)


def raw_answer(
    error: StillroomError, request_id: str, *, path: str = "", headers: RawHeaders | None = None, stays: bool = False
) -> bytes:
    """A whole HTTP/1.1 response for a request that no endpoint reads. It says that the connection closes, unless it `stays`."""
    body = msgspec.json.encode(in_form_of(path, {"code": error.code, "message": error.message}, error.http_status))
    retry_s = max(1, math.ceil(error.retry_after_s)) if isinstance(error, Overloaded) else 1
    retry = f"Retry-After: {retry_s}\r\n" if isinstance(error, Unavailable) else ""
    connection = "" if stays else "Connection: close\r\n"
    head = (
        f"HTTP/1.1 {error.http_status} {error.code}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"X-Request-Id: {request_id}\r\nX-Content-Type-Options: nosniff\r\n{connection}{retry}"
    )
    more = b"".join(b"%s: %s\r\n" % header for header in headers or [])
    return head.encode() + more + b"\r\n" + body
