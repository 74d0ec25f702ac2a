"""One client's connection, and the limits on all connections: those that are too slow or too large are cut off.

uvicorn reads and writes HTTP. It does not limit the size of a request's head, the time for a head, a body or an answer, or the
requests sent ahead of their answers. These limits are added here. One task checks all connections; there is no timer for each.
"""

import asyncio
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import msgspec
from uvicorn import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from serve.errors import BadRequest, HeadTooLarge, Overloaded, StillroomError, TooSlow, Unavailable, in_form_of
from serve.http.auth.cors import Origins, RawHeaders
from serve.observe.logs import note
from serve.observe.metrics import Metrics
from serve.observe.request_context import REQUEST_ID, new_request_id
from serve.settings import ConnectionLimits

log = logging.getLogger("serve")

# How often the connections are checked.
CHECK_S = 0.25
# The rate of a body is checked after this time, since the first packets of a distant client come slowly.
GRACE_S = 5.0
# Requests that a client may send ahead of their answers.
AHEAD = 64
# Connections above the limit that may be closing.
CLOSING = 64
# If a full server finds no idle connection to close, it does not search again for this time.
SEARCH_AGAIN_S = 0.05

NOT_HTTP = "this is not a valid HTTP/1.1 request; send one, and use TLS only if the server's address begins with https"

# New work is refused while the event loop of this process is late by more than this.
BEHIND_S = 0.1
MEASURE_S = 0.02  # how often the delay is measured
# The method of requests to models. Others, such as health checks and pages, are always answered.
ASKS_FOR_WORK = b"POST"

# Keys in a request's scope: of the error if its body will never be complete, and of the future that is done once its client has gone.
FAULT = "stillroom.fault"
GONE = "stillroom.gone"

# Why a connection was cut.
Reason = Literal["full", "head", "body", "unread", "malformed", "idle_for_room", "handshake", "stopping"]


class Watch:
    """All connections of one server: their number, their limits, and whether the server is stopping."""

    def __init__(self, limits: ConnectionLimits, metrics: Metrics) -> None:
        self.limits = limits
        self.stopping = False
        self.open = 0
        """Connections accepted and not yet closed, including those in a TLS handshake."""
        self.connections: set[Connection] = set()
        self.behind_s = 0.0
        """How late the event loop was at both of the last two measurements, in seconds: one delay is no overload."""
        self.full_s: Callable[[], float] = lambda: 0.0
        """Gives the seconds until the queue of one of the models has room; 0 if one has room."""
        self.origins = Origins()
        self._metrics = metrics
        self._searched_s = -SEARCH_AGAIN_S
        metrics.connections.set_function(lambda: self.open)

    async def keep(self) -> None:
        """Checks every connection each `CHECK_S`, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = time.monotonic()
            try:
                for connection in list(self.connections):
                    connection.look(now_s)
                self._cut_unread()
            except Exception:
                log.exception("checking the connections failed; the next check goes on")

    async def feel(self) -> None:
        """Measures how late the event loop is each `MEASURE_S`, until cancelled."""
        loop = asyncio.get_running_loop()
        before_s = 0.0
        while True:
            due_s = loop.time() + MEASURE_S
            await asyncio.sleep(MEASURE_S)
            late_s = loop.time() - due_s
            self.behind_s, before_s = min(late_s, before_s), late_s

    def refusal(self) -> Overloaded | None:
        """The error with which new work is refused before it is read; None if it is not refused.

        Such a refusal costs a tenth of an answer. Otherwise a server with several times its load would spend its time on refusals.
        """
        if wait_s := self.full_s():
            self._metrics.shed.labels("full").inc()
            return Overloaded(f"the queue is full; try again in {wait_s:.1f} s", retry_after_s=wait_s)
        if self.behind_s > BEHIND_S:
            self._metrics.shed.labels("behind").inc()
            return Overloaded("more requests arrive than can be read; try again in a second", retry_after_s=1.0)
        return None

    def has_room(self) -> bool:
        """Whether one more connection may be opened. If the server is full, the longest idle one is closed for it."""
        if self.open < self.limits.connections:
            return True
        now_s = time.monotonic()
        if now_s - self._searched_s < SEARCH_AGAIN_S or self.open >= self.limits.connections + CLOSING:
            return False
        closing = sum(each.closing for each in self.connections)
        if self.open - closing < self.limits.connections:
            return True
        idle = [each for each in self.connections if each.idle and not each.transport.is_closing()]
        if not idle:
            self._searched_s = now_s
            return False
        oldest = min(idle, key=lambda each: each.since_s)
        self.cut("idle_for_room", oldest)
        oldest.transport.close()
        return True

    def cut(self, reason: Reason, connection: "Connection | None" = None, request_id: str | None = None) -> None:
        """Counts a connection that is cut, and logs its client, if that is known."""
        self._metrics.connections_cut.labels(reason).inc()
        if connection is not None:
            client = connection.client[0] if connection.client else None
            note("cut", {"request_id": request_id, "reason": reason, "client": client})

    def _cut_unread(self) -> None:
        """Cuts the connections with the most unsent bytes, until all together are within the limit."""
        unsent = {each: each.unsent_bytes for each in self.connections if each.unsent_bytes}
        held = sum(unsent.values())
        for each in sorted(unsent, key=unsent.__getitem__, reverse=True):
            if held <= self.limits.unsent_bytes:
                return
            held -= unsent[each]
            each.abort("unread")


class _Joining:
    """The transport for one answer, which sends the head together with the first of the body, in one packet and one system call.

    ASGI allows a server to keep the head until the first of the body comes.
    """

    __slots__ = ("_head", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = b""
        """The head that is kept; b"" before there is one, None once it is sent."""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """Sends `data`, or keeps it if it is the head. Sends nothing on a closing transport."""
        if self.is_closing():
            return
        if self._head is None:
            self._transport.write(data)
        elif self._head:
            self._transport.writelines((self._head, data))
            self._head = None
        elif data.startswith(b"HTTP/1.1 100 "):
            self._transport.write(data)
        else:
            self._head = data

    def flush(self) -> None:
        """Sends a kept head without a body."""
        if self._head and not self.is_closing():
            self._transport.write(self._head)
        self._head = None

    def close(self) -> None:
        """Closes the transport once everything is sent."""
        self.flush()
        self._transport.close()


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], watch: Watch) -> None:
        super().__init__(config, server_state, app_state)
        self.watch = watch
        self.limits = watch.limits
        self.reading: Literal["head", "body", "nothing"] = "head"
        """What is being read since `since_s`; with "nothing", `since_s` is the time of the last answer."""
        self.since_s = time.monotonic()
        self._looked_s = self.since_s
        self.made = False
        """Whether the connection was established: a TLS handshake may fail before."""
        self._broken = False
        # Requests to be answered, in order: the one under way, and those sent ahead.
        self._unanswered: deque[RequestResponseCycle] = deque()
        # The error for a request that is refused unread; it is sent once the request has arrived completely.
        self._refusal: Overloaded | None = None
        # Bytes since a part of a body, or since `reading` changed; bytes and number of this request's headers; bytes of its body.
        self._silent_bytes = self._head_bytes = self._headers_seen = self._body_bytes = 0
        # When an answer began to have unsent bytes, and how many; the fewest since then, and when that was.
        self._unsent_since_s: float | None = None
        self._unsent_first_bytes = self._unsent_least_bytes = 0
        self._taken_s = 0.0
        # Whether the client has read so much since then that writing was resumed.
        self._taken = False

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def idle(self) -> bool:
        """Whether it is between two requests."""
        return self.reading == "nothing" and not self.busy

    @property
    def closing(self) -> bool:
        """Whether it is closing, with nothing left to send."""
        return self.transport.is_closing() and not self.unsent_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the client has not read."""
        return self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Adds the connection to the watch."""
        super().connection_made(cast(asyncio.Transport, transport))  # uvloop's has its methods, but is no subclass
        self.made = True
        self.watch.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Marks the unanswered requests of this client as disconnected."""
        super().connection_lost(exc)
        self.watch.connections.discard(self)
        self.watch.open -= 1
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
            gone = cast(dict[str, Any], cycle.scope)[GONE]
            if not gone.done():
                gone.set_result(None)
        self.pipeline.clear()
        self._unanswered.clear()  # breaks reference cycles, which would stay until the next garbage collection

    def data_received(self, data: bytes) -> None:
        """Parses `data`, within the limits."""
        if self._broken:
            return
        self._silent_bytes += len(data)
        super().data_received(data)
        if self._silent_bytes > self.limits.head_bytes:
            self._refuse(self._head_too_large(), "malformed")

    def on_message_begin(self) -> None:
        """Starts a request."""
        super().on_message_begin()
        self._head_bytes = self._headers_seen = 0
        cast(dict[str, Any], self.scope)[GONE] = self.loop.create_future()
        if self.reading != "head":
            self._read("head")

    def on_url(self, url: bytes) -> None:
        """Adds a part of the request's path."""
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header. A trailer, which comes after the body, is counted and ignored."""
        self._head_bytes += len(name) + len(value)
        self._headers_seen += 1
        if self._headers_seen > self.limits.headers or self._head_bytes > self.limits.head_bytes:
            raise self._head_too_large()
        if self.reading == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts to answer the request, unless too many were sent ahead or new work is refused."""
        if len(self.pipeline) >= AHEAD:
            raise BadRequest(
                f"more than {AHEAD} requests were sent ahead of their answers; wait for some answers first"
            )
        if not self.busy and self.parser.get_method() == ASKS_FOR_WORK and (refusal := self.watch.refusal()):
            self._refusal = refusal
            self._read("body")
            if self.expect_100_continue:  # the client waits before it sends the body
                self._broken = True
                self._answer_refusal(stays=False)
            return
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        self._read_on()
        joining = _Joining(self.transport)
        self.cycle.transport = cast(asyncio.Transport, joining)
        if self.cycle.scope["method"] == "HEAD":  # the answer has no body
            self.cycle.on_response = partial(self._head_answered, joining)
        if self.watch.stopping:
            self.cycle.keep_alive = False
        self._read("body")

    def on_body(self, body: bytes) -> None:
        """Adds a part of the body."""
        self._silent_bytes = 0
        self._body_bytes += len(body)
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the request, which has arrived completely."""
        if self._refusal is None:
            super().on_message_complete()
            self._read_on()
        elif not self.transport.is_closing():
            self._answer_refusal(stays=self.parser.should_keep_alive() and not self.watch.stopping)
        self._refusal = None
        self._read("nothing")

    def on_response_complete(self) -> None:
        """Removes the answered request; the connection may be idle from now on."""
        self._unanswered.popleft()
        super().on_response_complete()
        if self.reading == "nothing":
            self.since_s = time.monotonic()

    def _head_answered(self, joining: _Joining) -> None:
        joining.flush()
        self.on_response_complete()

    def resume_writing(self) -> None:
        """Notes that the client has read most of what was to be sent."""
        super().resume_writing()
        self._taken = True

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP, and the errors that our limits raised in the parser's callbacks."""
        # httptools raises its own error; if a callback of ours raised, that error is its context.
        raised = getattr(sys.exception(), "__context__", None)
        self._refuse(raised if isinstance(raised, StillroomError) else BadRequest(NOT_HTTP), "malformed")

    def look(self, now_s: float) -> None:
        """Cuts the connection if it is too slow."""
        between_s, self._looked_s = now_s - self._looked_s, now_s
        if self._unread(now_s):
            self.abort("unread")
        elif self._broken or self.transport.is_closing():
            pass
        elif self.reading == "nothing":
            if not self.busy and now_s - self.since_s > self.limits.keep_alive_s:
                self.transport.close()
        elif self.reading == "head":
            if self.busy:  # the time for the next head starts after the answers before it
                self.since_s = now_s
            elif now_s - self.since_s > self.limits.head_s:
                self._refuse(TooSlow(f"the head of the request did not come within {self.limits.head_s:g} s"), "head")
        elif self.flow.read_paused:  # the server has paused reading, so the client is not slow
            self.since_s += between_s
        elif fault := self._slow_body(now_s - self.since_s):
            self._refuse(fault, "body")

    def abort(self, reason: Reason) -> None:
        """Closes the connection at once; unsent bytes are lost."""
        self.watch.cut(reason, self)
        self.transport.abort()

    def _answer_refusal(self, *, stays: bool) -> None:
        assert self._refusal is not None
        request_id, path = self._sent_id() or new_request_id(), self.url.decode("latin-1")
        origins = self.watch.origins.headers(dict(self.headers))
        self.transport.write(raw_answer(self._refusal, request_id, path=path, headers=origins, stays=stays))
        if not stays:
            self.transport.close()

    def _sent_id(self) -> str | None:
        """The request id that the client sent, if it is valid."""
        sent = next((value for name, value in self.headers if name == b"x-request-id"), b"").decode("latin-1")
        return sent if REQUEST_ID.fullmatch(sent) else None

    def _read_on(self) -> None:
        """Resumes reading while few requests and bytes sent ahead are held.

        uvicorn stops reading at a large body, or at another request, until there is an answer. It would not notice a disconnect.
        """
        if len(self.pipeline) < AHEAD // 2 and sum(len(cycle.body) for cycle, _ in self.pipeline) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def _read(self, what: Literal["head", "body", "nothing"]) -> None:
        self.reading = what
        self.since_s = time.monotonic()
        self._silent_bytes = self._body_bytes = 0

    def _slow_body(self, spent_s: float) -> TooSlow | None:
        limits = self.limits
        if spent_s > limits.body_s:
            return TooSlow(f"the body did not come within {limits.body_s:g} s; send less at once, or send it faster")
        if spent_s > GRACE_S and self._body_bytes < limits.least_bytes_per_s * spent_s:
            return TooSlow(f"the body comes at less than {limits.least_bytes_per_s:,} bytes/s; send it faster")
        return None

    def _unread(self, now_s: float) -> bool:
        """Whether the client reads its answer not at all, or too slowly."""
        unsent_bytes = self.unsent_bytes
        if not unsent_bytes or self._taken:
            self._unsent_since_s, self._taken = None, False
            return False
        if self._unsent_since_s is None:
            self._unsent_since_s = self._taken_s = now_s
            self._unsent_first_bytes = self._unsent_least_bytes = unsent_bytes
        if unsent_bytes < self._unsent_least_bytes:
            self._unsent_least_bytes, self._taken_s = unsent_bytes, now_s
        allowed_s = self.limits.write_s + self._unsent_first_bytes / self.limits.least_bytes_per_s
        return now_s - self._taken_s > self.limits.write_s or now_s - self._unsent_since_s > allowed_s

    def _head_too_large(self) -> HeadTooLarge:
        return HeadTooLarge(
            f"the head of a request may have {self.limits.head_bytes:,} bytes and {self.limits.headers:,} headers; send less"
        )

    def _refuse(self, error: StillroomError, reason: Reason) -> None:
        """Stops reading, and answers with `error` if the request has no answer yet."""
        if self._broken or self.transport.is_closing():
            return
        self._broken = True
        request_id = new_request_id()
        self.watch.cut(reason, self, request_id)
        if self.busy:
            self.cycle.keep_alive = False
            if self.reading == "body":  # the endpoint that reads this body raises the error
                cast(dict[str, Any], self.cycle.scope)[FAULT] = error
                self.cycle.message_event.set()
            return
        if self._refusal is not None:
            self._answer_refusal(stays=False)
        elif self.reading == "head" and (self._silent_bytes or self._head_bytes):
            self.transport.write(raw_answer(error, request_id))
        self.transport.close()


def raw_answer(
    error: StillroomError, request_id: str, *, path: str = "", headers: RawHeaders | None = None, stays: bool = False
) -> bytes:
    """A whole HTTP/1.1 response for a request that no endpoint reads. It says that the connection closes, unless it `stays`."""
    body = msgspec.json.encode(in_form_of(path, {"code": error.code, "message": error.message}))
    retry_s = max(1, math.ceil(error.retry_after_s)) if isinstance(error, Overloaded) else 1
    retry = f"Retry-After: {retry_s}\r\n" if isinstance(error, Unavailable) else ""
    connection = "" if stays else "Connection: close\r\n"
    head = (
        f"HTTP/1.1 {error.http_status} {error.code}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"X-Request-Id: {request_id}\r\nX-Content-Type-Options: nosniff\r\n{connection}{retry}"
    )
    more = b"".join(b"%s: %s\r\n" % header for header in headers or [])
    return head.encode() + more + b"\r\n" + body
