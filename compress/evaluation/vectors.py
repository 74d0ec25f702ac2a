"""How well two models agree on the similarities of texts. No torch.

Vectors of two models may have different widths and directions; what users compare is how near texts lie to each other.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from compress.evaluation.metrics import Answers, Score, resamples, score_of
from compress.evaluation.numbers import FEWEST_NUMBERS, Correlation

RECALLED = 10  # nearest texts, as in benchmarks of nearest-neighbour search
# Other texts that each text is compared with. With all of them, 10,000 texts would have 50 million pairs.
PARTNERS = 64
ROWS_AT_ONCE = 256


def unit(vectors: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """`vectors` (texts, width) at length 1, float64; a vector of zeros stays."""
    stacked = np.asarray(np.stack(list(vectors)), dtype=np.float64)
    return np.asarray(stacked / np.maximum(np.linalg.norm(stacked, axis=-1, keepdims=True), 1e-12))


def partners_of(texts: int) -> np.ndarray:
    """The others that each text is compared with, the same in every call: indices (texts, partners), all others or `PARTNERS`."""
    order = np.random.default_rng(0).permutation(texts)  # neighbours in a sorted file are alike
    found = np.empty((texts, max(0, min(PARTNERS, texts - 1))), dtype=np.intp)
    for column in range(found.shape[1]):
        found[order, column] = np.roll(order, -(column + 1))
    return found


def similarities(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """The cosine of each text to each of `partners_of`, (texts, partners), to six decimals: rounding must not rank what is equal."""
    units = unit(vectors)
    partners = partners_of(len(units))
    found = np.empty(partners.shape)
    for column in range(partners.shape[1]):  # one after another, for their memory
        found[:, column] = np.einsum("tw,tw->t", units, units[partners[:, column]])
    return np.round(found, 6)


def similarity_moments(gold: Sequence[np.ndarray], predicted: Sequence[np.ndarray]) -> np.ndarray:
    """Per text the terms of the sums of Spearman's rho between both models' `similarities`: (texts, 6), as `counts` has them.

    Ranks are among all pairs; a resample of texts keeps them. A pair counts with both of its texts, less its mean, so that the sum is that
    of all pairs and a resample of texts changes it as it would with the pairs among them: the first-order projection of a statistic of
    pairs (Hoeffding 1948).
    """
    x, y = (_centred_ranks(similarities(vectors)) for vectors in (gold, predicted))
    terms: np.ndarray = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=-1)  # (texts, partners, 6)
    of_first = terms.sum(axis=1)
    of_second = np.zeros_like(of_first)
    partners = partners_of(len(of_first))
    for column in range(partners.shape[1]):
        of_second[partners[:, column]] += terms[:, column]
    return np.asarray(of_first + of_second - of_first.mean(axis=0))


def nearest(vectors: Sequence[np.ndarray], count: int) -> np.ndarray:
    """The `count` nearest other texts of each text by cosine, nearest first: indices (texts, count)."""
    units = unit(vectors).astype(np.float32)
    found = np.empty((len(units), count), dtype=np.intp)
    for first in range(0, len(units), ROWS_AT_ONCE):
        cosines = units[first : first + ROWS_AT_ONCE] @ units.T
        rows = np.arange(len(cosines))
        cosines[rows, first + rows] = -np.inf
        found[first : first + len(cosines)] = _highest(cosines, count)
    return found


def _highest(cosines: np.ndarray, count: int) -> np.ndarray:
    """The places of the `count` highest of each row, highest first; of equal ones the first."""
    if count < cosines.shape[-1]:
        chosen = np.sort(np.argpartition(-cosines, count - 1, axis=-1)[:, :count], axis=-1)
    else:
        chosen = np.broadcast_to(np.arange(cosines.shape[-1]), cosines.shape)
    order = np.argsort(-np.take_along_axis(cosines, chosen, axis=-1), axis=-1, kind="stable")
    return np.asarray(np.take_along_axis(chosen, order, axis=-1))


def recall_at(gold: Sequence[np.ndarray], predicted: Sequence[np.ndarray], count: int = 10) -> np.ndarray:
    """Per text the share of its `count` nearest texts by `gold` that are among its `count` nearest by `predicted`: (texts,).

    `count` is at most the number of other texts.
    """
    count = min(count, len(gold) - 1)
    theirs, ours = nearest(gold, count), nearest(predicted, count)
    return np.array([len(set(a) & set(b)) / max(1, count) for a, b in zip(theirs.tolist(), ours.tolist(), strict=True)])


def neighbour_accuracy(
    known: Sequence[np.ndarray], labels: Sequence[str], asked: Sequence[np.ndarray], gold: Sequence[str], count: int = 1
) -> float:
    """The share of texts whose label most of their `count` nearest `known` texts have; of labels as frequent, that of the nearest."""
    theirs, ours = unit(known).astype(np.float32), unit(asked).astype(np.float32)
    right = 0
    for first in range(0, len(ours), ROWS_AT_ONCE):
        cosines = ours[first : first + ROWS_AT_ONCE] @ theirs.T
        chosen = _highest(cosines, min(count, len(theirs)))
        for row, wanted in zip(chosen.tolist(), gold[first : first + ROWS_AT_ONCE], strict=True):
            names = [labels[i] for i in row]
            right += max(names, key=lambda name: (names.count(name), -names.index(name))) == wanted
    return right / max(1, len(ours))


def vector_distance(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> tuple[float, float]:
    """One minus the cosine of the two vectors of a text, mean over texts; and the share of texts whose nearest text is another one."""
    theirs, ours = unit(expected), unit(actual)
    apart = 1 - np.einsum("tw,tw->t", theirs, ours)
    other = (nearest(expected, 1) != nearest(actual, 1)).any(axis=-1) if len(expected) > 1 else np.zeros(1)
    return float(apart.mean()), float(other.mean())


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each of `values` among all of them, less the mean rank; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = last - (counts - 1) / 2
    return np.asarray(ranks[place.reshape(values.shape)] - (values.size + 1) / 2)


class Similarity(Correlation):
    """Spearman's rho between the similarities of texts by two models."""

    def rows(self, gold: Answers, predicted: Answers) -> np.ndarray:
        """See `similarity_moments`."""
        return similarity_moments(cast(Sequence[np.ndarray], gold), cast(Sequence[np.ndarray], predicted))


SIMILARITY = Similarity("similarity_spearman", FEWEST_NUMBERS)


def vector_scores(theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray], *, seed: int = 0) -> dict[str, Score]:
    """By name: `similarity_spearman` and `recall_at_10`, with percentile bootstrap intervals over texts.

    The first is Spearman's rho between the similarities of texts by both models. The second is the mean share of a text's ten nearest
    texts by the teacher that are among its ten nearest by the student.

    Args:
        theirs: the teacher's vector of each text.
        ours: the student's, of any width.
        seed: of the resampling.
    """
    each = recall_at(theirs, ours, RECALLED)
    means = np.concatenate([weights @ each / len(each) for weights in resamples(len(each), seed)])
    return {
        "similarity_spearman": SIMILARITY.score(list(theirs), list(ours), seed=seed),
        f"recall_at_{RECALLED}": score_of(float(each.mean()), means),
    }
