"""The costs of a model: operations and bytes relative to the machine's peaks, energy and money."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from latency.analysis.roofline import flops_per_text, parameters, weights_read_bytes
from latency.candidates.candidate import Candidate
from serve.errors import BadInput

SECONDS_AN_HOUR = 3600
PEAKS = {"fp32": "fp32_gflop_per_s", "bf16": "bf16_gflop_per_s", "int8": "int8_gflop_per_s"}


def add_costs(
    models: Mapping[str, dict[str, Any]],
    candidates: Sequence[Candidate],
    work: dict[str, Any],
    peaks: dict[str, Any],
    price_per_core_hour: float | None = None,
) -> None:
    """Adds the costs that follow from speed and size to each of `models`; an unknown one stays absent.

    Operations are those of a text of the mean length. The bytes of a text are the weights, read once: the least that a call
    moves. A bandwidth share above 1 means that the weights came from a cache.
    """
    for candidate in candidates:
        row = models[candidate.name]
        cost = row["cost"]
        _add_size(cost, candidate, round(work["tokens_mean"]), row["notes"])
        stream, offline = row.get("single_stream"), row.get("offline")
        bandwidth = peaks.get("bandwidth_gb_per_s")
        if stream and bandwidth and "bytes_per_text" in cost and candidate.device == "cpu":
            seconds = stream["parts_ms"]["run"] / 1e3
            cost["bandwidth_share"] = round(cost["bytes_per_text"] / seconds / 1e9 / bandwidth, 4)
        if not offline:
            continue
        texts_per_hour = SECONDS_AN_HOUR * offline["texts_per_s"]
        cost["texts_per_hour"] = round(texts_per_hour)
        if price_per_core_hour is not None and candidate.device == "cpu":
            cost["price_per_million"] = round(1e6 / texts_per_hour * price_per_core_hour * candidate.threads, 6)
        if "joules_per_text" in offline:
            cost["joules_per_text"] = offline["joules_per_text"]
        if "flops_per_text" in cost:
            reached = cost["flops_per_text"] * offline["texts_per_s"] / 1e9
            cost["gflop_per_s"] = round(reached, 3)
            peak = peaks.get(PEAKS.get(candidate.precision, ""))
            if isinstance(peak, float) and candidate.device == "cpu":
                cost["peak_share"] = round(reached / peak, 4)


def _add_size(cost: dict[str, Any], candidate: Candidate, tokens: int, notes: list[str]) -> None:
    count = parameters(candidate.path)
    if count is not None:
        cost["parameters"] = count
    read_bytes = weights_read_bytes(candidate.path, tokens)
    if read_bytes is not None:
        cost["bytes_per_text"] = float(read_bytes)
    reads = candidate.reads
    if reads is None or not (reads.folder / "config.json").is_file():  # a bundle need not have one
        return
    config = json.loads((reads.folder / "config.json").read_text(encoding="utf-8"))
    try:
        cost["flops_per_text"] = flops_per_text(config, tokens, labels=len(reads.labels))
    except BadInput as error:
        notes.append(f"The operations were not counted: {error.message}.")


class Point(NamedTuple):
    """Latency and metric of one candidate."""

    name: str
    latency_ms: float
    metric: float | None
    low_ms: float | None = None  # ends of the latency's interval
    high_ms: float | None = None


def pareto_front(points: Sequence[Point]) -> list[str]:
    """The names on the Pareto front, fastest first: every slower candidate on it has a better metric.

    Of candidates equal in both, the first one given is kept. Candidates without a metric are left out.
    """
    known = [point for point in points if point.metric is not None]
    best, front = float("-inf"), []
    for point in sorted(known, key=lambda each: (each.latency_ms, -(each.metric or 0.0))):
        assert point.metric is not None
        if point.metric > best:
            best = point.metric
            front.append(point.name)
    return front


def within_budget(points: Sequence[Point], budget_ms: float, percentile: int) -> dict[str, Any]:
    """The candidate with the best metric whose latency, at `percentile`, meets the budget; without metrics the fastest.

    Of equal metrics, the faster one. If none meets the budget, the sentence names the fastest and by how much it missed.
    If the interval of the named candidate crosses the budget, the verdict is "perhaps".
    """
    nearest = min(points, key=lambda point: point.latency_ms)
    meeting = [point for point in points if point.latency_ms <= budget_ms]
    best = max(meeting, key=lambda point: (point.metric or 0.0, -point.latency_ms)) if meeting else None
    what = f"p{percentile} of {budget_ms:g} ms"
    if best is None:
        missed_ms = nearest.latency_ms - budget_ms
        sentence = (
            f"No candidate meets the budget, {what}: {nearest.name} comes nearest with {nearest.latency_ms:.3g} ms, "
            f"{missed_ms:.3g} ms ({missed_ms / budget_ms:.0%}) too slow."
        )
        perhaps = nearest.low_ms is not None and nearest.low_ms <= budget_ms
        if perhaps:
            sentence += f" That is not certain: the interval begins at {nearest.low_ms:.3g} ms."
    else:
        reached = "" if best.metric is None else f" and the best metric of those that do, {best.metric:.4f}"
        sentence = f"{best.name} meets the budget, {what}, with {best.latency_ms:.3g} ms{reached}."
        perhaps = best.high_ms is not None and best.high_ms > budget_ms
        if perhaps:
            sentence += f" That is not certain: the interval reaches {best.high_ms:.3g} ms."
    return {
        "budget_ms": budget_ms,
        "percentile": percentile,
        "best": best and best.name,
        "nearest": nearest.name,
        "nearest_ms": nearest.latency_ms,
        "verdict": "perhaps" if perhaps else "met" if best else "missed",
        "sentence": sentence,
    }
