"""HTTP/1.1 on one connection: httptools parses, the ASGI app answers, and the limits of `ConnectionLimits` hold.

Requests that are sent ahead of their answers wait in order. Reading pauses while more
is sent ahead, or of a body, than is held. There is no timer for each connection: one task looks at all of them, see `Watch`.
"""

import asyncio
import logging
import re
import select
import time
from collections import deque
from typing import Any, Literal, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp

from serve.errors import (
    BadRequest,
    HeadTooLarge,
    Overloaded,
    StillroomError,
    TooSlow,
)
from serve.http.access import RawHeaders
from serve.http.connections.exchange import Exchange, raw_answer
from serve.http.connections.limits import Reason, Watch
from serve.observe.request_context import REQUEST_ID, new_request_id

log = logging.getLogger("serve")

# The rate of a body is checked after this time, since the first packets of a distant client come slowly.
GRACE_S = 5.0
# After this time a client's rate of reading is known.
BEGUN_S = 1.0
# Requests that a client may send ahead of their answers.
AHEAD = 64
# How long after a connection was made, or a head began, a stopping server waits for the rest of that head.
ARRIVING_S = 0.2
# Bytes of the bodies of one connection that are held before reading pauses.
HELD_BYTES = 65_536
# The method of requests to models. Others, such as health checks and pages, are always answered.
ASKS_FOR_WORK = b"POST"
# What `Host` may hold, RFC 9110, 7.2: a name or an address, and perhaps a port.
HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_~-]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?[ \t]*")
# What every answer begins with.
BEGINNING = b"HTTP/1.1 "
NOT_HTTP = "this is not a valid HTTP/1.1 request; send one, and use TLS only if the server's address begins with https"
# The answer to a client of HTTP/2: its frames SETTINGS, and GOAWAY with the code HTTP_1_1_REQUIRED and words (RFC 9113, 6.5, 6.8 and 7).
HTTP2_PREFACE_METHOD = b"PRI"
USE_HTTP_1 = b"this server speaks HTTP/1.1; set the client to it, or put a proxy that speaks HTTP/2 before the server"
GO_AWAY = b"\0\0\0\4\0\0\0\0\0" + (8 + len(USE_HTTP_1)).to_bytes(3) + b"\7" + bytes(9) + b"\0\0\0\x0d" + USE_HTTP_1


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, app: ASGIApp, watch: Watch) -> None:
        self.app = app
        self.watch = watch
        self.limits = watch.limits
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self.client: tuple[str, int] | None = None
        self.made = False
        """Whether the connection was established: a TLS handshake may fail before."""
        self.reading: Literal["head", "body", "nothing"] = "head"
        """What is being read since `since_s`; with "nothing", `since_s` is the time of the last answer."""
        self.since_s = time.monotonic()
        self.writable = asyncio.Event()
        self.writable.set()
        self._looked_s = self.since_s
        self._parser = self._new_parser()
        self._scope: dict[str, Any] = {}  # what is the same for all requests of this connection
        self._broken = False
        self._last_words = b""  # the answer to a request that cannot be read, sent after the answers to those before it
        self._paused = False  # whether reading is paused
        self._ended = False  # whether it closes once the body has come, since the last answer is sent
        self._half_closed = False  # whether the client sends no more, and perhaps waits for its answers
        self._begun = False  # whether `BEGINNING` was sent before the rest of its answer
        # Requests to be answered, in order: the one under way, and those sent ahead.
        self._unanswered: deque[Exchange] = deque()
        # The error for a request that is refused unread; it is sent once the request has arrived completely.
        self._refusal: Overloaded | None = None
        self._url = b""
        self._headers: RawHeaders = []
        self._asks_first = False
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
        return bool(self._unanswered)

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
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has its methods, but is no subclass
        self.client = _address(transport, "peername")
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "server": _address(transport, "sockname"),
            "client": self.client,
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "root_path": "",
        }
        self.made = True
        self.since_s = time.monotonic()  # a TLS handshake may have taken long
        self.watch.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Marks the unanswered requests of this client as disconnected."""
        self.watch.connections.discard(self)
        self.watch.closed()
        for exchange in self._unanswered:
            if not exchange.gone.done():
                exchange.gone.set_result(None)
            exchange.notice()
        self.writable.set()
        # These break reference cycles, which would stay until the next garbage collection.
        self._unanswered.clear()
        del self._parser

    def pause_writing(self) -> None:
        """Called when the client is slower than its answer."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """Notes that the client has read most of what was to be sent."""
        self.writable.set()
        self._taken = True

    def write(self, data: bytes) -> None:
        """Sends `data`, unless the connection is closing."""
        if self._begun:
            self._begun, data = False, data.removeprefix(BEGINNING)
        if not self.transport.is_closing():
            self.transport.write(data)

    def ask_for_body(self, exchange: Exchange) -> None:
        """Tells a client that waits for that to send the body of this request."""
        # Not where the head of the next one is being read, or the client has gone.
        if self.reading == "body" and self._unanswered and self._unanswered[-1] is exchange:
            self._asks_first = False
        self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        """Parses `data`, within the limits."""
        if self._broken:
            return
        self._silent_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            # If a callback of ours raised, that error is its context.
            raised = error.__context__
            self._refuse(raised if isinstance(raised, StillroomError) else BadRequest(NOT_HTTP), "malformed")
        if self._silent_bytes > self.limits.head_bytes:
            self._refuse(self._head_too_large(), "malformed")

    def eof_received(self) -> bool:
        """Whether the connection stays open: a client that sends no more gets the answers to its whole requests.

        One that has hung up looks the same. Its system refuses what is sent to it, so the beginning of the answer is sent at once, and
        `check_timeouts` finds out. TLS connections have no such half: asyncio closes them.
        """
        unanswered = self._unanswered
        if unanswered and self.reading == "body":
            if len(unanswered) == 1:
                return False
            unanswered.pop()
        if not unanswered or self._scope["scheme"] == "https":
            return False
        if not self._last_words:
            unanswered[-1].keeps = False
        if not unanswered[0].begun:
            self.write(BEGINNING)
            self._begun = True
        self._half_closed = True
        return True

    def on_message_begin(self) -> None:
        """Starts a request."""
        self._url, self._headers, self._asks_first = b"", [], False
        self._head_bytes = self._headers_seen = 0
        if self.reading != "head":
            self._read("head")

    def on_url(self, url: bytes) -> None:
        """Adds a part of the request's path."""
        self._head_bytes += len(url)
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header. A trailer, which comes after the body, is counted and ignored."""
        self._head_bytes += len(name) + len(value)
        self._headers_seen += 1
        if self._headers_seen > self.limits.headers or self._head_bytes > self.limits.head_bytes:
            raise self._head_too_large()
        if self.reading == "head":
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self._asks_first = True
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Starts to answer the request, unless too many were sent ahead or new work is refused."""
        if self._ended:
            return
        if len(self._unanswered) > AHEAD:
            raise BadRequest(
                f"more than {AHEAD} requests were sent ahead of their answers; wait for some answers first"
            )
        method = self._parser.get_method()
        if method == b"CONNECT":  # what follows would not be HTTP
            raise BadRequest("this server is no proxy and does not offer CONNECT; send GET or POST to one of its paths")
        if self._parser.should_upgrade():  # see `_parse`
            return
        version = self._parser.get_http_version()
        hosts = [value for name, value in self._headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version != "1.0") or not all(map(HOST.fullmatch, hosts)):
            raise BadRequest(
                f"a request has one header Host, with a name and perhaps a port; this one has {len(hosts) or 'none'}"
                + (", which is not valid" if len(hosts) == 1 else "")
            )
        if not self.busy and method == ASKS_FOR_WORK and (refusal := self.watch.refusal(self)):
            self._refusal = refusal
            self._read("body")
            if self._asks_first:  # the client waits before it sends the body
                self._broken = True
                self._answer_refusal(stays=False)
            return
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        scope = {
            **self._scope,
            "method": method.decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": self._headers,
        }
        if version != "1.1":
            scope["http_version"] = version
        keeps = version != "1.0" and self._parser.should_keep_alive() and not self.watch.stopping
        exchange = Exchange(self, scope, keeps=keeps, asks_first=self._asks_first and version != "1.0")
        self._unanswered.append(exchange)
        if len(self._unanswered) == 1:
            self._answer(exchange)
        self.regulate()
        self._read("body")

    def on_body(self, body: bytes) -> None:
        """Adds a part of the body, unless the request is refused or answered already."""
        self._silent_bytes = 0
        self._body_bytes += len(body)
        if self._refusal is None and self._unanswered:
            self._unanswered[-1].body += body
            self._unanswered[-1].notice()
            self.regulate()

    def on_message_complete(self) -> None:
        """Ends the request, which has arrived completely."""
        if self._parser.should_upgrade():  # see `_parse`
            return
        if self._refusal is not None:
            if not self.transport.is_closing():
                self._answer_refusal(stays=self._parser.should_keep_alive() and not self.watch.stopping)
        elif self._unanswered:
            self._unanswered[-1].whole = True
            self._unanswered[-1].notice()
        self._refusal = None
        self._read("nothing")
        if self._ended:
            self.transport.close()

    def answered(self, exchange: Exchange) -> None:
        """Goes on to the next request, or closes the connection after the last. Called when the answer is written."""
        if not self._unanswered or self._unanswered[0] is not exchange:
            return
        self._unanswered.popleft()
        if not exchange.keeps:
            if self.reading == "body" and not (self._broken or self._asks_first):
                # Closing while the client sends would reset the connection, and the client could lose the answer.
                self._ended = True
                for later in self._unanswered:  # sent ahead, and never answered
                    if not later.gone.done():
                        later.gone.set_result(None)
                self._unanswered.clear()
                self.regulate()  # which may have paused reading
                if self.transport.can_write_eof():
                    self.transport.write_eof()
            else:
                self.transport.close()
            return
        if self.reading == "nothing":
            self.since_s = time.monotonic()
        if self._unanswered:
            self._answer(self._unanswered[0])
        elif self._last_words:
            self.write(self._last_words)
            self.transport.close()
        self.regulate()

    def regulate(self) -> None:
        """Pauses reading while too much is held: of a body that nobody receives, or of requests sent ahead."""
        unanswered = self._unanswered
        held_bytes = len(unanswered[0].body) if len(unanswered) == 1 else sum(len(each.body) for each in unanswered)
        full = held_bytes > HELD_BYTES or len(self._unanswered) > AHEAD // 2
        if full != self._paused and not self.transport.is_closing():
            self._paused = full
            (self.transport.pause_reading if full else self.transport.resume_reading)()

    def shutdown(self) -> None:
        """Closes the connection, after the answers to the requests that have begun. To be called until it is closed.

        A request that is just arriving is waited for: its bytes wait in the socket, or the connection is new, or a part of the head is
        here. Its client believes that it is being answered.
        """
        if self.transport.is_closing():
            return
        if self._unanswered:
            self._unanswered[-1].keeps = False
        elif self._refusal is not None or self._ended:  # answered, or closed, once its body is here
            return
        elif not (self.reading == "head" and time.monotonic() - self.since_s < ARRIVING_S) and not self._events():
            self.transport.close()

    def _events(self) -> int:
        """What `poll` says of the socket now, such as that bytes wait which the event loop has not read yet."""
        if not hasattr(select, "poll"):  # Windows
            return 0
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return next((events for _, events in poll.poll(0)), 0)

    def check_timeouts(self, now_s: float) -> None:
        """Cuts the connection if it is too slow."""
        between_s, self._looked_s = now_s - self._looked_s, now_s
        if self._half_closed and self._events() & (select.POLLHUP | select.POLLERR):
            self.transport.abort()
        elif self._unread(now_s):
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
        elif self._paused:  # the server has paused reading, so the client is not slow
            self.since_s += between_s
        else:
            spent_s, rate = now_s - self.since_s, self.limits.least_bytes_per_s
            if spent_s > self.limits.body_s:
                why = f"the body did not come within {self.limits.body_s:g} s; send less at once, or send it faster"
                self._refuse(TooSlow(why), "body")
            elif spent_s > GRACE_S and self._body_bytes < rate * spent_s:
                self._refuse(TooSlow(f"the body comes at less than {rate:,} bytes/s; send it faster"), "body")

    def abort(self, reason: Reason) -> None:
        """Closes the connection at once; unsent bytes are lost."""
        self.watch.cut(reason, self)
        self.transport.abort()

    def _parse(self, data: bytes) -> None:
        """Parses `data`. A request to go on in another protocol gets its answer in this one, as RFC 9110, 7.8, allows.

        The parser takes such a request as ended after its head, and would read its body as the next request. So a new parser gets the
        head once more, without the header `Upgrade`, and then the body.
        """
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            # Not within the handler: its exception would take the place of that of a callback, which says what is wrong.
            version = self._parser.get_http_version().encode()
            line = b"%s %s HTTP/%s" % (self._parser.get_method(), self._url, version)
            headers = [b"%s: %s" % header for header in self._headers if header[0] != b"upgrade"]
            self._parser = self._new_parser()
            self._parser.feed_data(b"\r\n".join([line, *headers, b"", b""]))

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # A request after one with "Connection: close" is ignored, and does not spoil the answer to that one.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _answer(self, exchange: Exchange) -> None:
        task = self.loop.create_task(self._run(exchange))
        self.watch.tasks.add(task)
        task.add_done_callback(self.watch.tasks.discard)

    async def _run(self, exchange: Exchange) -> None:
        """Lets the app answer; an answer that it does not finish is broken off."""
        try:
            await self.app(exchange.scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("a request could not be answered")
        finally:
            if not exchange.answered and not exchange.gone.done():
                self.transport.abort()

    def _answer_refusal(self, *, stays: bool) -> None:
        assert self._refusal is not None
        sent_id = next((value for name, value in self._headers if name == b"x-request-id"), b"").decode("latin-1")
        request_id = sent_id if REQUEST_ID.fullmatch(sent_id) else new_request_id()
        path, origins = self._url.decode("latin-1"), self.watch.origins.headers(dict(self._headers))
        self.transport.write(raw_answer(self._refusal, request_id, path=path, headers=origins, stays=stays))
        if not stays:
            self.transport.close()

    def _read(self, what: Literal["head", "body", "nothing"]) -> None:
        self.reading = what
        self.since_s = time.monotonic()
        self._silent_bytes = self._body_bytes = 0

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

    def keeps_up(self, now_s: float) -> bool:
        """Whether the client has all of its answer within `write_s` at the rate at which it reads, or has only begun to read it."""
        since_s, unsent_bytes = self._unsent_since_s, self.unsent_bytes
        if since_s is None or now_s - since_s < BEGUN_S:
            return True
        read_bytes = self._unsent_first_bytes - unsent_bytes
        return read_bytes * self.limits.write_s >= unsent_bytes * (now_s - since_s)

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
        begun = self.reading == "head" and (reason == "malformed" or self._silent_bytes or self._head_bytes)
        if self._unanswered:
            last = self._unanswered[-1]
            if begun and last.keeps:
                self._last_words = raw_answer(error, request_id)
                return
            last.keeps = False
            if self.reading == "body":  # the endpoint that reads this body raises the error
                last.fault = error
                last.notice()
            return
        if self._refusal is not None:
            self._answer_refusal(stays=False)
        elif begun:
            http2 = self._parser.get_method() == HTTP2_PREFACE_METHOD
            self.transport.write(GO_AWAY if http2 else raw_answer(error, request_id))
        self.transport.close()


def _address(transport: asyncio.BaseTransport, name: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(name)
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
