"""MLPerf's scenarios on real text, from text to answer: single stream, offline and server; and a sweep over threads and processes.

MLPerf Inference (Reddi et al. 2020, section 4.2): single stream is the latency of one query after another; offline is the
throughput on all queries at once; server is the highest rate of Poisson arrivals whose tail latency stays within a bound.
The sweep times one model on rows of token ids with different numbers of threads and of parallel processes on the same cores.
"""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from latency.candidates.candidate import Candidate
from latency.load.driver import highest_rate, late_allowed, poisson_s
from latency.measure.interleave import Progress, StoppingRule, Worker, Workload, interleave_turns, measurement_of
from latency.measure.statistics import Measurement, paired_ratio, ratio
from serve.errors import BadInput

PARTS = ("tokenise", "run", "decode")
TEXTS_PER_TURN = 8
OFFLINE_PASS_S = 3.0  # longest pass over the texts of the slowest candidate; all candidates get the same texts
OFFLINE_LEAST_TEXTS = 64
BATCH_TOKENS = (256, 1024, 4096)  # token budgets of a batch; each candidate gets its fastest
SERVER_TRIALS = 7  # of one candidate, about
SERVER_QUERIES = (100, 4000)  # of a trial, at least and at most
TRIAL_S = 30.0  # a model that needs longer for the least number of queries gets fewer,
LEAST_QUERIES = 20  # but never fewer than these
TAKEN_TOGETHER = 32  # largest batch of waiting texts, as in a server that batches
SOUGHT = (0.1, 1.2)  # the search range, as shares of the offline rate
NO_LIMIT = 10**9  # calls of one turn of a sweep

Floats = npt.NDArray[np.float64]
Way = tuple[int, int]  # threads of each process, processes


def single_stream(
    workers: Mapping[str, Worker],
    texts: int,
    *,
    patience: StoppingRule,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, dict[str, Any]]:
    """Times each candidate from text to answer, one text at a time, in an order drawn from `seed`.

    In a turn every candidate gets the same few texts, so the lengths are equal. The turns go through all texts.
    """
    order = np.random.default_rng(seed).permutation(texts)

    def chosen(turn: int) -> list[int]:
        first = turn * TEXTS_PER_TURN
        return [int(order[i % texts]) for i in range(first, first + min(texts, TEXTS_PER_TURN))]

    passes = {}
    for name, worker in workers.items():
        pass_ms = sum(worker.stream(chosen(0), 1)["samples_ms"])
        passes[name] = max(1, round(1e3 * patience.turn_seconds / pass_ms))

    def take(worker: Worker, turn: int) -> Any:
        return worker.stream(chosen(turn), passes[worker.candidate.name])

    logs, stopped = interleave_turns(workers, take, lambda each: each["samples_ms"], patience, seed, progress)
    rows: dict[str, dict[str, Any]] = {}
    first: Measurement | None = None
    for name, log in logs.items():
        measured = measurement_of(workers[name], log, stopped, batch=1, tokens=None)
        samples = [sample for turn in log.turns for sample in turn["samples"]]
        parts_ms = np.median(np.array(samples)[:, 1:], axis=0)
        rows[name] = {
            **measured.percentiles_ms(),
            "intervals_ms": measured.intervals_ms(seed),
            "texts_per_s": round(1000 / float(np.mean(measured.samples_ms)), 1),
            "parts_ms": {part: round(float(ms), 4) for part, ms in zip(PARTS, parts_ms, strict=True)},
            "doubts": measured.doubts(),
            "conditions": measured.conditions,
            "samples": samples,
            "turn_sizes": list(measured.turn_sizes),
        }
        if first:
            rows[name]["over_first"] = [round(x, 4) for x in ratio(first, measured)[2:]]
        first = first or measured
    return rows


def offline(
    workers: Mapping[str, Worker],
    texts: int,
    slowest_texts_per_s: float,
    *,
    patience: StoppingRule,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, dict[str, Any]]:
    """The throughput of each candidate on all texts at once, in alternating turns of one pass each.

    All get the same texts: as many as the slowest answers in `OFFLINE_PASS_S`, by its single-stream rate, at least 64.
    """
    count = int(min(texts, max(OFFLINE_LEAST_TEXTS, OFFLINE_PASS_S * slowest_texts_per_s)))
    budgets = {}
    for name, worker in workers.items():
        # The second of two passes counts, since the first call of a new shape is slower.
        tried = [[worker.offline(count, tokens) for _ in range(2)][1]["wall_s"] for tokens in BATCH_TOKENS]
        budgets[name] = BATCH_TOKENS[int(np.argmin(tried))]

    def take(worker: Worker, _turn: int) -> Any:
        return worker.offline(count, budgets[worker.candidate.name])

    logs, _ = interleave_turns(workers, take, lambda each: [1e3 * each["wall_s"]], patience, seed, progress)
    rows: dict[str, dict[str, Any]] = {}
    for name, log in logs.items():
        passes_s = np.array([turn["wall_s"] for turn in log.turns])
        tokens, padded = log.turns[0]["tokens"], log.turns[0]["padded_tokens"]
        rate, low, high = paired_ratio([np.array([count])] * len(passes_s), [np.array([x]) for x in passes_s])
        rows[name] = {
            "texts": count,
            "texts_per_s": round(rate, 1),
            "interval": [round(low, 1), round(high, 1)],
            "tokens_per_s": round(tokens * rate / count, 1),
            "padding_share": round(1 - tokens / padded, 4),
            "batch_tokens": budgets[name],
            "passes_s": [round(float(x), 5) for x in passes_s],
        }
        if log.joules is not None:
            rows[name]["joules_per_text"] = round(log.joules / (count * len(passes_s)), 6)
    return rows


def server(
    worker: Worker, texts: int, offline_texts_per_s: float, bound_ms: float, *, seed: int = 0, seconds: float = 20.0
) -> dict[str, Any]:
    """The highest rate of arrivals at which the candidate's p99 stays within `bound_ms`, and every rate that was tried.

    One process answers, and batches waiting texts. A trial lasts a seventh of `seconds`, or longer to reach 100 queries (20
    for a slow model), and ends as soon as its p99 cannot stay within the bound. The search is between 0.1 and 1.2 times the
    offline rate. Candidates do not alternate here, so only large differences between their rates mean something.
    """
    trials: list[dict[str, Any]] = []
    rng = np.random.default_rng(seed)

    def holds(rate_per_s: float) -> bool:
        queries = trial_queries(rate_per_s, seconds / SERVER_TRIALS)
        at_s = poisson_s(rate_per_s, queries, int(rng.integers(2**31)))
        turn = worker.serve(
            at_s.tolist(),
            rng.integers(texts, size=queries).tolist(),
            most=TAKEN_TOGETHER,
            bound_s=bound_ms / 1e3,
            late_allowed=late_allowed(queries),
        )
        p50_ms, p99_ms = np.percentile(turn["latencies_ms"], [50, 99])
        held = bool(p99_ms <= bound_ms and not turn["cut_short"])
        trials.append(
            {
                "rate_per_s": round(rate_per_s, 2),
                "queries": len(turn["latencies_ms"]),
                "p50_ms": round(float(p50_ms), 4),
                "p99_ms": round(float(p99_ms), 4),
                "held": held,
                "latencies_ms": turn["latencies_ms"],
            }
        )
        return held

    found = highest_rate(holds, SOUGHT[0] * offline_texts_per_s, SOUGHT[1] * offline_texts_per_s)
    return {"bound_ms": bound_ms, "rate_per_s": round(found, 2), "trials": trials}


def trial_queries(rate_per_s: float, seconds: float) -> int:
    """The number of queries of a trial of about `seconds`: enough for a p99 unless that takes longer than `TRIAL_S`."""
    fewest, most = SERVER_QUERIES
    fewest = max(LEAST_QUERIES, min(fewest, int(TRIAL_S * rate_per_s)))
    return min(most, max(fewest, int(seconds * rate_per_s)))


def sweep(
    candidate: Candidate,
    workload: Workload,
    *,
    cores: int,
    seconds: float,
    turns: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
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


def sweep_row(name: str, batch: int, way: Way, turns_ms: Sequence[Sequence[Floats]]) -> dict[str, Any]:
    """The row of one combination, from its call times by turn and process."""
    threads, processes = way
    by_process_ms = [np.concatenate(turns) for turns in zip(*turns_ms, strict=True)]
    p50_ms, p99_ms = np.percentile(np.concatenate(by_process_ms), [50, 99])
    return {
        "name": name,
        "threads": threads,
        "processes": processes,
        "p50_ms": round(float(p50_ms), 4),
        "p99_ms": round(float(p99_ms), 4),
        "texts_per_s": round(sum(batch * 1000.0 / float(calls_ms.mean()) for calls_ms in by_process_ms), 1),
    }
