"""MLPerf's scenarios on real text, from text to answer: single stream, offline and server.

MLPerf Inference (Reddi et al. 2020, section 4.2): single stream is the latency of one query after another; offline is the
throughput on all queries at once; server is the highest rate of Poisson arrivals whose tail latency stays within a bound.
"""

from collections.abc import Mapping

import numpy as np

from latency.load.arrivals import highest_rate, late_allowed, poisson_s
from latency.measure.interleave import Log, Patience, Progress, Worker, measurement_of, take_turns
from latency.measure.result_document import Offline, Server, SingleStream, Trial
from latency.measure.statistics import Measurement, paired_ratio, ratio
from latency.measure.worker import OfflineTurn, StreamTurn

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


def single_stream(
    workers: Mapping[str, Worker],
    texts: int,
    *,
    patience: Patience,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, SingleStream]:
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

    def take(worker: Worker, turn: int) -> StreamTurn:
        return worker.stream(chosen(turn), passes[worker.candidate.name])

    logs, stopped = take_turns(workers, take, lambda each: each["samples_ms"], patience, seed, progress)
    measured = {name: measurement_of(workers[name], log, stopped, batch=1, tokens=None) for name, log in logs.items()}
    first = next(iter(measured.values()))
    return {name: _stream_row(logs[name], each, first, seed) for name, each in measured.items()}


def _stream_row(log: Log[StreamTurn], measured: Measurement, first: Measurement, seed: int) -> SingleStream:
    samples = [sample for turn in log.turns for sample in turn["samples"]]
    parts_ms = np.median(np.array(samples)[:, 1:], axis=0)
    row = SingleStream(
        p50_ms=round(measured.p50_ms, 4),
        p90_ms=round(measured.p90_ms, 4),
        p95_ms=round(measured.p95_ms, 4),
        p99_ms=round(measured.p99_ms, 4),
        intervals_ms=measured.intervals_ms(seed),
        texts_per_s=round(1000 / float(np.mean(measured.samples_ms)), 1),
        parts_ms={name: round(float(ms), 4) for name, ms in zip(PARTS, parts_ms, strict=True)},
        doubts=measured.doubts(),
        conditions=measured.conditions,
        samples=samples,
        turn_sizes=list(measured.turn_sizes),
    )
    if measured is not first:
        row["over_first"] = [round(x, 4) for x in ratio(first, measured)[2:]]
    return row


def offline(
    workers: Mapping[str, Worker],
    texts: int,
    slowest_texts_per_s: float,
    *,
    patience: Patience,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Offline]:
    """The throughput of each candidate on all texts at once, in alternating turns of one pass each.

    All get the same texts: as many as the slowest answers in `OFFLINE_PASS_S`, by its single-stream rate, at least 64.
    """
    count = int(min(texts, max(OFFLINE_LEAST_TEXTS, OFFLINE_PASS_S * slowest_texts_per_s)))
    budgets = {}
    for name, worker in workers.items():
        # The second of two passes counts, since the first call of a new shape is slower.
        tried = [[worker.offline(count, tokens) for _ in range(2)][1]["wall_s"] for tokens in BATCH_TOKENS]
        budgets[name] = BATCH_TOKENS[int(np.argmin(tried))]

    def take(worker: Worker, _turn: int) -> OfflineTurn:
        return worker.offline(count, budgets[worker.candidate.name])

    logs, _ = take_turns(workers, take, lambda each: [1e3 * each["wall_s"]], patience, seed, progress)
    return {name: _offline_row(log, count, budgets[name]) for name, log in logs.items()}


def _offline_row(log: Log[OfflineTurn], texts: int, batch_tokens: int) -> Offline:
    passes_s = np.array([turn["wall_s"] for turn in log.turns])
    tokens, padded = log.turns[0]["tokens"], log.turns[0]["padded_tokens"]
    rate, low, high = paired_ratio([np.array([texts])] * len(passes_s), [np.array([x]) for x in passes_s])
    row = Offline(
        texts=texts,
        texts_per_s=round(rate, 1),
        interval=[round(low, 1), round(high, 1)],
        tokens_per_s=round(tokens * rate / texts, 1),
        padding_share=round(1 - tokens / padded, 4),
        batch_tokens=batch_tokens,
        passes_s=[round(float(x), 5) for x in passes_s],
    )
    if log.joules is not None:
        row["joules_per_text"] = round(log.joules / (texts * len(passes_s)), 6)
    return row


def server(
    worker: Worker, texts: int, offline_texts_per_s: float, bound_ms: float, *, seed: int = 0, seconds: float = 20.0
) -> Server:
    """The highest rate of arrivals at which the candidate's p99 stays within `bound_ms`, and every rate that was tried.

    One process answers, and batches waiting texts. A trial lasts a seventh of `seconds`, or longer to reach 100 queries (20
    for a slow model), and ends as soon as its p99 cannot stay within the bound. The search is between 0.1 and 1.2 times the
    offline rate. Candidates do not alternate here, so only large differences between their rates mean something.
    """
    trials: list[Trial] = []
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
        trials.append(
            Trial(
                rate_per_s=round(rate_per_s, 2),
                queries=len(turn["latencies_ms"]),
                p50_ms=round(float(p50_ms), 4),
                p99_ms=round(float(p99_ms), 4),
                held=bool(p99_ms <= bound_ms and not turn["cut_short"]),
                latencies_ms=turn["latencies_ms"],
            )
        )
        return trials[-1]["held"]

    found = highest_rate(holds, SOUGHT[0] * offline_texts_per_s, SOUGHT[1] * offline_texts_per_s)
    return Server(bound_ms=bound_ms, rate_per_s=round(found, 2), trials=trials)


def trial_queries(rate_per_s: float, seconds: float) -> int:
    """The number of queries of a trial of about `seconds`: enough for a p99 unless that takes longer than `TRIAL_S`."""
    fewest, most = SERVER_QUERIES
    fewest = max(LEAST_QUERIES, min(fewest, int(TRIAL_S * rate_per_s)))
    return min(most, max(fewest, int(seconds * rate_per_s)))
