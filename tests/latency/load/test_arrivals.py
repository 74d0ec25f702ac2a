import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latency.load.driver import highest_rate, poisson_s
from serve.errors import BadInput


def most_trials(low: float, high: float, tolerance: float) -> float:
    return 2 * (2 + math.log2(high / low) + math.log2(math.log(2) / math.log(1 + tolerance)))


def test_gaps_have_the_mean_the_spread_and_the_independence_of_a_poisson_process() -> None:
    gaps_s = np.diff(poisson_s(50.0, 100_000, seed=3), prepend=0.0)

    assert (gaps_s > 0).all()
    assert gaps_s.mean() == pytest.approx(1 / 50, rel=0.02)
    assert gaps_s.var() == pytest.approx(1 / 50**2, rel=0.04)  # of an exponential distribution: the square of its mean
    assert abs(np.corrcoef(gaps_s[1:], gaps_s[:-1])[0, 1]) < 0.02
    in_each_second = np.bincount(np.cumsum(gaps_s).astype(int))[:-1]
    assert in_each_second.var() == pytest.approx(in_each_second.mean(), rel=0.1)


def test_a_seed_is_one_pattern_that_a_rate_only_hastens() -> None:
    slow = poisson_s(10.0, 1000, seed=1)

    assert np.array_equal(slow, poisson_s(10.0, 1000, seed=1))
    assert not np.array_equal(slow, poisson_s(10.0, 1000, seed=2))
    np.testing.assert_allclose(poisson_s(40.0, 1000, seed=1), slow / 4)


@pytest.mark.parametrize(("rate", "queries"), [(0.0, 5), (-1.0, 5), (math.inf, 5), (math.nan, 5), (5.0, 0)])
def test_rates_and_counts_that_mean_nothing_are_refused(rate: float, queries: int) -> None:
    with pytest.raises(BadInput, match="both must be above 0"):
        poisson_s(rate, queries, seed=0)


@settings(max_examples=200, deadline=None)
@given(capacity=st.floats(0.5, 3000), low=st.floats(0.5, 100), span=st.floats(1, 1000), tolerance=st.floats(0.01, 0.5))
def test_the_capacity_is_found_to_within_the_tolerance(
    capacity: float, low: float, span: float, tolerance: float
) -> None:
    high = low * span
    found = highest_rate(lambda rate: rate <= capacity, low, high, tolerance)

    if capacity < low:
        assert found == 0.0
    elif capacity >= high:
        assert found == high
    else:
        assert found <= capacity <= found * (1 + tolerance) * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), tolerance=st.floats(0.01, 0.5))
def test_the_search_ends_and_returns_what_held_however_noisy_the_trials(seed: int, tolerance: float) -> None:
    chance = np.random.default_rng(seed)
    tried: list[tuple[float, bool]] = []

    def coin(rate: float) -> bool:
        tried.append((rate, bool(chance.random() < 0.5)))
        return tried[-1][1]

    found = highest_rate(coin, 1.0, 500.0, tolerance)

    assert len(tried) <= most_trials(1.0, 500.0, tolerance) + 1e-6
    assert all(1.0 <= rate <= 500.0 for rate, _ in tried)
    assert found == max((rate for rate, held in tried if held), default=0.0)


def test_a_burst_that_fails_one_trial_does_not_lower_the_answer() -> None:
    def disturbed(bursts: set[int]) -> Callable[[float], bool]:
        trials = iter(range(1000))
        return lambda rate: rate <= 300 and next(trials) not in bursts

    calm = highest_rate(disturbed(set()), 1.0, 4000.0)
    for burst in range(12):
        assert highest_rate(disturbed({burst}), 1.0, 4000.0) == calm


@pytest.mark.parametrize(
    ("low", "high", "tolerance"), [(0.0, 1.0, 0.1), (2.0, 1.0, 0.1), (1.0, math.inf, 0.1), (1.0, 2.0, 0.0)]
)
def test_bounds_that_mean_nothing_are_refused(low: float, high: float, tolerance: float) -> None:
    with pytest.raises(BadInput, match="0 < lowest <= highest < infinity"):
        highest_rate(lambda rate: True, low, high, tolerance)
