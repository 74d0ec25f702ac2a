"""Load on an HTTP server by an open loop: requests leave when they are due, whether or not earlier ones are answered.

A closed loop sends the next request when the last is answered, so a server that stalls is asked nothing while it does, and
its worst moment counts once. Here latency counts from the moment at which a request was meant to leave, late or not.
"""

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from latency.load.arrivals import highest_rate, late_allowed, poisson_s
from latency.load.http_client import Connection, Target, loop_on_time, target_of
from latency.measure.interleave import Progress
from latency.measure.statistics import SAMPLES_FOR_P99
from serve.errors import BadInput

TEXT = "TEXT"  # stands for a text in a template
OUR_TEMPLATE = '{"text": "TEXT"}'
OK = range(200, 300)
REFUSALS = (429, 503)
TIMEOUT = "timeout"
UNSENT = "unsent"
KNOWN = {*OK, *REFUSALS, TIMEOUT}  # all others are errors
# Share of the p99 that the generator's own lateness may be before the p99 is in doubt as the server's.
LATE_SHARE = 0.1
MOST_QUERIES = 1_000_000  # of a trial: a minute's work for this generator
LEAST_QUERIES = 20  # of a trial of a ramp, however low its rate
FIRST_QUERIES = 20  # one after another, from which a ramp learns where to begin
AT_ONCE_PER_S = 1e9  # a rate at which all are due at the start
MOST_DOUBLED = 4096  # times its first rate, beyond which a ramp does not look
TELL_S = 0.5  # between two words of progress


class LoadTrial(TypedDict):
    """One rate that was tried. Times are in milliseconds from the moment when a query was due, percentiles of the ok ones."""

    rate_per_s: float
    queries: int  # sent; fewer than asked for where the trial was cut short, as its bound was missed
    seconds: float  # from the start to the last answer
    p50_ms: float | None  # None: nothing was answered
    p90_ms: float | None
    p99_ms: float | None
    held: NotRequired[bool]  # nothing was refused, failed or timed out, and p99 stayed under the bound
    ok: int
    refused: int  # 429 and 503
    timeouts: int
    errors: dict[str, int]  # by status or kind
    answered_per_s: float  # ok ones
    late_p50_ms: float  # of the generator
    late_p99_ms: float
    client_core_share: float  # of one core, that the generator used
    connections: int  # opened
    waited: int  # queries for which none was free, and none more was to be opened
    resent: int  # queries whose connection the server had closed as idle
    doubts: list[str]
    latencies_ms: list[float]  # of ok queries, in order of their due moments
    from_sent_ms: list[float]  # of the same, from the moment they were written: what a closed loop would say
    refused_ms: list[float]
    late_ms: list[float]


class LoadedServer(TypedDict):
    """What `ramp` finds out."""

    bound_ms: float
    rate_per_s: float  # the highest that held; 0: none that was tried
    trials: list[LoadTrial]  # in order
    doubts: list[str]  # of the rate found


@dataclass(frozen=True)
class Load:
    """What became of the queries of one trial; times are in milliseconds."""

    rate_per_s: float  # at which queries were due
    queries: int  # sent
    seconds: float  # from the start to the last answer
    latencies_ms: tuple[float, ...]  # of ok (2xx) queries, from their due moments to the last byte, in order
    from_sent_ms: tuple[float, ...]  # of the same, from the moment they were written
    refused_ms: tuple[float, ...]  # of those answered 429 or 503, from their due moments
    late_ms: tuple[float, ...]  # how long after its due moment the generator got to each query
    timeouts: int
    errors: dict[str, int]  # by status or kind
    connections: int  # opened
    waited: int  # queries for which no connection was free, and none more was to be opened
    resent: int  # queries whose connection the server had closed as idle
    client_core_share: float  # of one core, that the generator used
    cut_short: bool = False  # the bound that was given was missed

    def percentile_ms(self, percent: float) -> float | None:
        """Of the latencies of ok queries; None when there are none."""
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else None

    def late_percentile_ms(self, percent: float) -> float:
        """Of the generator's own lateness."""
        return float(np.percentile(self.late_ms, percent))

    def held(self, bound_ms: float) -> bool:
        """Whether nothing was refused, failed or timed out, and the p99 stayed under `bound_ms`."""
        p99_ms = self.percentile_ms(99)
        failed = len(self.refused_ms) + self.timeouts + sum(self.errors.values())
        return not self.cut_short and not failed and p99_ms is not None and p99_ms < bound_ms

    def doubts(self) -> list[str]:
        """Reasons not to lean on the p99, one sentence each; empty when there are none."""
        found = []
        if 0 < len(self.latencies_ms) < SAMPLES_FOR_P99:
            found.append(
                f"p99 rests on {len(self.latencies_ms)} answers: below {SAMPLES_FOR_P99} it says little more than the slowest"
            )
        if self.resent:
            found.append(
                f"{self.resent} queries were sent again: the server closed their connections, idle until then, without an answer"
            )
        return found + self.client_doubts()

    def client_doubts(self) -> list[str]:
        """Signs that the client, and not the server, was the limit."""
        found = []
        late_ms, p99_ms = self.late_percentile_ms(99), self.percentile_ms(99)
        if p99_ms is not None and late_ms > LATE_SHARE * p99_ms:
            found.append(
                f"the generator was late itself: by {late_ms:.3g} ms or more for one query in a hundred, where p99 is {p99_ms:.3g} ms; "
                "the client may be the limit: give it cores of its own"
            )
        if self.waited:
            found.append(
                f"{self.waited} queries waited for a connection, all being in use, which counts; "
                "allow more connections if real clients open more"
            )
        return found

    def trial(self, bound_ms: float | None = None) -> LoadTrial:
        """Everything as a JSON document, with `held` where there is a bound."""
        p50_ms, p90_ms, p99_ms = (self.percentile_ms(percent) for percent in (50, 90, 99))
        document = LoadTrial(
            rate_per_s=self.rate_per_s,
            queries=self.queries,
            seconds=self.seconds,
            p50_ms=p50_ms,
            p90_ms=p90_ms,
            p99_ms=p99_ms,
            ok=len(self.latencies_ms),
            refused=len(self.refused_ms),
            timeouts=self.timeouts,
            errors=self.errors,
            answered_per_s=len(self.latencies_ms) / self.seconds,
            late_p50_ms=self.late_percentile_ms(50),
            late_p99_ms=self.late_percentile_ms(99),
            client_core_share=self.client_core_share,
            connections=self.connections,
            waited=self.waited,
            resent=self.resent,
            doubts=self.doubts(),
            latencies_ms=_rounded(self.latencies_ms),
            from_sent_ms=_rounded(self.from_sent_ms),
            refused_ms=_rounded(self.refused_ms),
            late_ms=_rounded(self.late_ms),
        )
        if bound_ms is not None:
            document["held"] = self.held(bound_ms)
        return document


def _rounded(times_ms: Sequence[float]) -> list[float]:
    return [round(ms, 4) for ms in times_ms]


def request_bodies(template: str, texts: Sequence[str]) -> list[bytes]:
    """A JSON body for each text: `template` with the text in place of every string that is "TEXT".

    Raises BadInput when `template` is not JSON, or holds no such string.
    """
    try:
        parsed = json.loads(template)
    except ValueError as error:
        raise BadInput(f"the template is not JSON ({error}); give one such as {OUR_TEMPLATE}") from error
    if _filled(parsed, "") == parsed:
        raise BadInput(
            f'the template {template} has no string "{TEXT}" to put a text in; give one such as {OUR_TEMPLATE}'
        )
    try:
        return [json.dumps(_filled(parsed, text), ensure_ascii=False).encode("utf-8") for text in texts]
    except UnicodeEncodeError as error:
        raise BadInput(f"the template or a text has half a surrogate pair ({error}), which is no character") from error


def _filled(part: Any, text: str) -> Any:
    if isinstance(part, dict):
        return {key: _filled(value, text) for key, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, text) for value in part]
    return text if part == TEXT else part


def load(
    url: str,
    requests: Sequence[bytes],
    *,
    rate_per_s: float,
    queries: int,
    connections: int = 256,
    timeout_s: float = 10.0,
    headers: Mapping[str, str] | None = None,
    seed: int = 0,
    bound_ms: float | None = None,
    progress: Progress | None = None,
) -> Load:
    """Posts `queries` bodies to `url` at the moments of `poisson_s(rate_per_s, queries, seed)`.

    The bodies are those of `requests` in an order drawn from `seed`, each once before any is sent again. A query takes a
    connection that is free or a new one, up to `connections` at once; beyond that it waits, and the wait counts. One that
    has no whole answer `timeout_s` after it was due is a timeout. With `bound_ms` the trial ends as soon as its p99 can no
    longer stay under that: at the first query that is refused or fails, or when too many are slow.

    How late the generator gets to each query is kept too. The moments of a Poisson process are a fair sample of all
    moments, so this is also about how late it reads answers.

    Raises BadInput when nothing can be sent so, or no connection can be made at all.
    """
    due_s = poisson_s(rate_per_s, queries, seed)
    if not requests or connections < 1 or not timeout_s > 0:
        raise BadInput(
            f"{len(requests)} requests, {connections} connections and a timeout of {timeout_s:g} s were given; "
            "each is needed above 0"
        )
    target = target_of(url, headers)
    order = _drawn(len(requests), queries, seed)

    def tell(done: int, count: int) -> None:
        if progress:
            progress(done, count, f"{rate_per_s:.4g}/s")

    with asyncio.Runner(loop_factory=loop_on_time) as runner:
        sending = _OpenLoop(
            target,
            [requests[i] for i in order],
            due_s,
            limit=connections,
            timeout_s=timeout_s,
            bound_ms=bound_ms,
            tell=tell,
        )
        core_s, began_s = time.thread_time(), time.monotonic()
        runner.run(sending.run())
        core_s, spent_s = time.thread_time() - core_s, time.monotonic() - began_s
    return sending.outcome(rate_per_s, core_s / spent_s)


def ramp(
    url: str,
    requests: Sequence[bytes],
    *,
    bound_ms: float,
    seconds: float = 10.0,
    queries: int | None = None,
    connections: int = 256,
    timeout_s: float = 10.0,
    headers: Mapping[str, str] | None = None,
    seed: int = 0,
    tolerance: float = 0.05,
    progress: Progress | None = None,
) -> LoadedServer:
    """The highest rate whose p99 stays under `bound_ms` while nothing is refused, fails or times out.

    A trial of `load` has `seconds` of arrivals, or `queries` of them; one that misses the bound ends when that is sure. The
    search is that of `highest_rate`, to within `tolerance`. It begins at a quarter of the rate at which the server answers one
    query after another, and looks lower, down to a 64th, only if that does not hold. Raises what `load` raises, and BadInput
    for numbers that are not above 0.
    """
    if not (bound_ms > 0 and seconds > 0 and (queries is None or queries > 0)):
        raise BadInput(
            f"a bound of {bound_ms:g} ms, {seconds:g} s and {queries} queries were given; each is needed above 0"
        )
    send = partial(load, url, requests, timeout_s=timeout_s, headers=headers)
    loads: list[Load] = []
    settled = 0

    def tell(done: int, count: int, note: str) -> None:
        if progress:
            progress(settled + done, settled + count, f"trial {len(loads) + 1}, {note}")

    def try_rate(rate_per_s: float) -> bool:
        nonlocal settled
        tried = send(
            rate_per_s=rate_per_s,
            queries=queries or min(MOST_QUERIES, max(LEAST_QUERIES, round(rate_per_s * seconds))),
            connections=connections,
            seed=seed + len(loads),  # another trial of one rate meets other bursts
            bound_ms=bound_ms,
            progress=tell,
        )
        settled += tried.queries
        loads.append(tried)
        return tried.held(bound_ms)

    one_by_one = send(rate_per_s=AT_ONCE_PER_S, queries=FIRST_QUERIES, connections=1, seed=seed)
    begin = 250 / float(np.median(one_by_one.from_sent_ms or [timeout_s * 1000]))
    found = highest_rate(try_rate, begin, MOST_DOUBLED * begin, tolerance)
    found = found or highest_rate(try_rate, begin / 16, begin, tolerance)
    return LoadedServer(
        bound_ms=bound_ms,
        rate_per_s=found,
        trials=[tried.trial(bound_ms) for tried in loads],
        doubts=_doubts(loads, found, bound_ms),
    )


def _doubts(loads: Sequence[Load], found: float, bound_ms: float) -> list[str]:
    """Of the rate found: those of its own trial, and whether the client set the limit in the trial of the next rate above."""
    own = [tried for tried in loads if tried.rate_per_s == found and tried.held(bound_ms)]
    above = sorted((tried for tried in loads if tried.rate_per_s > found), key=lambda tried: tried.rate_per_s)
    if not above:
        return [*own[-1].doubts(), f"every rate that was tried held, up to {found:.4g}/s; the server may bear more"]
    said = [f"at {above[0].rate_per_s:.4g}/s, which did not hold, {doubt}" for doubt in above[0].client_doubts()]
    return [doubt for tried in own[-1:] for doubt in tried.doubts()] + said


def _drawn(requests: int, queries: int, seed: int) -> list[int]:
    rounds = np.tile(np.arange(requests), (-(-queries // requests), 1))  # (rounds, requests)
    order: list[int] = np.random.default_rng([seed, 1]).permuted(rounds, axis=1).ravel()[:queries].tolist()
    return order


class _OpenLoop:
    """One trial under way: which queries are due, which wait for a connection, and what became of the others.

    Queries are numbered in order of their due moments, which is also the order in which they time out.
    """

    def __init__(
        self,
        target: Target,
        bodies: Sequence[bytes],
        due_s: npt.NDArray[np.float64],
        *,
        limit: int,
        timeout_s: float,
        bound_ms: float | None,
        tell: Callable[[int, int], None],
    ) -> None:
        self.target, self.bodies, self.limit, self.timeout_s, self.tell = target, bodies, limit, timeout_s, tell
        self.count = len(bodies)
        self.bound_s = None if bound_ms is None else bound_ms / 1000
        self.late_allowed = late_allowed(self.count)
        self.due_s: list[float] = due_s.tolist()  # from the start; of the loop's clock once it has started
        self.late_s, self.sent_s, self.ended_s = ([0.0] * self.count for _ in range(3))
        self.became: list[int | str | None] = [None] * self.count  # a status or a kind of error
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

    def outcome(self, rate_per_s: float, core_share: float) -> Load:
        """What became of the queries, once all is done."""
        sent = [query for query in range(self.next) if self.became[query] != UNSENT]
        ok = [query for query in sent if self.became[query] in OK]
        refused = [query for query in sent if self.became[query] in REFUSALS]
        return Load(
            rate_per_s=rate_per_s,
            queries=len(sent),
            seconds=max(self.ended_s) - self.start_s,
            latencies_ms=tuple((self.ended_s[query] - self.due_s[query]) * 1000 for query in ok),
            from_sent_ms=tuple((self.ended_s[query] - self.sent_s[query]) * 1000 for query in ok),
            refused_ms=tuple((self.ended_s[query] - self.due_s[query]) * 1000 for query in refused),
            late_ms=tuple(self.late_s[query] * 1000 for query in sent),
            timeouts=sum(self.became[query] == TIMEOUT for query in sent),
            errors=dict(Counter(str(became) for became in map(self.became.__getitem__, sent) if became not in KNOWN)),
            connections=self.opened,
            waited=self.waited,
            resent=self.resent,
            client_core_share=core_share,
            cut_short=self.cut_short,
        )

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
        connection.send(query, self.target.request(self.bodies[query]))

    def _use(self, connection: Connection) -> None:
        if self.waiting:
            self._send(connection, self.waiting.popleft())
        else:
            self.free.append(connection)

    def _answered(self, connection: Connection, status: int) -> None:
        if connection.query is None:  # an answer that nobody asked for
            connection.drop("not HTTP")
            return
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
            lambda: Connection(self._answered, self._lost),
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
        while len(self.opening) < len(self.waiting) and len(self.connections) + len(self.opening) < self.limit:
            self._open_another()

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._connect()
        except TimeoutError:
            pass  # whoever waited for it has timed out too
        except OSError as error:
            if self.waiting:
                self._settle(self.waiting.popleft(), _kind(error))

    def _settle(self, query: int, became: int | str) -> None:
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
