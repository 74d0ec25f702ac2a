"""The limits on all connections of a server: one task looks at each of them, and new work is refused before it is read."""

import asyncio
import logging
import time
from collections.abc import Callable
from email.utils import formatdate
from ssl import SSLContext
from typing import TYPE_CHECKING, Literal

from serve.errors import Overloaded
from serve.http.access import Origins
from serve.observe.logs import note
from serve.observe.metrics import Metrics
from serve.settings import ConnectionLimits

if TYPE_CHECKING:
    from serve.http.connections.protocol import Connection

log = logging.getLogger("serve")

# How often the connections are checked.
CHECK_S = 0.25
# Connections above the limit that may be closing.
CLOSING = 64
# If a full server finds no idle connection to close, it does not search again for this time.
SEARCH_AGAIN_S = 0.05

# New work is refused while the event loop of this process is late by more than this.
BEHIND_S = 0.1
MEASURE_S = 0.02  # how often the delay is measured

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
        self.tasks: set[asyncio.Task[None]] = set()
        """Of the requests that are being answered."""
        self.date = _date()
        """The header of every answer."""
        self.behind_s = 0.0
        """How late the event loop was at both of the last two measurements, in seconds: one delay is no overload."""
        self.unsent_bytes = 0
        """Bytes of answers that clients had not read when it was last counted."""
        self.full_s: Callable[[], float] = lambda: 0.0
        """Gives the seconds until the queue of one of the models has room; 0 if one has room."""
        self.origins = Origins()
        self.tls: SSLContext | None = None
        """For new connections; None without a certificate. One in use is never changed: a file that cannot be used leaves it whole."""
        self.on_closed: Callable[[], None] = lambda: None
        """Called for each connection that was accepted and has ended."""
        self.on_turn: Callable[[], None] = lambda: None
        """Called each `MEASURE_S` by the event loop."""
        self._metrics = metrics
        self._searched_s = -SEARCH_AGAIN_S
        metrics.connections.set_function(lambda: self.open)

    def closed(self) -> None:
        """Counts a connection that has ended."""
        self.open -= 1
        self.on_closed()

    async def close_late(self) -> None:
        """Checks every connection each `CHECK_S`, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = time.monotonic()
            self.date = _date()
            try:
                for connection in list(self.connections):
                    connection.check_timeouts(now_s)
                self._cut_unread(now_s)
            except Exception:
                log.exception("checking the connections failed; the next check goes on")

    def _cut_unread(self, now_s: float) -> None:
        """Cuts the connections with the most unsent bytes.

        First those that do not keep up, until all together are within the limit. The others are cut while all hold more than twice
        that, since no refusal of new work bounds what they hold; but not one that holds all of it: an answer that is allowed arrives.
        """
        unsent = self._unsent()
        keeps_up = {each: each.keeps_up(now_s) for each in unsent}
        for each in sorted(unsent, key=lambda each: (keeps_up[each], -unsent[each])):
            most_bytes = self.limits.unsent_bytes * (2 if keeps_up[each] else 1)
            if self.unsent_bytes <= most_bytes or (keeps_up[each] and self.unsent_bytes == unsent[each]):
                break
            self.unsent_bytes -= unsent[each]
            each.abort("unread")

    def _unsent(self) -> "dict[Connection, int]":
        """The connections with unsent bytes, and how many; `unsent_bytes` is their sum."""
        unsent = {each: unsent_bytes for each in self.connections if (unsent_bytes := each.unsent_bytes)}
        self.unsent_bytes = sum(unsent.values())
        return unsent

    async def measure_loop_lag(self) -> None:
        """Measures how late the event loop is each `MEASURE_S`, until cancelled."""
        loop = asyncio.get_running_loop()
        before_s = 0.0
        while True:
            due_s = loop.time() + MEASURE_S
            await asyncio.sleep(MEASURE_S)
            self.on_turn()
            late_s = loop.time() - due_s
            self.behind_s, before_s = min(late_s, before_s), late_s

    def refusal(self, connection: "Connection | None" = None) -> Overloaded | None:
        """The error with which new work of `connection` is refused before it is read; None if it is not refused.

        Such a refusal costs a tenth of an answer. Otherwise a server with several times its load would spend its time on refusals.
        """
        if wait_s := self.full_s():
            self._metrics.shed.labels("full").inc()
            return Overloaded(f"the queue is full; try again in {wait_s:.1f} s", retry_after_s=wait_s)
        if self.unsent_bytes > self.limits.unsent_bytes and connection is not None and self._holds_much(connection):
            self._metrics.shed.labels("unread").inc()
            return Overloaded(
                "the answers to earlier requests of this connection are unread; read them first", retry_after_s=1.0
            )
        if self.behind_s > BEHIND_S:
            self._metrics.shed.labels("behind").inc()
            return Overloaded("more requests arrive than can be read; try again in a second", retry_after_s=1.0)
        return None

    def _holds_much(self, connection: "Connection") -> bool:
        """Whether the unsent bytes are over the limit now, and those of `connection` over its part: an equal one for each that has any."""
        if not connection.unsent_bytes:
            return False
        unsent, most_bytes = self._unsent(), self.limits.unsent_bytes
        return self.unsent_bytes > most_bytes and unsent.get(connection, 0) > most_bytes / len(unsent)

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


def _date() -> bytes:
    return f"date: {formatdate(usegmt=True)}\r\n".encode()
