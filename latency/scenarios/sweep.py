"""How to spend the cores: on the threads of one call, or on processes side by side."""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from latency.candidates.candidate import Candidate
from latency.measure.interleave import Progress, Worker
from latency.measure.result_document import SweepRow
from latency.measure.workloads import Workload
from serve.errors import BadInput

Floats = npt.NDArray[np.float64]
Way = tuple[int, int]  # threads of each process, processes

NO_LIMIT = 10**9  # calls of one turn


def sweep(
    candidate: Candidate,
    workload: Workload,
    *,
    cores: int,
    seconds: float,
    turns: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[SweepRow]:
    """Times `candidate` on `workload` in every way of `ways(cores)`, whatever number of threads it names itself.

    All processes are loaded at once and idle ones wait on a read. A turn gives each way `seconds / turns` in an order
    shuffled anew from `seed`: all processes of that way call one after another, and what counts is the time in which all
    are at work. Raises BadInput for a candidate that cannot be loaded or run, InternalError for a process that dies; none
    outlives the call.
    """
    if cores < 1 or turns < 1 or not seconds > 0:
        raise BadInput(f"{cores} cores, {turns} turns and {seconds:g} seconds were given; each must be above 0")
    spent = ways(cores)
    shuffler = random.Random(seed)
    with ExitStack() as stack:
        # The ways with equally many threads share their processes.
        workers_of: dict[int, list[Worker]] = {}
        for threads, processes in spent:
            of_this_many = workers_of.setdefault(threads, [])
            while len(of_this_many) < processes:
                of_this_many.append(stack.enter_context(Worker(replace(candidate, threads=threads))))
        workers = [worker for of_this_many in workers_of.values() for worker in of_this_many]
        for worker in workers:  # all load at once; the answers are collected after
            worker.send_load([workload])
        for worker in workers:
            worker.receive()
        taken_ms: dict[Way, list[list[Floats]]] = {way: [] for way in spent}
        for turn in range(turns + 1):  # the first warms up
            for place, (threads, processes) in enumerate(shuffler.sample(spent, len(spent))):
                if progress:
                    what = f"{candidate.name}, threads {threads}, processes {processes}"
                    progress(turn * len(spent) + place, (turns + 1) * len(spent), what)
                calls_ms = at_once(workers_of[threads][:processes], workload, seconds / turns)
                if turn:
                    taken_ms[threads, processes].append(calls_ms)
    if progress:
        progress((turns + 1) * len(spent), (turns + 1) * len(spent), "done")
    return [sweep_row(candidate.name, workload.batch, way, taken_ms[way]) for way in spent]


def ways(cores: int) -> list[Way]:
    """Threads and processes whose product is at most `cores`, each a power of two or `cores` itself.

    On 2 cores: 1 x 1, 1 x 2 and 2 x 1.
    """
    sizes = sorted({1 << power for power in range(cores.bit_length())} | {cores})
    return [(threads, processes) for threads in sizes for processes in sizes if threads * processes <= cores]


class DrivenTurn(NamedTuple):
    """One worker's calls on end; times in seconds of this process's clock."""

    began_s: Floats  # each call
    calls_ms: Floats  # how long each took
    ended_s: float


def at_once(workers: Sequence[Worker], workload: Workload, seconds: float) -> list[Floats]:
    """Of each worker the times in ms of its calls while all were at work (see `together_ms`), at least one.

    Each is at work for `seconds`, or longer where no such calls fall into that.
    """
    with ThreadPoolExecutor(len(workers)) as drivers:
        while True:
            take = partial(_take, workload=workload, seconds=seconds)
            kept = together_ms(list(drivers.map(take, workers)))
            if all(map(len, kept)):
                return kept
            seconds *= 2


def together_ms(turns: Sequence[DrivenTurn]) -> list[Floats]:
    """Of each turn the times of the calls that began while all were under way.

    Such a call counts whole: to keep only those that also ended in time would leave out slow ones more often than quick.
    """
    all_began_s = max(turn.began_s[0] for turn in turns)
    one_ended_s = min(turn.ended_s for turn in turns)
    return [turn.calls_ms[(turn.began_s >= all_began_s) & (turn.began_s < one_ended_s)] for turn in turns]


def _take(worker: Worker, workload: Workload, seconds: float) -> DrivenTurn:
    # Of two calls each, one may begin before all are under way.
    calls_ms = np.array(worker.run(workload, seconds=seconds, least=2, most=NO_LIMIT)["samples_ms"])
    ended_s = time.perf_counter()
    # Timed calls are the last of a turn and follow one another, so that the end tells all beginnings.
    return DrivenTurn(ended_s - np.cumsum(calls_ms[::-1])[::-1] / 1000.0, calls_ms, ended_s)


def sweep_row(name: str, batch: int, way: Way, turns_ms: Sequence[Sequence[Floats]]) -> SweepRow:
    """The row of one way, from the times of its calls: of each turn, of each process."""
    threads, processes = way
    by_process_ms = [np.concatenate(turns) for turns in zip(*turns_ms, strict=True)]
    p50_ms, p99_ms = np.percentile(np.concatenate(by_process_ms), [50, 99])
    return SweepRow(
        name=name,
        threads=threads,
        processes=processes,
        p50_ms=round(float(p50_ms), 4),
        p99_ms=round(float(p99_ms), 4),
        texts_per_s=round(sum(batch * 1000.0 / float(calls_ms.mean()) for calls_ms in by_process_ms), 1),
    )
