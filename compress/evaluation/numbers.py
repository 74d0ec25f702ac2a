"""Scores of numbers: Pearson's r, Spearman's rank correlation and the mean squared error, with their intervals. No torch."""

from collections.abc import Callable, Sequence

import numpy as np

from compress.evaluation.metrics import Answers, Metric, Prediction, Score, resamples, score_of
from serve.errors import BadInput

# Two numbers of one text are distinguishable from this share of the standard deviation of all numbers on.
DISTINGUISHABLE = 0.1
# A variance of so small a share of the mean square is rounding: the numbers are equal.
NO_VARIANCE = 1e-12
FEWEST_NUMBERS = 10  # texts of a language, for a correlation of its own


class Correlation(Metric):
    """A correlation of two numbers a text, from the sums of 1, x, y, x^2, y^2 and xy."""

    def of(self, sums: np.ndarray) -> np.ndarray:
        """Pearson's r from the sums `(..., 6)` of n, x, y, x^2, y^2 and xy; 0 where x or y does not vary."""
        n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
        of_x, of_y = n * xx - x * x, n * yy - y * y
        varies = (of_x > NO_VARIANCE * n * xx) & (of_y > NO_VARIANCE * n * yy)
        product = np.where(varies, of_x * of_y, 1)
        found: np.ndarray = np.where(varies, np.clip((n * xy - x * y) / np.sqrt(product), -1, 1), 0.0)
        return found


class Pearson(Correlation):
    """Pearson's r of a model's numbers with the correct ones."""

    def rows(self, gold: Answers, predicted: Answers) -> np.ndarray:
        """Per text the terms of the sums, (texts, 6)."""
        x, y = (_centred(np.array(numbers, dtype=np.float64)) for numbers in (gold, predicted))
        return np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=-1)

    def further_scores(
        self, gold: Answers, predicted: Answers, *, seed: int = 0, clusters: np.ndarray | None = None
    ) -> dict[str, Score]:
        """See `number_scores`."""
        return number_scores(gold, predicted, seed=seed, clusters=clusters)


PEARSON = Pearson("pearson", FEWEST_NUMBERS, "numbers")


def _centred(numbers: np.ndarray) -> np.ndarray:
    """`numbers` less their mean, so that their squares lose no digits; 0 throughout if all are equal."""
    if not len(numbers) or numbers.min() == numbers.max():
        return np.zeros(len(numbers))
    return np.asarray(numbers - numbers.mean())


def number_scores(
    gold: Sequence[Prediction], predicted: Sequence[Prediction], *, seed: int = 0, clusters: np.ndarray | None = None
) -> dict[str, Score]:
    """By name: `spearman` and `mean_squared_error`, with the percentile bootstrap intervals that `score` gives.

    Args:
        gold: the correct answer to each text, a number.
        predicted: a model's answer.
        seed: of the resampling.
        clusters: the number of each text's, if not all are apart.
    """
    right, said = as_numbers(gold), as_numbers(predicted)
    squares = (said - right) ** 2
    ranked = (_Ranked(right), _Ranked(said))

    def spearman(weights: np.ndarray) -> np.ndarray:
        x, y = (each.ranks(weights) for each in ranked)
        sums = [np.einsum("rt,rt,rt->r", weights, a, b) for a, b in ((x, y), (x, x), (y, y))]
        size = np.sqrt(sums[1] * sums[2])  # 0 where all numbers of a resample are equal
        return np.asarray(np.divide(sums[0], size, out=np.zeros_like(size), where=size > 0))

    def mean_squared_error(weights: np.ndarray) -> np.ndarray:
        return np.asarray(weights @ squares / weights.sum(axis=-1))

    scores: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "spearman": spearman,
        "mean_squared_error": mean_squared_error,
    }
    once = np.ones((1, len(right)))
    found = {name: [of(weights) for weights in resamples(len(right), seed, clusters)] for name, of in scores.items()}
    return {name: score_of(float(of(once)[0]), np.concatenate(found[name])) for name, of in scores.items()}


def check_unit(named: str, gold: Sequence[Prediction], said: Sequence[Prediction]) -> None:
    """Check that the numbers of a teacher, `named` so in messages, are in the unit of the data's, to which a correlation is blind.

    Raises BadInput: they are further from the data's numbers than the mean of these is.
    """
    right, theirs = as_numbers(gold), as_numbers(said)
    error, variance = float(((theirs - right) ** 2).mean()), float(right.var())
    if variance and error > variance:
        raise BadInput(
            f"{named} gives numbers in another unit than the data, or bad ones: on validation they are {theirs.min():.4g} to "
            f"{theirs.max():.4g}, and those of the data {right.min():.4g} to {right.max():.4g}; their mean squared error, {error:.4g}, is "
            f"above the variance, {variance:.4g}. Give data in the teacher's unit, or a teacher in the data's."
        )


def as_numbers(answers: Sequence[Prediction]) -> np.ndarray:
    """Answers that are numbers as an array, (texts,), float64."""
    return np.array([answer for answer in answers if isinstance(answer, float)], dtype=np.float64)


def distinguishable(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which texts get other numbers from `a` than from `b`: apart by more than `DISTINGUISHABLE` standard deviations of `a`; (texts,)."""
    return np.asarray(np.abs(a - b) > DISTINGUISHABLE * a.std())


def number_distance(expected: np.ndarray, actual: np.ndarray) -> tuple[float, float]:
    """The mean squared difference of numbers (texts,) as a share of the variance of `expected`, and the share that can be told apart."""
    expected, actual = expected.astype(np.float64), actual.astype(np.float64)
    squares = float(((actual - expected) ** 2).mean())
    return squares / (float(expected.var()) or 1.0), float(distinguishable(expected, actual).mean())


class _Ranked:
    """Numbers in order, whose ranks among resampled texts are asked for again and again."""

    def __init__(self, numbers: np.ndarray) -> None:
        _, self._group = np.unique(numbers, return_inverse=True)  # of equal numbers, in ascending order

    def ranks(self, weights: np.ndarray) -> np.ndarray:
        """Of each number that occurs `weights` (resamples, texts) times its rank, the mean one among equals, less the mean rank."""
        of_group = np.zeros((len(weights), int(self._group.max()) + 1))
        for resample, weight in enumerate(weights):
            of_group[resample] = np.bincount(self._group, weight, minlength=of_group.shape[1])
        middle = np.cumsum(of_group, axis=-1) - (of_group - 1) / 2
        centred: np.ndarray = (middle - (weights.sum(axis=-1, keepdims=True) + 1) / 2)[:, self._group]
        return centred
