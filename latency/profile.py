"""Times candidates together: a grid of batch sizes and lengths, real texts from text to answer, and costs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from latency.candidates.candidate import Candidate, size_bytes
from latency.candidates.end_to_end import Text
from latency.measure.interleave import Progress, StoppingRule, Worker, Workload, from_texts, measure, start_workers
from latency.measure.machine import machine_facts
from latency.measure.statistics import Measurement, ratio
from latency.scenarios import offline, server, single_stream
from serve.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Shares of the given seconds; without candidates that read text the grid has all of them.
SHARES = (0.5, 0.35, 0.15)  # grid, single stream, offline


@dataclass(frozen=True)
class Plan:
    """What to measure, and for how long."""

    batches: tuple[int, ...] = (1, 8)
    """Rows per call."""
    lengths: tuple[int, ...] = (16, 128)
    """Tokens per row."""
    seconds: float = 60.0
    """Wall time for all measurements. One that is precise enough ends earlier; at least six turns are taken."""
    tight: float = 0.02
    """Relative half-width of the ratios' 95 % intervals at which a measurement ends."""
    bound_ms: float | None = None
    """Bound on p99 in the server scenario; None leaves the scenario out."""
    server_seconds: float = 15.0
    """Time per candidate for the server scenario, in addition to `seconds`."""
    operators: bool = False
    """Whether to measure operators of the graphs that onnxruntime runs."""


def time_grid(
    candidates: Sequence[Candidate],
    texts: Sequence[str],
    tokenizer: "Tokenizer",
    plan: Plan = Plan(),
    *,
    metrics: Mapping[str, float] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    machine: dict[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Times `candidates` on every batch size and length in tokens, and compares each with the first, the reference.

    `metrics` holds the task metric by candidate name; `machine` is read now if it is not given. `keep` gets the document
    after each timed workload. Raises BadInput for a metric of an unknown candidate, and what `start_workers` and `from_texts`
    raise.
    """
    names = [candidate.name for candidate in candidates]
    unknown = sorted(set(metrics or {}) - set(names))
    if unknown:
        raise BadInput(f"metrics were given for {', '.join(unknown)}; the candidates are {', '.join(names)}")
    machine = machine or machine_facts()  # before measuring, which would raise the load average
    document: dict[str, Any] = {"machine": machine, "candidates": [], "ratios": []}
    workloads = grid(texts, tokenizer, plan)
    with start_workers(candidates, workloads, progress=progress) as workers:
        clock = _Clock(progress, plan.seconds)
        for rows, ratios in _time_grid(workers, workloads, plan, plan.seconds, seed, clock):
            for row in rows:
                if metrics and row["name"] in metrics:
                    row["metric"] = metrics[row["name"]]
            document["candidates"] += rows
            document["ratios"] += ratios
            keep(document)
    return document


def grid(texts: Sequence[str], tokenizer: "Tokenizer", plan: Plan) -> list[Workload]:
    """A workload of real tokens for every batch size and length of `plan`."""
    return [from_texts(texts, tokenizer, batch, tokens) for batch in plan.batches for tokens in plan.lengths]


class Timed(NamedTuple):
    """The results so far of `time_all`."""

    candidates: list[dict[str, Any]]
    ratios: list[dict[str, Any]]
    models: dict[str, dict[str, Any]]  # by name


def time_all(
    workers: Mapping[str, Worker],
    workloads: Sequence[Workload],
    texts: int,
    plan: Plan,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    keep: Callable[[Timed], object] = lambda _: None,
) -> Timed:
    """Times the grid, and each candidate on the first `texts` texts: single stream, offline and server; adds costs.

    `keep` gets the results so far after each timed workload and scenario. `workers` are those of
    `latency.measure.interleave.start_workers`, which gave them the same `workloads` and the texts. The scenarios leave out
    candidates that cannot read text.
    """
    reading = {name: worker for name, worker in workers.items() if worker.candidate.reads and texts}
    shares = SHARES if reading else (1.0, 0.0, 0.0)
    grid_s, stream_s, offline_s = (share * plan.seconds for share in shares)
    server_s = len(reading) * plan.server_seconds if plan.bound_ms is not None else 0.0
    clock = _Clock(progress, plan.seconds + server_s)
    rows: dict[str, dict[str, Any]] = {
        name: {
            "name": name,
            "model": str(worker.candidate.path),
            "runtime": worker.candidate.runtime,
            "precision": worker.candidate.precision,
            "device": worker.candidate.device,
            "threads": worker.candidate.threads,
            "cost": {
                "cold_start_ms": round(worker.loaded["cold_start_ms"], 1),
                "load_ms": round(worker.loaded["load_ms"], 1),
                "first_answer_ms": round(worker.loaded["first_answer_ms"], 2),
                "size_bytes": size_bytes(worker.candidate),
            },
            "notes": [],
        }
        for name, worker in workers.items()
    }
    timed = Timed([], [], rows)
    for candidates, ratios in _time_grid(workers, workloads, plan, grid_s, seed, clock):
        timed.candidates.extend(candidates)
        timed.ratios.extend(ratios)
        keep(timed)
    if reading:
        patience = StoppingRule(stream_s, plan.tight)
        progress = clock.part("single stream", stream_s)
        streams = single_stream(reading, texts, patience=patience, seed=seed, progress=progress)
        for name, stream in streams.items():
            rows[name]["single_stream"] = stream
        keep(timed)
        slowest = min(stream["texts_per_s"] for stream in streams.values())
        patience = StoppingRule(offline_s, plan.tight)
        progress = clock.part("offline", offline_s)
        passes = offline(reading, texts, slowest, patience=patience, seed=seed, progress=progress)
        for name, each in passes.items():
            rows[name]["offline"] = each
        keep(timed)
        if plan.bound_ms is not None:
            for name, worker in reading.items():
                clock.part("server", plan.server_seconds)(0, 1, name)
                rate = passes[name]["texts_per_s"]
                seconds = plan.server_seconds
                rows[name]["server"] = server(worker, texts, rate, plan.bound_ms, seed=seed, seconds=seconds)
                keep(timed)
    for name, worker in workers.items():
        memory, cost = worker.ask("memory"), rows[name]["cost"]
        if memory["steady_bytes"] is not None:
            cost["memory_steady_bytes"] = memory["steady_bytes"]
        if memory["peak_bytes"] is not None:
            cost["memory_peak_bytes"] = memory["peak_bytes"]
        if plan.operators and worker.candidate.runtime == "onnxruntime" and worker.candidate.device == "cpu":
            found = worker.ask("operators", input_ids=workloads[0].input_ids[:1].tolist())
            if found["top"]:
                rows[name]["operators"] = found
    return timed


class _Clock:
    """Joins the progress of all parts into one: each part has a share of the seconds."""

    def __init__(self, progress: Progress | None, seconds: float) -> None:
        self._progress, self._whole_s, self._begun_s = progress, seconds, 0.0

    def part(self, what: str, seconds: float) -> Progress:
        """The progress of the next part, which takes about `seconds`."""
        begun_s = self._begun_s
        self._begun_s += seconds

        def shown(done: int, total: int, name: str) -> None:
            if self._progress:
                share = (begun_s + seconds * done / max(1, total)) / max(self._whole_s, 0.001)
                self._progress(min(99, int(100 * share)), 100, f"{what}: {name}")

        return shown


def work_of(texts: Sequence[Text], tokenizer: "Tokenizer", source: str) -> dict[str, Any]:
    """The lengths in tokens of the timed texts, pairs included."""
    lengths = [len(encoding) for encoding in tokenizer.encode_batch(list(texts))]
    percentiles = {f"p{percent}": float(np.percentile(lengths, percent)) for percent in (50, 90, 99)}
    return {
        "source": source,
        "texts": len(texts),
        "tokens_mean": round(float(np.mean(lengths)), 2),
        "tokens_percentiles": {**percentiles, "max": float(max(lengths))},
    }


def _time_grid(
    workers: Mapping[str, Worker],
    workloads: Sequence[Workload],
    plan: Plan,
    seconds: float,
    seed: int,
    clock: _Clock,
) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yields the rows and ratios of each workload after it is timed."""
    each_s = seconds / len(workloads)
    for workload in workloads:
        patience = StoppingRule(each_s, plan.tight)
        measured = measure(workers, workload, patience=patience, seed=seed, progress=clock.part(workload.name, each_s))
        rows = [_row(workers[each.candidate].candidate, each, seed) for each in measured]
        ratios = []
        for found in (ratio(measured[0], each) for each in measured[1:]):
            value, low, high = (round(share, 4) for share in found[2:])
            batch, tokens = workload.batch, workload.tokens
            ratios.append(
                {"a": found.a, "b": found.b, "ratio": value, "low": low, "high": high, "batch": batch, "tokens": tokens}
            )
        yield rows, ratios


def _row(candidate: Candidate, measured: Measurement, seed: int) -> dict[str, Any]:
    assert measured.tokens is not None
    return {
        "name": candidate.name,
        "runtime": candidate.runtime,
        "precision": candidate.precision,
        "device": candidate.device,
        "batch": measured.batch,
        "tokens": measured.tokens,
        **measured.percentiles_ms(),
        "intervals_ms": {
            name: [round(low, 4), round(high, 4)] for name, (low, high) in measured.intervals_ms(seed).items()
        },
        "texts_per_s": round(measured.texts_per_s, 1),
        "size_bytes": size_bytes(candidate),
        "doubts": measured.doubts(),
        "warmup": measured.warmup,
        "conditions": measured.conditions,
        "samples_ms": list(measured.samples_ms),
        "turn_sizes": list(measured.turn_sizes),
    }
