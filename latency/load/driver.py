"""Whole requests sent to a server when they are due, and what became of each: an open loop, or a closed one.

In an open loop a request leaves when it is due, whether or not earlier ones are answered; in a closed one a connection sends
the next when it has its answer.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from latency.load.arrivals import late_allowed
from latency.load.http_client import Connection, KeepingConnection, Target, loop_on_time
from serve.errors import BadInput

OK = range(200, 300)
TIMEOUT = "timeout"
UNSENT = "unsent"  # the bound was missed before
TELL_S = 0.5  # between two words of progress

Became = int | str  # the status of an answer, TIMEOUT, UNSENT, or the kind of error
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Driven:
    """What became of the queries, by their numbers. Moments are seconds from the start, 0 of what was never sent."""

    became: list[Became]
    bodies: list[bytes]  # of the answers, where these were to be kept
    due_s: Floats  # in a closed loop, when each left
    sent_s: Floats
    ended_s: Floats
    late_s: Floats  # how long after its due moment the client got to each
    seconds: float  # to the last answer
    core_s: float  # that this thread computed
    connections: int  # opened
    waited: int  # queries for which no connection was free, and none more was to be opened
    resent: int  # queries whose connection the server had closed as idle
    cut_short: bool  # the bound that was given was missed

    @property
    def latencies_ms(self) -> Floats:
        """From the due moment to the end of the answer, of those answered with 2xx."""
        ok = np.array([became in OK for became in self.became], dtype=bool)
        found: Floats = (self.ended_s - self.due_s)[ok] * 1000
        return found

    def having(self, *became: Became) -> int:
        """How many ended with one of `became`."""
        return sum(each in became for each in self.became)


def drive(
    target: Target,
    requests: Sequence[bytes],
    *,
    connections: int,
    due_s: Floats | None = None,
    timeout_s: float = 60.0,
    bound_ms: float | None = None,
    keep_bodies: bool = False,
    tell: Callable[[int, int], None] = lambda done, count: None,
) -> Driven:
    """Sends each of `requests`, whole as `Target.request` makes them, once and in order, to the server of `target`.

    With `due_s`, seconds from the start and rising, each leaves when it is due, by a connection that is free or a new one, up
    to `connections` at once; beyond that it waits, which counts. Without, each connection sends the next one when it has its
    answer. A query that has no whole answer `timeout_s` after it was due is a timeout. With `bound_ms` nothing more is sent
    as soon as the p99 can no longer stay under that: at the first query that is refused or fails, or when too many are slow.

    Raises BadInput when no connection can be made at all.
    """
    with asyncio.Runner(loop_factory=loop_on_time) as runner:
        loop = _Loop(
            target,
            requests,
            due_s,
            limit=connections,
            timeout_s=timeout_s,
            bound_ms=bound_ms,
            keep_bodies=keep_bodies,
            tell=tell,
        )
        core_s = time.thread_time()
        runner.run(loop.run())
        return loop.outcome(time.thread_time() - core_s)


class _Loop:
    """Queries under way: which are due, which wait for a connection, and what became of the others.

    Queries are numbered in order of their due moments, which is also the order in which they time out.
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[bytes],
        due_s: Floats | None,
        *,
        limit: int,
        timeout_s: float,
        bound_ms: float | None,
        keep_bodies: bool,
        tell: Callable[[int, int], None],
    ) -> None:
        self.target, self.requests, self.limit, self.timeout_s, self.tell = target, requests, limit, timeout_s, tell
        self.count = len(requests)
        self.kind = KeepingConnection if keep_bodies else Connection
        self.bodies: list[bytes] = [b""] * self.count if keep_bodies else []
        self.closed = due_s is None
        self.start_s = 0.0  # not yet
        self.bound_s = None if bound_ms is None else bound_ms / 1000
        self.late_allowed = late_allowed(self.count)
        # From the start; of the loop's clock once it has started. In a closed loop each is due when it can be sent.
        self.due_s: list[float] = [0.0] * self.count if due_s is None else due_s.tolist()
        self.late_s, self.sent_s, self.ended_s = ([0.0] * self.count for _ in range(3))
        self.became: list[Became | None] = [None] * self.count
        self.next = 0  # the first query that is not yet due
        self.oldest = 0  # the first that may yet time out
        self.left = self.count  # to be settled
        self.slow = self.opened = self.waited = self.resent = 0
        self.cut_short = False
        self.waiting: deque[int] = deque()
        self.free: list[Connection] = []
        self.connections: set[Connection] = set()
        self.opening: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send everything, and wait for what becomes of it. Raises BadInput when not one connection can be made."""
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.address = (self.target.host, self.target.port)
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._connect()
        except OSError as error:
            raise BadInput(
                f"no connection to {self.target.host}:{self.target.port} ({_kind(error)}); no load was sent. Is it running?"
            ) from error
        self.start_s = self.loop.time()
        if self.closed:
            self._use(self.free.pop())
            self._open_for_the_waiting()
        else:
            self.due_s = [self.start_s + due_s for due_s in self.due_s]
            self.loop.call_at(self.due_s[0], self._arrive)
        self.loop.call_later(self.timeout_s, self._expire)
        self.loop.call_later(TELL_S, self._tell)
        try:
            await self.done
        finally:
            self.waiting.clear()
            for task in self.opening:
                task.cancel()
            for connection in self.connections:
                connection.query = None
                connection.drop("the trial is over")
            while self.opening or self.connections:
                await asyncio.sleep(0)

    def outcome(self, core_s: float) -> Driven:
        """What became of the queries, once all is done."""
        return Driven(
            became=[UNSENT if became is None else became for became in self.became],
            bodies=self.bodies,
            due_s=self._from_start(self.due_s),
            sent_s=self._from_start(self.sent_s),
            ended_s=self._from_start(self.ended_s),
            late_s=np.array(self.late_s),
            seconds=max(self.ended_s) - self.start_s,
            core_s=core_s,
            connections=self.opened,
            waited=self.waited,
            resent=self.resent,
            cut_short=self.cut_short,
        )

    def _from_start(self, moments_s: list[float]) -> Floats:
        moments = np.array(moments_s)
        return np.where(moments > 0, moments - self.start_s, 0.0)

    def _arrive(self) -> None:
        """Send what is due, or let it wait for a connection."""
        while self.next < self.count and (now_s := self.loop.time()) >= self.due_s[self.next]:
            query = self.next
            self.next += 1
            self.late_s[query] = now_s - self.due_s[query]
            if self.free:
                self._send(self.free.pop(), query)
                continue
            self.waiting.append(query)
            if len(self.connections) + len(self.opening) < self.limit:
                self._open_another()
            else:
                self.waited += 1
        if self.next < self.count:
            self.loop.call_at(self.due_s[self.next], self._arrive)

    def _send(self, connection: Connection, query: int) -> None:
        self.sent_s[query] = self.loop.time()
        connection.send(query, self.requests[query])

    def _use(self, connection: Connection) -> None:
        query = self._next_waiting()
        if query is None:
            self.free.append(connection)
        else:
            self._send(connection, query)

    def _next_waiting(self) -> int | None:
        """What waits for a connection, None when nothing does; in a closed loop all that was not sent yet."""
        if self.waiting:
            return self.waiting.popleft()
        if not self.closed or not self.start_s or self.next == self.count:
            return None
        self.due_s[self.next] = self.loop.time()
        self.next += 1
        return self.next - 1

    def _answered(self, connection: Connection, status: int) -> None:
        if connection.query is None:  # an answer that nobody asked for
            connection.drop("not HTTP")
            return
        if isinstance(connection, KeepingConnection):
            self.bodies[connection.query] = bytes(connection.body)
        self._settle(connection.query, status)
        connection.query = None
        if connection.open:
            self._use(connection)

    def _lost(self, connection: Connection, how: str) -> None:
        self.connections.discard(connection)
        if connection in self.free:
            self.free.remove(connection)
        if connection.query is not None and connection.answers and not connection.begun:
            # Closed as idle while the query was on its way to it; every client sends such a query again.
            self.waiting.appendleft(connection.query)
            self.resent += 1
        elif connection.query is not None:
            self._settle(connection.query, how)
        self._open_for_the_waiting()

    async def _connect(self) -> None:
        _, connection = await self.loop.create_connection(
            lambda: self.kind(self._answered, self._lost),
            *self.address,
            ssl=self.target.tls,
            server_hostname=self.target.host if self.target.tls else None,
        )
        self.opened += 1
        if not connection.open:
            raise ConnectionResetError
        self.address = connection.transport.get_extra_info("peername")[:2]  # so that no name is looked up again
        self.connections.add(connection)
        self._use(connection)

    def _open_another(self) -> None:
        task = self.loop.create_task(self._open())
        self.opening.add(task)
        task.add_done_callback(self._opening_ended)

    def _opening_ended(self, task: asyncio.Task[None]) -> None:
        self.opening.discard(task)
        if not task.cancelled():
            self._open_for_the_waiting()

    def _open_for_the_waiting(self) -> None:
        waiting = len(self.waiting) + (self.count - self.next if self.closed else 0)
        while len(self.opening) < waiting and len(self.connections) + len(self.opening) < self.limit:
            self._open_another()

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._connect()
        except TimeoutError:
            if self.closed:
                self._fail_next(TIMEOUT)
            # In an open loop whoever waited for it has timed out too.
        except OSError as error:
            self._fail_next(_kind(error))

    def _fail_next(self, how: str) -> None:
        query = self._next_waiting()
        if query is not None:
            self._settle(query, how)

    def _settle(self, query: int, became: Became) -> None:
        self.became[query] = became
        self.ended_s[query] = self.loop.time()
        self.left -= 1
        if self.bound_s is not None and not self.cut_short:
            self.slow += self.ended_s[query] - self.due_s[query] > self.bound_s
            if became not in OK or self.slow > self.late_allowed:
                self._cut_short()
        if not self.left and not self.done.done():
            self.done.set_result(None)

    def _cut_short(self) -> None:
        """Send nothing more; what is under way is waited for, so that it does not burden the next trial."""
        self.cut_short = True
        self.left -= self.count - self.next + len(self.waiting)
        self.count = self.next
        for query in self.waiting:
            self.became[query] = UNSENT
        self.waiting.clear()

    def _expire(self) -> None:
        """Give up what was due `timeout_s` ago."""
        now_s = self.loop.time()
        while self.oldest < self.next:
            if self.became[self.oldest] is None:
                if self.due_s[self.oldest] + self.timeout_s > now_s:
                    break
                self._give_up(self.oldest)
            self.oldest += 1
        from_s = self.due_s[self.oldest] if self.oldest < self.next else now_s
        self.loop.call_at(from_s + self.timeout_s, self._expire)

    def _give_up(self, query: int) -> None:
        if query in self.waiting:
            self.waiting.remove(query)
        for connection in self.connections:
            if connection.query == query:
                connection.query = None
                connection.drop("given up")
        self._settle(query, TIMEOUT)

    def _tell(self) -> None:
        self.tell(self.count - self.left, self.count)
        self.loop.call_later(TELL_S, self._tell)


def _kind(error: OSError) -> str:
    return f"no connection: {error.strerror or type(error).__name__}"
