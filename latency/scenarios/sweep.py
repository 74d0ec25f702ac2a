"""Times one model with different numbers of threads and of parallel processes on the same cores."""

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
    """Times `candidate` on `workload` in each combination of `ways(cores)`, whatever its own number of threads.

    All processes are loaded at once, and idle ones block on a read. In a turn each combination runs for `seconds / turns`, in
    an order shuffled with `seed`. All its processes make calls without pause, and the time while all are active counts.
    Raises BadInput for a candidate that cannot be loaded or run, InternalError for a process that dies. All processes
    have ended when it returns.
    """
    if cores < 1 or turns < 1 or not seconds > 0:
        raise BadInput(f"{cores} cores, {turns} turns and {seconds:g} seconds were given; each must be above 0")
    spent = ways(cores)
    shuffler = random.Random(seed)
    with ExitStack() as stack:
        # Combinations with the same number of threads share processes.
        workers_of: dict[int, list[Worker]] = {}
        for threads, processes in spent:
            of_this_many = workers_of.setdefault(threads, [])
            while len(of_this_many) < processes:
                of_this_many.append(stack.enter_context(Worker(replace(candidate, threads=threads))))
        workers = [worker for of_this_many in workers_of.values() for worker in of_this_many]
        for worker in workers:  # all load at the same time; their replies are read below
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
    """Pairs (threads, processes) whose product is at most `cores`; each number is a power of two or `cores` itself.

    On 2 cores: 1 x 1, 1 x 2 and 2 x 1.
    """
    sizes = sorted({1 << power for power in range(cores.bit_length())} | {cores})
    return [(threads, processes) for threads in sizes for processes in sizes if threads * processes <= cores]


class DrivenTurn(NamedTuple):
    """One worker's consecutive calls; moments in seconds of this process's clock."""

    began_s: Floats  # when each call began
    calls_ms: Floats  # how long each took
    ended_s: float


def at_once(workers: Sequence[Worker], workload: Workload, seconds: float) -> list[Floats]:
    """For each worker the times in ms of its calls while all were active (see `together_ms`), at least one.

    Each runs for `seconds`, which is doubled until every worker has such a call.
    """
    with ThreadPoolExecutor(len(workers)) as drivers:
        while True:
            take = partial(_take, workload=workload, seconds=seconds)
            kept = together_ms(list(drivers.map(take, workers)))
            if all(map(len, kept)):
                return kept
            seconds *= 2


def together_ms(turns: Sequence[DrivenTurn]) -> list[Floats]:
    """For each turn the times of the calls that began while all turns were active.

    Such a call counts even if it ended later: leaving it out would leave out slow calls more often than fast ones.
    """
    all_began_s = max(turn.began_s[0] for turn in turns)
    one_ended_s = min(turn.ended_s for turn in turns)
    return [turn.calls_ms[(turn.began_s >= all_began_s) & (turn.began_s < one_ended_s)] for turn in turns]


def _take(worker: Worker, workload: Workload, seconds: float) -> DrivenTurn:
    # At least two calls: the first may begin before all workers are active.
    calls_ms = np.array(worker.run(workload, seconds=seconds, least=2, most=NO_LIMIT)["samples_ms"])
    ended_s = time.perf_counter()
    # Timed calls are the last of a turn, without pause, so all their beginnings follow from the end.
    return DrivenTurn(ended_s - np.cumsum(calls_ms[::-1])[::-1] / 1000.0, calls_ms, ended_s)


def sweep_row(name: str, batch: int, way: Way, turns_ms: Sequence[Sequence[Floats]]) -> SweepRow:
    """The row of one combination, from its call times by turn and process."""
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
