"""The metrics of the suites against their formulas, and on the cases that are hard."""

import math
import random
from collections import Counter

import pytest

from stillroom.verbs.benchmark.training import scored


def matthews(gold: list[str], said: list[str]) -> float:
    """Matthews' correlation of two classes by its formula."""
    seen = Counter(zip(gold, said, strict=True))
    tp, tn, fp, fn = seen["1", "1"], seen["0", "0"], seen["0", "1"], seen["1", "0"]
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return (tp * tn - fp * fn) / below if below else 0.0


def f1(gold: list[str], said: list[str]) -> float:
    """F1 of class 1 by its formula."""
    seen = Counter(zip(gold, said, strict=True))
    below = 2 * seen["1", "1"] + seen["0", "1"] + seen["1", "0"]
    return 2 * seen["1", "1"] / below if below else 0.0


def pearson(x: list[float], y: list[float]) -> float:
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    both = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return both / math.sqrt(math.fsum((a - mean_x) ** 2 for a in x) * math.fsum((b - mean_y) ** 2 for b in y))


def ranks(values: list[float]) -> list[float]:
    """The mean rank of equal values."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


@pytest.mark.parametrize("seed", range(5))
def test_every_metric_is_its_formula(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        gold, said = ([chance.choice("01") for _ in range(chance.randint(2, 12))] for _ in range(2))
        said = (said * 6)[: len(gold)]
        assert scored("accuracy", gold, said) == pytest.approx(
            sum(a == b for a, b in zip(gold, said, strict=True)) / len(gold)
        )
        assert scored("f1", gold, said) == pytest.approx(f1(gold, said))
        assert scored("matthews", gold, said) == pytest.approx(matthews(gold, said))
        x = [round(chance.random(), 1) for _ in range(chance.randint(5, 12))]
        y = [round(a + chance.random(), 1) for a in x]
        if len(set(x)) > 1 and len(set(y)) > 1:
            assert scored("pearson", x, y) == pytest.approx(pearson(x, y))
            assert scored("spearman", x, y) == pytest.approx(pearson(ranks(x), ranks(y)))


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
@pytest.mark.parametrize(("gold", "said"), [([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), ([2.0, 2.0], [1.0, 3.0])])
def test_constant_numbers_have_no_correlation(metric: str, gold: list[float], said: list[float]) -> None:
    assert scored(metric, gold, said) == 0


def test_one_class_alone_is_worth_nothing_by_matthews_and_f1() -> None:
    assert scored("matthews", ["0", "1", "1"], ["1", "1", "1"]) == 0
    assert scored("f1", ["1", "1"], ["0", "0"]) == 0
    assert scored("f1", ["0", "0"], ["0", "0"]) == 0


def test_entities_are_scored_as_whole_spans() -> None:
    gold = [frozenset({(0, 4, "LOC"), (5, 9, "PER")}), frozenset[tuple[int, int, str]]()]
    said = [frozenset({(0, 4, "LOC"), (5, 8, "PER")}), frozenset({(0, 1, "LOC")})]
    assert scored("entity_f1", gold, said) == pytest.approx(2 * 1 / (3 + 2))  # type: ignore[arg-type]


def test_an_unknown_metric_is_an_error() -> None:
    with pytest.raises(ValueError, match="bleu"):
        scored("bleu", ["1"], ["1"])
