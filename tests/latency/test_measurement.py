import json

import pytest

from latency.measurement import Measurement, ratio
from serve.errors import BadInput


def measured(name: str, turns: list[list[float]], **conditions: float) -> Measurement:
    samples_ms = tuple(sample for turn in turns for sample in turn)
    return Measurement(name, 2, 16, samples_ms, 5, dict(conditions), tuple(map(len, turns)))


def test_percentiles_and_rate_are_those_of_known_samples() -> None:
    measurement = measured("m", [[float(ms) for ms in range(1, 102)]])  # 1..101 ms
    assert (measurement.p50_ms, measurement.p90_ms, measurement.p99_ms) == pytest.approx((51.0, 91.0, 100.0))
    assert measurement.texts_per_s == pytest.approx(2 * 1000 / 51)


def test_a_steady_measurement_of_enough_samples_has_no_doubts() -> None:
    assert measured("m", [[10.0] * 50, [10.1] * 50], other_load_cores=0.02).doubts() == []


@pytest.mark.parametrize(
    ("turns", "load", "said"),
    [
        ([[10.0] * 20], 0.0, "p99 rests on 20 samples"),
        ([[10.0, 12.0] * 60], 0.0, "wide spread"),
        ([[10.0] * 90, [14.0] * 10], 0.0, "turns disagree: their medians run from 10 to 14 ms"),
        ([[10.0] * 100], 0.5, "something else used 0.5 cores"),
    ],
)
def test_a_measurement_doubts_itself_for_each_reason_alone(turns: list[list[float]], load: float, said: str) -> None:
    doubts = measured("m", turns, other_load_cores=load).doubts()
    assert len(doubts) == 1
    assert said in doubts[0]


def test_json_brings_back_the_same_measurement() -> None:
    measurement = measured("m", [[1.25, 2.5], [3.0]], threads=2)
    assert Measurement.from_json(json.loads(json.dumps(measurement.to_json()))) == measurement


def test_json_without_samples_is_named_as_such() -> None:
    document = measured("m", [[1.0]]).to_json()
    del document["samples_ms"]  # type: ignore[misc]
    with pytest.raises(BadInput, match="without samples_ms"):
        Measurement.from_json(document)


def test_no_samples_and_turns_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(BadInput, match="has no samples"):
        Measurement("m", 1, 16, (), 0)
    with pytest.raises(BadInput, match="hold 3 samples; they must add up to the 2"):
        Measurement("m", 1, 16, (1.0, 2.0), 0, turn_sizes=(3,))


def test_a_planted_ratio_is_found_with_an_interval_around_it() -> None:
    teacher = measured("teacher", [[40.0 + i, 41.0 + i, 42.0 + i] for i in range(6)])
    student = measured("student", [[10.0 + i / 4, 10.3 + i / 4] for i in range(6)])
    found = ratio(teacher, student)
    assert (found.a, found.b) == ("teacher", "student")
    assert found.ratio == teacher.p50_ms / student.p50_ms
    assert 3.5 < found.low < found.ratio < found.high < 4.5


def test_a_slowdown_that_hits_both_in_the_same_turns_leaves_the_ratio_certain() -> None:
    moods = [1.0, 3.0, 1.5, 2.0, 1.0]
    found = ratio(
        measured("a", [[20.0 * mood] * 3 for mood in moods]), measured("b", [[10.0 * mood] * 3 for mood in moods])
    )
    assert (found.low, found.high) == pytest.approx((2.0, 2.0))


def test_unequal_numbers_of_turns_are_drawn_apart_and_the_interval_shows_it() -> None:
    moods = [1.0, 3.0, 1.5, 2.0, 1.0]
    found = ratio(
        measured("a", [[20.0 * mood] * 3 for mood in moods]), measured("b", [[10.0 * mood] * 3 for mood in moods[:4]])
    )
    assert found.low < found.ratio < found.high


def test_the_interval_depends_on_the_seed_alone() -> None:
    a, b = measured("a", [[1.0], [2.0], [4.0]]), measured("b", [[1.0], [3.0], [2.0]])
    assert ratio(a, b, seed=3) == ratio(a, b, seed=3)


def test_a_ratio_needs_one_workload_and_two_turns() -> None:
    a, b = measured("a", [[1.0], [2.0]]), measured("b", [[1.0, 2.0]])
    with pytest.raises(BadInput, match="'b' has 1; an interval needs at least 2"):
        ratio(a, b)
    with pytest.raises(BadInput, match="a ratio needs one workload for both"):
        ratio(a, Measurement("c", 1, 16, (1.0, 2.0), 0, turn_sizes=(1, 1)))
