import numpy as np
import pytest

from latency.measure.statistics import Measurement, paired_ratio, process_ratio, ratio
from serve.errors import BadInput


def measured(name: str, turns: list[list[float]], **conditions: float) -> Measurement:
    samples_ms = tuple(sample for turn in turns for sample in turn)
    return Measurement(name, 2, 16, samples_ms, 5, dict(conditions), tuple(map(len, turns)))


def test_percentiles_and_rate_are_those_of_known_samples() -> None:
    measurement = measured("m", [[float(ms) for ms in range(1, 102)]])  # 1..101 ms
    assert list(measurement.percentiles_ms().values()) == pytest.approx([51.0, 91.0, 96.0, 100.0])
    assert measurement.texts_per_s == pytest.approx(2 * 1000 / 51)
    assert measurement.intervals_ms() == {}  # of a single turn


def test_a_steady_measurement_of_enough_samples_has_no_doubts() -> None:
    assert measured("m", [[10.0] * 50, [10.1] * 50], other_load_cores=0.02).doubts() == []


@pytest.mark.parametrize(
    ("turns", "load", "said"),
    [
        ([[10.0] * 20], 0.0, "p99 rests on 20 of the 100 samples that it needs"),
        ([[10.0, 12.0] * 60], 0.0, "wide spread"),
        ([[10.0] * 30, [14.0] * 5, [10.0] * 30, [14.0] * 5, [10.0] * 40], 0.0, "from 10 to 14 ms"),
        ([[10.0] * 20, [10.0] * 20, *[[11.0] * 60] * 4, [11.2] * 20, [11.2] * 20], 0.0, "drifted"),
        ([[10.0] * 100], 0.5, "other processes used 0.5 cores"),
    ],
)
def test_a_measurement_doubts_itself_for_each_reason_alone(turns: list[list[float]], load: float, said: str) -> None:
    doubts = measured("m", turns, other_load_cores=load).doubts()
    assert len(doubts) == 1
    assert said in doubts[0]


def test_texts_of_all_lengths_are_not_doubted_for_differing() -> None:
    mixed = Measurement("m", 1, None, (5.0, 9.0, 30.0) * 40, 5)
    assert mixed.doubts() == []
    stopped = Measurement("m", 1, None, (5.0, 9.0, 30.0) * 40, 5, {"stopped": "time"})
    assert stopped.doubts() == ["the time was up before its interval was as narrow as requested"]


def test_intervals_of_percentiles_cover_those_of_the_distribution_that_was_drawn_from() -> None:
    rng = np.random.default_rng(0)
    covered = {"p50": 0, "p90": 0}
    for _ in range(60):
        turns = [rng.exponential(size=40).tolist() for _ in range(30)]
        found = measured("m", turns).intervals_ms()
        for name, true in (("p50", np.log(2)), ("p90", np.log(10))):
            low, high = found[name]
            covered[name] += low <= true <= high
    assert all(48 <= count <= 60 for count in covered.values()), covered


def test_a_planted_ratio_is_found_with_an_interval_around_it() -> None:
    teacher = measured("teacher", [[40.0 + i, 41.0 + i, 42.0 + i] for i in range(7)])
    student = measured("student", [[10.0 + i / 4, 10.3 + i / 4] for i in range(7)])
    found = ratio(teacher, student)
    assert (found.a, found.b) == ("teacher", "student")
    assert found.ratio == pytest.approx(41 / 10.15, rel=0.01)
    assert 3.5 < found.low < found.ratio < found.high < 4.5


def test_a_slowdown_that_hits_both_in_the_same_turns_leaves_the_ratio_certain() -> None:
    moods = [1.0, 3.0, 1.5, 2.0, 1.0]
    found = ratio(
        measured("a", [[20.0 * mood] * 3 for mood in moods]), measured("b", [[10.0 * mood] * 3 for mood in moods])
    )
    assert (found.low, found.high) == pytest.approx((2.0, 2.0), rel=0.006)


def test_two_processes_that_agree_to_the_last_digit_say_nothing_of_half_a_percent() -> None:
    same = [np.array([10.0])] * 20
    found, low, high = process_ratio(same, same)
    assert (found, low * high) == pytest.approx((1.0, 1.0))
    assert np.log(high) == pytest.approx(1.959964 * 0.003)
    # Where turns disagree far more than processes do, these add next to nothing.
    rng = np.random.default_rng(3)
    a, b = (list(rng.lognormal(sigma=0.2, size=(15, 4))) for _ in "ab")
    assert process_ratio(a, b) == pytest.approx(paired_ratio(a, b), rel=1e-3)


def test_one_wild_turn_in_ten_moves_the_ratio_little() -> None:
    a = measured("a", [[10.0 + i / 100] * 3 for i in range(9)] + [[500.0] * 3])
    b = measured("b", [[10.0 + i / 70] * 3 for i in range(10)])
    assert ratio(a, b).ratio == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("pairs", [6, 9, 12, 25, 40, 61, 80])
def test_the_interval_of_a_ratio_ends_where_the_signed_rank_test_turns(pairs: int) -> None:
    # An independent reference: the p value of scipy's exact test, the hypothetical ratio put just inside and just outside.
    wilcoxon = pytest.importorskip("scipy.stats").wilcoxon
    logs = np.random.default_rng(pairs).normal(size=pairs)
    _, low, high = paired_ratio([np.array([x]) for x in np.exp(logs)], [np.array([1.0])] * pairs)
    method = "exact" if pairs <= 60 else "asymptotic"
    for end, outwards in ((np.log(low), -1), (np.log(high), 1)):
        inside, outside = (wilcoxon(logs - end - outwards * step, method=method).pvalue for step in (-1e-9, 1e-9))
        assert outside < 0.05 <= inside or (pairs > 60 and abs(outside - 0.05) < 0.003)


def test_equal_candidates_are_distinguishable_about_once_in_twenty_whatever_the_noise() -> None:
    rng = np.random.default_rng(1)
    claims = 0
    for _ in range(800):
        a, b = (np.exp(0.2 * rng.standard_t(2, size=(20, 1))) for _ in "ab")
        _, low, high = paired_ratio(list(a), list(b))
        claims += not low <= 1 <= high
    assert 20 <= claims <= 60  # 40 expected


def test_exchanging_the_two_inverts_the_ratio_and_few_pairs_give_their_whole_range() -> None:
    rng = np.random.default_rng(2)
    a, b = (list(rng.lognormal(size=(15, 4))) for _ in "ab")
    found, low, high = paired_ratio(a, b)
    assert paired_ratio(b, a) == pytest.approx((1 / found, 1 / high, 1 / low))
    few = paired_ratio([np.array([x]) for x in (1.0, 2.0, 4.0)], [np.array([1.0])] * 3)
    assert few == pytest.approx((2.0, 1.0, 4.0))


def test_measurements_without_samples_or_turns_that_fit_are_refused() -> None:
    a, b = measured("a", [[1.0], [2.0]]), measured("b", [[1.0, 2.0]])
    for use, named in (
        (lambda: Measurement("m", 1, 16, (), 0), "no samples"),
        (lambda: Measurement("m", 1, 16, (1.0, 2.0), 0, turn_sizes=(3,)), "3 samples"),
        (lambda: ratio(a, b), "taken together"),
        (lambda: ratio(a, Measurement("c", 1, 16, (1.0, 2.0), 0, turn_sizes=(1, 1))), "one workload"),
    ):
        with pytest.raises(BadInput, match=named):
            use()
