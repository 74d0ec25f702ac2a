"""A minimal HTTP/1.1 client for load: a target, a connection, and an event loop with precise timers."""

# Why not a library: on two cores shared with a bare server, a request took 190 us of CPU in aiohttp 3.14, over 2,000 us in
# httpx 0.28 at 16 connections, and 40 us here. The client's CPU time is not available to the server that it measures.

import asyncio
import http.client
import re
import select
import selectors
import ssl
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote, urlsplit

import httptools

from serve.errors import BadInput

SHOWN_BYTES = 300  # of a body, in a message
SAFE = "/%:@!$&'()*+,;=~"  # in a path, besides letters, digits and "_.-"
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
HEADER_VALUE = re.compile(r"[\t -~\x80-\xff]*")
NOT_TO_BE_GIVEN = {"content-length", "transfer-encoding", "connection"}


@dataclass(frozen=True)
class Target:
    """The address of the server, and the path and headers of each request."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    path: str
    headers: dict[str, str]

    def request(self, body: bytes) -> bytes:
        """`body` as a POST, ready to be written to a connection."""
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)

    @cached_property
    def _head(self) -> bytes:
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers.items())]
        return "\r\n".join([*lines, "Content-Length: "]).encode("latin-1")


def target_of(url: str, headers: Mapping[str, str] | None = None) -> Target:
    """`url` as a target for JSON; `headers` are added to Host and Content-Type, or replace them.

    Certificates are verified with the system's authorities, or those in the file SSL_CERT_FILE. Raises BadInput for a URL
    that is not http or https, a URL with a name or password, and headers that cannot be sent.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
        sent = {"Host": parts.netloc.encode("idna").decode(), "Content-Type": "application/json"}
    except ValueError as error:
        raise BadInput(f"{url!r} is not a URL ({error}); give one such as http://127.0.0.1:8000/v1/entities") from error
    if parts.scheme not in ("http", "https") or not host:
        raise BadInput(f"{url!r} is not an http or https URL; give one such as http://127.0.0.1:8000/v1/entities")
    if "@" in parts.netloc:
        raise BadInput("the URL holds a name or a password, which reports would show; send an Authorization header")
    check_headers(headers or {})
    for name, value in (headers or {}).items():
        sent = {other: kept for other, kept in sent.items() if other.lower() != name.lower()} | {name: value}
    path = quote(parts.path or "/", safe=SAFE) + (f"?{quote(parts.query, safe=SAFE + '?')}" if parts.query else "")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Target(host, port or (443 if tls else 80), tls, path, sent)


def check_headers(headers: Mapping[str, str]) -> None:
    """Check that all of `headers` can be sent. Raises BadInput with the names of those that cannot."""
    wrong = [
        repr(name)
        for name, value in headers.items()
        if not (HEADER_NAME.fullmatch(name) and HEADER_VALUE.fullmatch(value)) or name.lower() in NOT_TO_BE_GIVEN
    ]
    if wrong:
        raise BadInput(
            f"the {'header' if len(wrong) == 1 else 'headers'} {', '.join(wrong)} cannot be sent: give a valid name and one line "
            f"of Latin-1, and none of {', '.join(sorted(NOT_TO_BE_GIVEN))}, which are set here"
        )


def probe(target: Target, body: bytes, timeout_s: float) -> None:
    """Sends `body` once. Raises BadInput, with the answer, for any status but 2xx."""
    if target.tls:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            target.host, target.port, timeout=timeout_s, context=target.tls
        )
    else:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    where = f"{target.host}:{target.port}{target.path}"
    try:
        connection.request("POST", target.path, body, target.headers)
        answer = connection.getresponse()
        said = answer.read(SHOWN_BYTES).decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise BadInput(
            f"{where} did not answer a first request ({reason}); no load was sent. Is it running?"
        ) from error
    finally:
        connection.close()
    if not 200 <= answer.status < 300:
        raise BadInput(
            f"{where} answered a first request with {answer.status} {answer.reason}; no load was sent. The answer: {said}"
        )


class Connection(asyncio.Protocol):
    """A connection that carries one query at a time, by its number.

    `answered(connection, status)` is called at the end of an answer, with `query` still set; while the connection is `open`
    it can then carry another query. `lost(connection, how)` is called once, when it closes; a `query` still set has no answer.
    """

    def __init__(
        self, answered: Callable[["Connection", int], None], lost: Callable[["Connection", str], None]
    ) -> None:
        self.query: int | None = None
        self.answers = 0
        self.begun = False  # the first bytes of the answer have arrived
        self.open = False
        self._answered, self._lost = answered, lost
        self._how = ""
        self._sized = self._complete = self._stays = False
        self._status = 0
        self._parser = httptools.HttpResponseParser(self)

    def send(self, query: int, request: bytes) -> None:
        """Carry `query`."""
        self.query = query
        self.begun = self._sized = self._complete = False
        self._status = 0
        self.transport.write(request)

    def drop(self, how: str) -> None:
        """Close at once, even during a query."""
        self.open, self._how = False, how
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102 - asyncio's interface
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.open = True

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self.begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._complete = False
            self.drop("not HTTP")
        if self._complete:
            if not self._stays:
                self.open = False
                self.transport.close()
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: D102
        self.open = False
        if self._status and not self._sized and not self._how and error is None:
            self._finish()  # an answer without a length ends with its connection
        self._lost(self, self._how or ("closed in mid-answer" if self.begun else "closed without an answer"))

    def _finish(self) -> None:
        self.answers += 1
        status, self._status, self._complete = self._status, 0, False
        self._answered(self, status)

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102 - as httptools says
        self._sized |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:  # noqa: D102
        self._status = self._parser.get_status_code()

    def on_message_complete(self) -> None:  # noqa: D102
        if self._status >= 200:  # a 1xx status only announces an answer
            self._complete, self._stays = True, self._parser.should_keep_alive()


class KeepingConnection(Connection):
    """A connection that also keeps the `body` of its last answer."""

    def send(self, query: int, request: bytes) -> None:
        """Carry `query`."""
        self.body = bytearray()
        super().send(query, request)

    def on_body(self, part: bytes) -> None:  # noqa: D102 - as httptools says
        self.body += part


def loop_on_time() -> asyncio.AbstractEventLoop:
    """An event loop that wakes to the microsecond: epoll's timeouts are milliseconds, which would add 0.5 ms to each latency."""
    if sys.platform != "linux":
        return asyncio.new_event_loop()

    class Selector(selectors.EpollSelector):
        def select(self, timeout: float | None = None) -> Any:
            if timeout is not None and timeout > 0:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)

    return asyncio.SelectorEventLoop(Selector())
