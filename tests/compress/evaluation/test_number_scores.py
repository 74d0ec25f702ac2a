"""Scores of numbers, against scipy and scikit-learn."""

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import mean_squared_error

from compress.evaluation.numbers import PEARSON, distinguishable, number_scores


def drawn(generator: np.random.Generator) -> tuple[list[float], list[float]]:
    """Correct and predicted numbers of 2 to 80 texts, of any size and far from 0, with ties, with and without a relation."""
    texts = int(generator.integers(2, 80))
    x = generator.integers(0, generator.integers(2, 40), texts).astype(float)
    x[0] = x[1] + 1  # they vary
    y = x * generator.normal() + generator.normal(size=texts) * generator.choice([0.1, 3.0])
    scale, shift = 10.0 ** generator.integers(-6, 7), generator.choice([0.0, 1e6])
    return (scale * x + shift).tolist(), (y + shift).tolist()


def test_pearson_spearman_and_squared_error_are_those_of_scipy_and_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    for case in range(300):
        gold, said = drawn(generator)
        of_all = PEARSON.counts(gold, said).sum(axis=0)
        assert float(PEARSON.of(of_all)) == pytest.approx(pearsonr(gold, said).statistic, abs=1e-6)
        if case % 50 == 0:  # each draws 2,000 resamples
            found = number_scores(gold, said)
            assert found["spearman"].value == pytest.approx(spearmanr(gold, said).statistic, abs=1e-9)
            assert found["mean_squared_error"].value == pytest.approx(mean_squared_error(gold, said))


def test_intervals_are_those_of_texts_drawn_again_and_scored_by_scipy() -> None:
    generator = np.random.default_rng(1)
    gold = generator.integers(0, 6, 60).astype(float)
    said = gold + generator.normal(size=60)
    again = [generator.integers(0, 60, 60) for _ in range(2000)]
    theirs = np.quantile([spearmanr(gold[chosen], said[chosen]).statistic for chosen in again], (0.025, 0.975))
    ours = number_scores(gold.tolist(), said.tolist())["spearman"]
    assert [ours.low, ours.high] == pytest.approx(theirs.tolist(), abs=0.03)
    of_pearson = PEARSON.score(gold.tolist(), said.tolist())
    theirs = np.quantile([pearsonr(gold[chosen], said[chosen]).statistic for chosen in again], (0.025, 0.975))
    assert [of_pearson.low, of_pearson.high] == pytest.approx(theirs.tolist(), abs=0.03)
    assert of_pearson.low < of_pearson.value < of_pearson.high


@pytest.mark.parametrize("same", [0.0, 0.1, 1e9 / 3])
def test_one_number_throughout_scores_nothing_and_never_not_a_number(same: float) -> None:
    gold = [float(number) for number in range(50)]
    for right, said in ((gold, [same] * 50), ([same] * 50, gold), ([same] * 50, [same] * 50)):
        reached = PEARSON.score(right, said)
        assert (reached.value, reached.low, reached.high) == (0, 0, 0)
        assert number_scores(right, said)["spearman"].value == 0
    assert PEARSON.score([1.0], [2.0]).value == 0
    assert PEARSON.per_label(gold, gold) == {}


def test_what_does_not_change_an_order_changes_no_rank_and_a_scale_changes_no_correlation() -> None:
    generator = np.random.default_rng(2)
    gold, said = generator.normal(size=200), generator.normal(size=200)
    as_they_are, cubed = (number_scores(gold.tolist(), each.tolist())["spearman"] for each in (said, said**3))
    assert as_they_are == cubed
    assert PEARSON.score(gold.tolist(), (7 - 3 * said).tolist()).value == pytest.approx(
        -PEARSON.score(gold.tolist(), said.tolist()).value
    )
    order = generator.permutation(200)
    assert PEARSON.score(gold[order].tolist(), said[order].tolist()).value == pytest.approx(
        PEARSON.score(gold.tolist(), said.tolist()).value
    )


def test_differences_and_means_of_trainings_are_of_the_same_texts() -> None:
    generator = np.random.default_rng(3)
    gold = generator.normal(size=400)
    near, far = (gold + noise * generator.normal(size=400) for noise in (0.1, 1.0))
    apart = PEARSON.difference(gold.tolist(), near.tolist(), far.tolist())
    assert apart.low > 0
    rows = [PEARSON.counts(gold.tolist(), each.tolist()) for each in (near, far)]
    assert PEARSON.mean_score(rows[:1], less=rows[1:]).value == pytest.approx(apart.value)
    assert PEARSON.chance(gold.tolist(), near.tolist(), [[0.0] * 400]) < 0.2


def test_a_tenth_of_the_deviation_tells_two_numbers_apart() -> None:
    ours = np.array([0.0, 10.0, 20.0])
    step = 0.1 * ours.std()
    assert distinguishable(ours, ours + np.array([0, 0.99, 1.01]) * step).tolist() == [False, False, True]
