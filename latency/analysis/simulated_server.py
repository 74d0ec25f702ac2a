"""A server under arrivals, simulated: the server's own queue, on a clock that does not wait.

Requests of one text arrive as a Poisson process, whether or not earlier ones are answered. One process reads them; others compute.
The queue, its batches and its refusals are `serve.workers.batcher`, so what is simulated is the policy that is served; only the times
of reading, of a run, and of the way back are numbers.
"""

import asyncio
import selectors
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from latency.analysis.service_times import ServiceTimes
from latency.load.arrivals import poisson_s
from serve.errors import Overloaded
from serve.workers.batcher import Batcher, Done

# As measured on two virtual cores of an AMD EPYC: see docs/measurements/server.md.
FRONT_S, MESSAGE_S, ADDED_S = 110e-6, 50e-6, 0.3e-3


@dataclass(frozen=True)
class Machine:
    """A server's processes, and the cores that they share.

    A request needs `front_s` of core time of the process that reads, and of the system, besides the model's; a batch needs `message_s`
    of the process that computes it; and an answer arrives `added_s` later than all that would make it.
    """

    processes: int
    cores: int
    front_s: float = FRONT_S
    message_s: float = MESSAGE_S
    added_s: float = ADDED_S
    batch_tokens: int = 512
    max_queue_s: float = 0.5


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
        """A percentile of the latencies; of an infinite one where nothing was answered."""
        return float(np.percentile(self.latencies_ms, percentile)) if len(self.latencies_ms) else float("inf")


def simulate(
    times: ServiceTimes, lengths: Sequence[int], machine: Machine, rate_per_s: float, queries: int, seed: int = 0
) -> Simulated:
    """`queries` arrivals of texts drawn from `lengths`, the tokens of each.

    A run takes longer where more processes compute than there are cores: they share them equally.
    """
    drawn = np.random.default_rng([seed, 1]).choice(np.array(lengths), queries)
    due_s = poisson_s(rate_per_s, queries, seed)
    read_s = _read_s(due_s, machine.front_s)
    selector = _NoWait()
    loop = _VirtualLoop(selector)
    try:
        served = _Served(times, machine, min(1.0, rate_per_s * machine.front_s), loop.time)
        return loop.run_until_complete(served.answer(due_s, read_s, drawn))
    finally:
        loop.close()


class _Served:
    def __init__(self, times: ServiceTimes, machine: Machine, front_busy: float, clock: Callable[[], float]) -> None:
        self.times, self.machine, self.front_busy, self.clock = times, machine, front_busy, clock
        self.busy, self.busy_s = 0, 0.0
        self.refused = 0

    async def answer(self, due_s: np.ndarray, read_s: np.ndarray, lengths: np.ndarray) -> Simulated:
        batcher: Batcher[int, None] = Batcher(
            batch_tokens=self.machine.batch_tokens, max_queue_s=self.machine.max_queue_s, clock=self.clock
        )
        for _ in range(self.machine.processes):
            batcher.add_slot(self._process())
        latencies_s = np.full(len(due_s), np.nan)

        async def ask(place: int) -> None:
            length = int(lengths[place])
            try:
                await batcher.results([length], [length])
            except Overloaded:
                self.refused += 1
                return
            latencies_s[place] = self.clock() - due_s[place] + self.machine.added_s

        waiting: set[asyncio.Task[None]] = set()
        for place, at_s in enumerate(read_s.tolist()):
            if at_s > self.clock():
                await asyncio.sleep(at_s - self.clock())
            task = asyncio.ensure_future(ask(place))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        if waiting:
            await asyncio.wait(waiting)
        ended_s = self.clock()
        await batcher.close()
        answered = ~np.isnan(latencies_s)
        later = np.arange(len(due_s)) >= len(due_s) // 2
        return Simulated(
            1e3 * latencies_s[answered & later],
            self.refused,
            float(answered.sum()) / max(float(due_s[-1]), 1e-9),
            self.busy_s / (self.machine.processes * max(ended_s, 1e-9)),
            self.front_busy,
        )

    def _slower(self) -> float:
        """How much longer than alone a run takes now: those that compute share the cores, their caches and their memory."""
        at_work, cores = self.busy + self.front_busy, self.machine.cores
        others = min(1.0, max(0.0, at_work - 1) / (cores - 1)) if cores > 1 else 0.0
        return max(1.0, at_work / cores) * (1 + others * (self.times.crowded - 1))

    def _process(self) -> Callable[[list[int], Done[None]], "asyncio.Future[None]"]:
        turn = asyncio.Lock()  # a process computes its next batch after its last

        async def compute(batch: list[int], done: Done[None]) -> None:
            async with turn:
                self.busy += 1
                await asyncio.sleep(self.machine.message_s)
                for part, seconds in self.times.parts_s(batch):
                    taken_s = seconds * self._slower()
                    self.busy_s += taken_s
                    await asyncio.sleep(taken_s)
                    for place in part:
                        done(place, None)
                self.busy -= 1

        return lambda batch, done: asyncio.ensure_future(compute(batch, done))


def _read_s(due_s: np.ndarray, front_s: float) -> np.ndarray:
    """When each request is read: one after another, each for `front_s` (Lindley's recursion, unrolled)."""
    own = front_s * np.arange(1, len(due_s) + 1)
    return own + np.maximum.accumulate(due_s - own + front_s)


class _NoWait(selectors.DefaultSelector):
    """A selector that passes over the time for which nothing is due."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is due: the simulation cannot go on")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _NoWait) -> None:
        self._clock = selector
        super().__init__(selector)

    def time(self) -> float:
        return self._clock.now_s
