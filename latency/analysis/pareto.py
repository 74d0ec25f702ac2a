"""Chooses candidates: the Pareto front of metric against latency, and the best that meets a latency budget."""

from collections.abc import Sequence
from typing import NamedTuple

from latency.measure.result_document import Budget


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


def within_budget(points: Sequence[Point], budget_ms: float, percentile: int) -> Budget:
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
    return Budget(
        budget_ms=budget_ms,
        percentile=percentile,
        best=best and best.name,
        nearest=nearest.name,
        nearest_ms=nearest.latency_ms,
        verdict="perhaps" if perhaps else "met" if best else "missed",
        sentence=sentence,
    )
