"""Sends requests to a server in an open or a closed loop, and records the outcome of each.

In an open loop a request is sent when it is due, whether or not earlier ones are answered. In a closed loop a connection
sends its next request when it has its answer.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from latency.load.http_client import Connection, KeepingConnection, Target, loop_on_time
from serve.errors import BadInput

OK = range(200, 300)
TIMEOUT = "timeout"
UNSENT = "unsent"  # the trial was cut short before
TELL_S = 0.5  # between two calls of the progress callback

Became = int | str  # the status of an answer, TIMEOUT, UNSENT, or the kind of error
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Driven:
    """The outcome of each query, by its number. Moments are seconds from the start; 0 for a query never sent."""

    became: list[Became]
    bodies: list[bytes]  # of the answers; empty unless `keep_bodies`
    due_s: Floats  # in a closed loop, when each was sent
    sent_s: Floats
    ended_s: Floats
    late_s: Floats  # from the due moment until the client handled the query
    seconds: float  # from the start to the last answer
    core_s: float  # CPU time of this thread
    connections: int  # opened
    waited: int  # queries that waited because all connections were in use and no more could be opened
    resent: int  # queries whose connection the server had closed as idle
    cut_short: bool  # the given bound was missed

    @property
    def latencies_ms(self) -> Floats:
        """From the due moment to the end of the answer, for queries answered with 2xx."""
        ok = np.array([became in OK for became in self.became], dtype=bool)
        found: Floats = (self.ended_s - self.due_s)[ok] * 1000
        return found

    def having(self, *became: Became) -> int:
        """How many queries ended with one of `became`."""
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
    """Sends each of `requests` (from `Target.request`) once and in order to the server of `target`.

    With `due_s`, rising seconds from the start, each is sent when it is due, on a free connection or a new one, up to
    `connections` at once. Beyond that it waits, and the wait counts as latency. Without `due_s`, each connection sends the
    next request when it has its answer. A query without a whole answer `timeout_s` after it was due is a timeout. With
    `bound_ms` sending stops as soon as the p99 cannot stay within the bound: at the first query that is refused or fails, or
    when too many are slow. `tell` gets the numbers of ended and of all queries.

    Raises BadInput when no connection can be made.
    """
    with asyncio.Runner(loop_factory=loop_on_time) as runner:
        loop = _Loop(target, requests, due_s, connections, timeout_s, bound_ms, tell, keep_bodies=keep_bodies)
        core_s = time.thread_time()
        runner.run(loop.run())
        return loop.outcome(time.thread_time() - core_s)


class _Loop:
    """The state of all queries: not yet due, waiting for a connection, sent, or ended.

    Queries are numbered in the order of their due moments, which is also the order in which they time out.
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[bytes],
        due_s: Floats | None,
        limit: int,
        timeout_s: float,
        bound_ms: float | None,
        tell: Callable[[int, int], None],
        *,
        keep_bodies: bool,
    ) -> None:
        self.target, self.requests, self.limit, self.timeout_s, self.tell = target, requests, limit, timeout_s, tell
        self.count = len(requests)
        self.kind = KeepingConnection if keep_bodies else Connection
        self.bodies: list[bytes] = [b""] * self.count if keep_bodies else []
        self.closed = due_s is None
        self.start_s = 0.0  # 0: not started
        self.bound_s = None if bound_ms is None else bound_ms / 1000
        self.late_allowed = late_allowed(self.count)
        # Seconds from the start; after the start, moments of the loop's clock. In a closed loop a query is due when it can be sent.
        self.due_s: list[float] = [0.0] * self.count if due_s is None else due_s.tolist()
        self.late_s, self.sent_s, self.ended_s = ([0.0] * self.count for _ in range(3))
        self.became: list[Became | None] = [None] * self.count
        self.next = 0  # the first query that is not yet due
        self.oldest = 0  # the first that may yet time out
        self.left = self.count  # not yet ended
        self.slow = self.opened = self.waited = self.resent = 0
        self.cut_short = False
        self.waiting: deque[int] = deque()
        self.free: list[Connection] = []
        self.connections: set[Connection] = set()
        self.opening: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send all queries, and wait until all have ended. Raises BadInput when no connection can be made."""
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
        """The outcome of the queries, after `run`."""
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
        """Send the queries that are due, or queue them until a connection is free."""
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
        """The next query that waits for a connection, None without one; in a closed loop every unsent query waits."""
        if self.waiting:
            return self.waiting.popleft()
        if not self.closed or not self.start_s or self.next == self.count:
            return None
        self.due_s[self.next] = self.loop.time()
        self.next += 1
        return self.next - 1

    def _answered(self, connection: Connection, status: int) -> None:
        if connection.query is None:  # an answer without a request
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
            # The server closed it as idle while the query was on its way; HTTP clients send such a query again.
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
        self.address = connection.transport.get_extra_info("peername")[:2]  # so that the name is looked up only once
        self.connections.add(connection)
        self._use(connection)

    def _open_another(self) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self.opening.discard(task)
            if not task.cancelled():
                self._open_for_the_waiting()

        task = self.loop.create_task(self._open())
        self.opening.add(task)
        task.add_done_callback(ended)

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
            # In an open loop the queries that waited for it have timed out too.
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
                # No more queries are sent. Those already sent are waited for, so that they do not load the next trial.
                self.cut_short = True
                self.left -= self.count - self.next + len(self.waiting)
                self.count = self.next
                for unsent in self.waiting:
                    self.became[unsent] = UNSENT
                self.waiting.clear()
        if not self.left and not self.done.done():
            self.done.set_result(None)

    def _expire(self) -> None:
        """Give up queries that were due `timeout_s` ago."""
        now_s = self.loop.time()
        while self.oldest < self.next:
            query = self.oldest
            if self.became[query] is None:
                if self.due_s[query] + self.timeout_s > now_s:
                    break
                if query in self.waiting:
                    self.waiting.remove(query)
                for connection in self.connections:
                    if connection.query == query:
                        connection.query = None
                        connection.drop("given up")
                self._settle(query, TIMEOUT)
            self.oldest += 1
        from_s = self.due_s[self.oldest] if self.oldest < self.next else now_s
        self.loop.call_at(from_s + self.timeout_s, self._expire)

    def _tell(self) -> None:
        self.tell(self.count - self.left, self.count)
        self.loop.call_later(TELL_S, self._tell)


def _kind(error: OSError) -> str:
    return f"no connection: {error.strerror or type(error).__name__}"


def poisson_s(rate_per_s: float, queries: int, seed: int) -> npt.NDArray[np.float64]:
    """The due moments of `queries` queries, (queries,) rising seconds from 0, at `rate_per_s` on average.

    The gaps have an exponential distribution, as for many independent users: the server scenario of MLPerf Inference
    (Reddi et al. 2020). A seed gives the same pattern at every rate, scaled in time.
    Raises BadInput for a rate that is not a finite number above 0, or fewer than one query.
    """
    if not (math.isfinite(rate_per_s) and rate_per_s > 0 and queries > 0):
        raise BadInput(
            f"{queries} queries at {rate_per_s:g}/s were asked for; both must be above 0, and the rate finite"
        )
    return np.cumsum(np.random.default_rng(seed).exponential(size=queries)) / rate_per_s


def late_allowed(queries: int) -> int:
    """How many of `queries` may exceed a bound while their p99, with numpy's interpolation, can stay within it."""
    return queries - 1 - math.floor(0.99 * (queries - 1))


def highest_rate(try_rate: Callable[[float], bool], low: float, high: float, tolerance: float = 0.05) -> float:
    """The highest rate from `low` to `high` at which `try_rate` returned True; 0.0 when `low` failed.

    The rate is doubled from `low` until it fails. The gap is then halved (by its ratio) until the rate that failed is at
    most `1 + tolerance` times the rate that held.

    A trial is noisy: other load on the machine fails a sustainable rate more often than chance passes an unsustainable one.
    So a rate fails only after two failed trials in a row. The rate returned has itself held, and is never a point between.

    At most `2 * (2 + log2(high / low) + log2(log(2) / log(1 + tolerance)))` trials are made, whatever their results. Raises
    BadInput when `low` is not above 0, `high` is less than `low` or not finite, or `tolerance` is not above 0.
    """
    if not (0 < low <= high < math.inf and tolerance > 0):
        raise BadInput(
            f"rates from {low:g} to {high:g} with a tolerance of {tolerance:g} were asked for; "
            "0 < lowest <= highest < infinity and a tolerance above 0 are needed"
        )

    def holds(rate: float) -> bool:
        return try_rate(rate) or try_rate(rate)

    if not holds(low):
        return 0.0
    held, failed = low, math.inf
    while held < high and failed == math.inf:
        rate = min(2 * held, high)
        if holds(rate):
            held = rate
        else:
            failed = rate
    while held * (1 + tolerance) < failed < math.inf:
        rate = math.sqrt(held * failed)
        if holds(rate):
            held = rate
        else:
            failed = rate
    return held
