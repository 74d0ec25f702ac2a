"""A server under arrivals, simulated: the server's own queue, on a clock that does not wait.

Requests of one text arrive as a Poisson process, whether or not earlier ones are answered. One process reads them; others compute. Each
has a core while it works, and waits for one if all are taken. The queue, its batches and its refusals are `serve.workers.batcher`, so
what is simulated is the policy that is served; only the times of reading, of a run, and of the way back are numbers.
"""

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from latency.analysis.service_times import ServiceTimes
from latency.load.arrivals import poisson_s
from serve.errors import Overloaded
from serve.settings import Limits
from serve.workers.batcher import Batcher, Done

# Fitted to a 3x384 student on two virtual cores of an AMD EPYC: docs/capacity.md.
FRONT_S, FRONT_WAKE_S = 150e-6, 100e-6
MESSAGE_S, WAKE_S, SERVED = 50e-6, 0.3e-3, 1.35
ADDED_S = 0.2e-3


@dataclass(frozen=True)
class Machine:
    """A server's processes, and the cores that they share.

    A request needs `front_s` of the process that reads, half before and half after the model, and `front_wake_s` more if that slept. A
    batch needs `message_s` of the process that computes it, and `wake_s` more if that slept, since its caches are cold; it takes `served`
    times as long as in a process that has the machine to itself. An answer arrives `added_s` later.
    """

    processes: int
    cores: int
    front_s: float = FRONT_S
    front_wake_s: float = FRONT_WAKE_S
    message_s: float = MESSAGE_S
    wake_s: float = WAKE_S
    served: float = SERVED
    added_s: float = ADDED_S
    batch_tokens: int = Limits().batch_tokens
    max_queue_s: float = Limits().queue_s


class Simulated(NamedTuple):
    """The answers to arrivals at one rate."""

    latencies_ms: np.ndarray
    """Of the answers to the second half of the arrivals, from when each was due: by then the queue is as it stays, or grows."""
    refused: int
    answered_per_s: float
    busy: float
    """The mean share of the time in which a process computes."""
    front_busy: float
    """The share of the time in which the process that reads does."""

    def percentile_ms(self, percentile: float) -> float:
        """A percentile of the latencies; infinity where nothing was answered."""
        return float(np.percentile(self.latencies_ms, percentile)) if len(self.latencies_ms) else float("inf")


def simulate(
    times: ServiceTimes, lengths: Sequence[int], machine: Machine, rate_per_s: float, queries: int, seed: int = 0
) -> Simulated:
    """`queries` arrivals of texts drawn from `lengths`, the tokens of each.

    A run takes longer where other cores compute, as `times.crowded` says.
    """
    drawn = np.random.default_rng([seed, 1]).choice(np.array(lengths), queries)
    due_s = poisson_s(rate_per_s, queries, seed)

    async def answered_in(loop: VirtualLoop) -> Simulated:
        return await _Served(times, machine, loop.time).answer(due_s, drawn)

    def answered() -> Simulated:
        loop = VirtualLoop()
        try:
            return loop.run_until_complete(answered_in(loop))
        finally:
            loop.close()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return answered()
    with ThreadPoolExecutor(1) as another:  # a thread has one loop, and that of a notebook runs already
        return another.submit(answered).result()


class _Served:
    """One simulated server: its cores, its front, and the processes behind its queue."""

    def __init__(self, times: ServiceTimes, machine: Machine, clock: Callable[[], float]) -> None:
        self.times, self.machine, self.clock = times, machine, clock
        self.cores = asyncio.Semaphore(machine.cores)
        self.busy, self.busy_s, self.front_s = 0, 0.0, 0.0
        self.to_do: deque[Callable[[], None]] = deque()
        self.called = asyncio.Event()
        self.refused = 0

    async def answer(self, due_s: np.ndarray, lengths: np.ndarray) -> Simulated:
        batcher: Batcher[int, None] = Batcher(
            batch_tokens=self.machine.batch_tokens, max_queue_s=self.machine.max_queue_s, clock=self.clock
        )
        for _ in range(self.machine.processes):
            batcher.add_slot(self._process())
        front = asyncio.ensure_future(self._front())
        latencies_s = np.full(len(due_s), np.nan)
        answered = asyncio.Event()
        left = len(due_s)

        def ended(place: int, latency_s: float) -> None:
            nonlocal left
            latencies_s[place] = latency_s
            left -= 1
            if not left:
                answered.set()

        async def ask(place: int) -> None:
            length = int(lengths[place])
            try:
                await batcher.results([length], [length])
            except Overloaded:
                self.refused += 1
                ended(place, np.nan)
                return
            self._call(lambda: ended(place, self.clock() - due_s[place] + self.machine.added_s))

        asked: set[asyncio.Future[None]] = set()

        def begin(place: int) -> None:
            asked.add(asyncio.ensure_future(ask(place)))

        for place, at_s in enumerate(due_s.tolist()):
            if at_s > self.clock():
                await asyncio.sleep(at_s - self.clock())
            self._call(partial(begin, place))
        await answered.wait()
        ended_s = max(self.clock(), 1e-9)
        front.cancel()
        await asyncio.wait([front, *asked])
        await batcher.close()
        later = np.arange(len(due_s)) >= len(due_s) // 2
        known = ~np.isnan(latencies_s)
        return Simulated(
            1e3 * latencies_s[known & later],
            self.refused,
            float(known.sum()) / max(float(due_s[-1]), 1e-9),
            self.busy_s / (self.machine.processes * ended_s),
            self.front_s / ended_s,
        )

    def _call(self, work: Callable[[], None]) -> None:
        self.to_do.append(work)
        self.called.set()

    async def _front(self) -> None:
        """Reads requests and writes answers, half of `front_s` for each, as long as there are any; then it sleeps."""
        while True:
            await self.called.wait()
            self.called.clear()
            async with self.cores:
                await self._at_front(self.machine.front_wake_s)
                while self.to_do:
                    work = self.to_do.popleft()
                    await self._at_front(self.machine.front_s / 2)
                    work()

    async def _at_front(self, seconds: float) -> None:
        self.front_s += seconds
        await asyncio.sleep(seconds)

    def _process(self) -> Callable[[list[int], Done[None]], "asyncio.Future[None]"]:
        turn = asyncio.Lock()  # a process computes its next batch after its last
        last = [-1.0]  # when it was done with that

        async def compute(batch: list[int], done: Done[None]) -> None:
            async with turn:
                woken_s = self.machine.wake_s if self.clock() > last[0] else 0.0
                extra_s = self.machine.message_s + woken_s
                for part, seconds in self.times.parts_s(batch):
                    async with self.cores:
                        self.busy += 1
                        # Those that compute share caches and memory, so a run takes longer than alone.
                        others = (self.busy - 1) / (self.machine.cores - 1) if self.machine.cores > 1 else 0.0
                        slower = 1 + min(1.0, others) * ((self.times.crowded or 1.0) - 1)
                        taken_s = (extra_s + seconds) * self.machine.served * slower
                        extra_s = 0.0
                        self.busy_s += taken_s
                        await asyncio.sleep(taken_s)
                        self.busy -= 1
                    for place in part:
                        done(place, None)
                last[0] = self.clock()

        return lambda batch, done: asyncio.ensure_future(compute(batch, done))


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock does not wait: what is due next is due at once. Each turn of it takes `turn_s` seconds more.

    RuntimeError where nothing is due and nothing can become due: such a loop would wait for ever.
    """

    def __init__(self, turn_s: float = 0.0) -> None:
        self._clock = _Clock(turn_s)
        super().__init__(self._clock)

    def time(self) -> float:
        """Seconds that have passed in this loop."""
        return self._clock.now_s


class _Clock(selectors.DefaultSelector):
    def __init__(self, turn_s: float) -> None:
        super().__init__()
        self.turn_s, self.now_s = turn_s, 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is due in this loop, so it would wait for ever")
        self.now_s += timeout if timeout > 0 else self.turn_s
        return super().select(0)
