"""Requests to a server from one thread and bare sockets, as cheaply as Python can: for where client and server share cores.

`latency.load.generator` is the instrument for a server's user; here the client must cost next to nothing and every answer's bytes are
kept, so that each can be compared with the right one. `noop.py` says what is left of its cost.
"""

import re
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LOST = 0  # stands for a status: the connection ended without a whole answer
TIMEOUT = -1  # no whole answer in time; the connection was closed
UNSENT = -2  # timed out while it waited for a connection
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
CLOSES = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
SWEEP_S = 0.1  # between two looks for queries that timed out
READ_BYTES = 1 << 18


class Place(NamedTuple):
    """Where requests go."""

    host: str
    port: int


def post(place: Place, path: str, body: bytes, content_type: str = "application/json") -> bytes:
    """A whole POST, ready to be written."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {place.host}:{place.port}\r\nContent-Type: {content_type}\r\nContent-Length: "
    )
    return b"%b%d\r\n\r\n%b" % (head.encode("latin-1"), len(body), body)


@dataclass
class Driven:
    """What became of the queries, by their numbers. Moments are seconds from the start."""

    statuses: list[int]
    bodies: list[bytes]
    due_s: npt.NDArray[np.float64]  # when each was meant to leave; in a closed loop, when it left
    sent_s: npt.NDArray[np.float64]
    ended_s: npt.NDArray[np.float64]
    seconds: float  # to the last answer
    client_core_s: float  # that this thread computed
    resent: int  # queries whose connection the server had closed as idle

    @property
    def latencies_ms(self) -> npt.NDArray[np.float64]:
        """From the due moment to the end, of those answered with 2xx."""
        ok = np.array([200 <= status < 300 for status in self.statuses])
        found: npt.NDArray[np.float64] = (self.ended_s - self.due_s)[ok] * 1000
        return found

    def having(self, *statuses: int) -> int:
        """How many ended with one of `statuses`."""
        return sum(status in statuses for status in self.statuses)


@dataclass
class _Connection:
    socket: socket.socket
    query: int = -1  # none
    connecting: bool = True
    answers: int = 0
    received: bytearray = field(default_factory=bytearray)


def drive(
    place: Place,
    requests: Sequence[bytes],
    *,
    connections: int,
    due_s: npt.NDArray[np.float64] | None = None,
    timeout_s: float = 60.0,
) -> Driven:
    """Sends each of `requests` once, in order, over at most `connections` at a time that stay open.

    Without `due_s` it is a closed loop: each connection sends the next request when it has its answer. With it, seconds from the start
    and rising, it is an open loop: each request leaves when it is due, by a connection that is free or a new one, and where
    all are in use it waits, and the wait counts in its latency.
    OSError when the first connection cannot be made.
    """
    loop = _Loop(place, requests, connections, due_s, timeout_s)
    try:
        return loop.run()
    finally:
        loop.close()


class _Loop:
    def __init__(
        self,
        place: Place,
        requests: Sequence[bytes],
        limit: int,
        due_s: npt.NDArray[np.float64] | None,
        timeout_s: float,
    ) -> None:
        count = len(requests)
        self.place, self.requests, self.limit, self.timeout_s, self.count = place, requests, limit, timeout_s, count
        self.closed = due_s is None
        self.due_s: list[float] = [0.0] * count if due_s is None else due_s.tolist()
        self.sent_s, self.ended_s = [0.0] * count, [0.0] * count
        self.statuses = [LOST] * count
        self.bodies = [b""] * count
        self.next = self.settled = self.resent = 0
        self.waiting: deque[int] = deque()
        self.epoll = select.epoll()
        self.connections: dict[int, _Connection] = {}
        self.free: list[_Connection] = []

    def run(self) -> Driven:
        socket.create_connection(self.place).close()  # is anybody there?
        self.start_s = time.perf_counter()
        core_s = time.thread_time()
        swept_s = 0.0
        while self.settled < self.count:
            now_s = self._now_s()
            self._send_due(now_s)
            if now_s - swept_s > SWEEP_S:
                swept_s = now_s
                self._give_up(now_s)
            self._read(self._pause_s())
        core_s = time.thread_time() - core_s
        sent_s, ended_s = np.array(self.sent_s), np.array(self.ended_s)
        return Driven(
            statuses=self.statuses,
            bodies=self.bodies,
            due_s=sent_s if self.closed else np.array(self.due_s),
            sent_s=sent_s,
            ended_s=ended_s,
            seconds=float(ended_s.max(initial=0.0)),
            client_core_s=core_s,
            resent=self.resent,
        )

    def close(self) -> None:
        for connection in self.connections.values():
            connection.socket.close()
        self.epoll.close()

    def _now_s(self) -> float:
        return time.perf_counter() - self.start_s

    def _pause_s(self) -> float:
        if not self.closed and self.next < self.count:
            return min(SWEEP_S, max(0.0, self.due_s[self.next] - self._now_s()))
        return SWEEP_S

    def _send_due(self, now_s: float) -> None:
        """Sends what is due by a free connection, or a new one where there may be more."""
        if self.closed:
            while (self.waiting or self.next < self.count) and (self.free or len(self.connections) < self.limit):
                self._send(self.free.pop() if self.free else self._opened(), self._next_closed())
            return
        while self.next < self.count and self.due_s[self.next] <= now_s:
            self.waiting.append(self.next)
            self.next += 1
        while self.waiting and (self.free or len(self.connections) < self.limit):
            self._send(self.free.pop() if self.free else self._opened(), self.waiting.popleft())

    def _next_closed(self) -> int:
        if self.waiting:
            return self.waiting.popleft()
        self.next += 1
        return self.next - 1

    def _send(self, connection: _Connection, query: int) -> None:
        connection.query = query
        connection.received.clear()
        self.sent_s[query] = self._now_s()
        if not connection.connecting:
            self._write(connection)

    def _write(self, connection: _Connection) -> None:
        try:
            connection.socket.sendall(self.requests[connection.query])
        except OSError:
            self._lost(connection)

    def _connected(self, connection: _Connection) -> None:
        """Sends the query that the connection was opened for; a full backlog may have held it up for seconds."""
        connection.connecting = False
        connection.socket.setblocking(True)
        self.epoll.modify(connection.socket.fileno(), select.EPOLLIN)
        self._write(connection)

    def _read(self, pause_s: float) -> None:
        """Takes what has come. What is due is waited for to the microsecond, where epoll's own wait counts milliseconds."""
        events = self.epoll.poll(pause_s if self.closed else 0)
        if not events and not self.closed and pause_s > 0:
            select.select([self.epoll.fileno()], [], [], pause_s)
            events = self.epoll.poll(0)
        for number, _ in events:
            connection = self.connections.get(number)
            if connection is None:
                continue
            if connection.connecting and not connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._connected(connection)
                continue
            try:
                part = connection.socket.recv(READ_BYTES)
            except OSError:
                part = b""
            if not part:
                self._lost(connection)
                continue
            connection.received += part
            if connection.query >= 0 and (answer := whole_answer(connection.received)):
                self._answered(connection, *answer)

    def _answered(self, connection: _Connection, status: int, body: bytes, stays: bool) -> None:
        query, connection.query = connection.query, -1
        connection.answers += 1
        self._settle(query, status, body)
        if not stays:
            self._drop(connection)
        elif self.waiting or (self.closed and self.next < self.count):
            self._send(connection, self._next_closed())
        else:
            self.free.append(connection)

    def _lost(self, connection: _Connection) -> None:
        query = connection.query
        self._drop(connection)
        if query < 0:
            return
        if connection.answers and not connection.received:
            # Closed as idle while the query was on its way to it: every client sends such a query again.
            self.waiting.appendleft(query)
            self.resent += 1
        else:
            self._settle(query, LOST, b"")

    def _settle(self, query: int, status: int, body: bytes) -> None:
        self.statuses[query], self.bodies[query] = status, body
        self.ended_s[query] = self._now_s()
        self.settled += 1

    def _give_up(self, now_s: float) -> None:
        for connection in list(self.connections.values()):
            query = connection.query
            if query >= 0 and now_s - (self.sent_s[query] if self.closed else self.due_s[query]) > self.timeout_s:
                self._drop(connection)
                self._settle(query, TIMEOUT, b"")
        while not self.closed and self.waiting and now_s - self.due_s[self.waiting[0]] > self.timeout_s:
            self._settle(self.waiting.popleft(), UNSENT, b"")

    def _opened(self) -> _Connection:
        made = socket.socket(socket.AF_INET6 if ":" in self.place.host else socket.AF_INET, socket.SOCK_STREAM)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setblocking(False)
        made.connect_ex(self.place)
        connection = self.connections[made.fileno()] = _Connection(made)
        self.epoll.register(made.fileno(), select.EPOLLOUT)
        return connection

    def _drop(self, connection: _Connection) -> None:
        number = connection.socket.fileno()
        self.epoll.unregister(number)
        del self.connections[number]
        connection.socket.close()
        if connection in self.free:
            self.free.remove(connection)


def whole_answer(received: bytearray) -> tuple[int, bytes, bool] | None:
    """Status, body and whether the connection stays, once all of an answer is there."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(received[:end])
    stays = not CLOSES.search(head)
    if sized := CONTENT_LENGTH.search(head):
        if len(received) < end + 4 + int(sized[1]):
            return None
        return int(head[9:12]), bytes(received[end + 4 : end + 4 + int(sized[1])]), stays
    if CHUNKED.search(head):
        body = _unchunked(bytes(received[end + 4 :]))
        return None if body is None else (int(head[9:12]), body, stays)
    return int(head[9:12]), b"", stays


def _unchunked(received: bytes) -> bytes | None:
    body, at = b"", 0
    while (line := received.find(b"\r\n", at)) >= 0:
        size = int(received[at:line].partition(b";")[0], 16)
        if len(received) < line + 2 + size + 2:
            return None
        if not size:
            return body
        body += received[line + 2 : line + 2 + size]
        at = line + 2 + size + 2
    return None
