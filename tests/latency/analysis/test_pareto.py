"""Which candidate to take: the Pareto front as its definition says, and the budget's answer in words."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency.analysis.costs import Point, pareto_front, within_budget

# Few values, so that equals are common.
LATENCIES = st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0])
METRICS = st.sampled_from([None, 0.0, 0.5, 0.9, 0.95])
POINTS = st.lists(st.tuples(LATENCIES, METRICS), min_size=1, max_size=12).map(
    lambda drawn: [Point(f"model {i}", *each) for i, each in enumerate(drawn)]
)


def beats(one: Point, other: Point) -> bool:
    """At least as fast and as good, and better in one of the two."""
    assert one.metric is not None
    assert other.metric is not None
    no_worse = one.latency_ms <= other.latency_ms and one.metric >= other.metric
    return no_worse and one[1:] != other[1:]


def on_front(points: list[Point]) -> list[Point]:
    named = {point.name: point for point in points}
    return [named[name] for name in pareto_front(points)]


@given(POINTS)
def test_no_point_beats_one_of_the_front_which_runs_from_fast_to_slow_and_beats_or_equals_all_others(
    points: list[Point],
) -> None:
    known = [point for point in points if point.metric is not None]
    front = on_front(points)
    assert [point.latency_ms for point in front] == sorted({point.latency_ms for point in front})
    assert not any(beats(other, point) for point in front for other in known)
    assert all(any(beats(one, point) or one[1:] == point[1:] for one in front) for point in known)


@given(POINTS, LATENCIES, METRICS, st.integers(0, 12))
def test_a_point_that_is_beaten_changes_nothing(
    points: list[Point], slower_by_ms: float, metric: float | None, at: int
) -> None:
    for point in on_front(points):
        worse = Point("beaten", point.latency_ms + slower_by_ms, metric and min(metric, point.metric or 0.0))
        assert pareto_front([*points[:at], worse, *points[at:]]) == pareto_front(points)


@given(POINTS, st.randoms(use_true_random=False))
def test_the_order_in_which_points_are_given_decides_among_equals_alone(
    points: list[Point], chance: random.Random
) -> None:
    mixed = chance.sample(points, len(points))
    assert [point[1:] for point in on_front(mixed)] == [point[1:] for point in on_front(points)]
    for point in on_front(mixed):
        assert point == next(each for each in mixed if each[1:] == point[1:])


@given(POINTS, st.sampled_from([0.4, 1.0, 3.0, 10.0]))
def test_a_budget_is_met_by_the_best_that_keeps_it_or_by_none(points: list[Point], budget_ms: float) -> None:
    answer = within_budget(points, budget_ms, 99)
    named = {point.name: point for point in points}
    assert named[answer["nearest"]].latency_ms == answer["nearest_ms"] == min(point.latency_ms for point in points)
    meeting = [point for point in points if point.latency_ms <= budget_ms]
    assert (answer["best"] is None) is (not meeting)
    if answer["best"] is not None:
        best = named[answer["best"]]
        assert best in meeting
        assert (best.metric or 0.0) == max(point.metric or 0.0 for point in meeting)
        equals = [point for point in meeting if point.metric == best.metric]
        assert best.latency_ms == min(point.latency_ms for point in equals)


FAST, GOOD, BEST = Point("fast", 1.5, 0.8), Point("good", 4.0, 0.9), Point("best", 9.0, 0.95)


@pytest.mark.parametrize(
    ("points", "budget_ms", "best", "told"),
    [
        ([BEST, FAST, GOOD], 5.0, "good", ("good meets", "p99 of 5 ms", "with 4 ms", "0.9000")),
        (
            [BEST, FAST, GOOD],
            1.0,
            None,
            ("No candidate meets", "fast comes nearest with 1.5 ms", "0.5 ms (50%) too slow"),
        ),
        ([Point("slow", 3.0, None), Point("quick", 2.0, None)], 5.0, "quick", ("quick meets", "with 2 ms.")),
        ([GOOD, Point("equal", 3.0, 0.9)], 4.0, "equal", ("equal meets", "with 3 ms", "0.9000")),
    ],
    ids=["met", "missed", "without metric", "equal metrics"],
)
def test_the_budgets_answer_is_a_sentence(
    points: list[Point], budget_ms: float, best: str | None, told: tuple[str, ...]
) -> None:
    answer = within_budget(points, budget_ms, 99)
    assert answer["best"] == best
    assert [part for part in told if part not in answer["sentence"]] == []
    assert (answer["budget_ms"], answer["percentile"]) == (budget_ms, 99)


@pytest.mark.parametrize(
    ("point", "verdict", "doubt"),
    [
        (Point("a", 4.0, 0.9, 3.5, 4.5), "met", None),
        (Point("a", 4.0, 0.9, 3.5, 6.25), "perhaps", "6.25 ms"),
        (Point("a", 5.5, 0.9, 4.75, 6.25), "perhaps", "4.75 ms"),
        (Point("a", 5.5, 0.9, 5.25, 6.25), "missed", None),
        (Point("a", 5.5, 0.9), "missed", None),
    ],
    ids=["met", "perhaps met", "perhaps missed", "missed", "missed without an interval"],
)
def test_a_budget_that_the_interval_crosses_is_perhaps_met(point: Point, verdict: str, doubt: str | None) -> None:
    answer = within_budget([point], 5.0, 99)
    assert answer["verdict"] == verdict
    assert ("not certain" in answer["sentence"]) is (doubt is not None)
    assert doubt is None or doubt in answer["sentence"]
