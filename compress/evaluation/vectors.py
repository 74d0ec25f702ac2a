"""How well two models agree on the similarities of texts. No torch.

Vectors of two models may have different widths and directions; what users compare is how near texts lie to each other.
"""

from collections.abc import Sequence

import numpy as np

# Other texts that each text is compared with. With all of them, 10,000 texts would have 50 million pairs.
PARTNERS = 64
ROWS_AT_ONCE = 1024


def unit(vectors: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """`vectors` (texts, width) at length 1, float32; a vector of zeros stays."""
    stacked = np.asarray(np.stack(list(vectors)), dtype=np.float64)
    return np.asarray(stacked / np.maximum(np.linalg.norm(stacked, axis=-1, keepdims=True), 1e-12), dtype=np.float32)


def similarities(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """The cosine of each text to others, (texts, partners): to all others, or to the same `PARTNERS` in every call.

    Rounded to six decimals, so that float32 does not rank what is equal.
    """
    units = unit(vectors)
    texts = len(units)
    order = np.random.default_rng(0).permutation(texts)  # neighbours in a sorted file are alike
    found = np.empty((texts, min(PARTNERS, texts - 1)))
    for column in range(found.shape[1]):
        others = np.empty(texts, dtype=np.intp)
        others[order] = np.roll(order, -(column + 1))
        found[:, column] = np.einsum("tw,tw->t", units, units[others])
    return np.round(found, 6)


def similarity_moments(gold: Sequence[np.ndarray], predicted: Sequence[np.ndarray]) -> np.ndarray:
    """Per text the terms of the sums of Spearman's rho between both models' `similarities`: (texts, 6), as `counts` has them.

    Ranks are among all pairs; a resample of texts keeps them.
    """
    x, y = (_centred_ranks(similarities(vectors)) for vectors in (gold, predicted))
    terms: np.ndarray = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=-1)  # (texts, partners, 6)
    return np.asarray(terms.sum(axis=1))


def nearest(vectors: Sequence[np.ndarray], count: int) -> np.ndarray:
    """The `count` nearest other texts of each text by cosine, nearest first: indices (texts, count)."""
    units = unit(vectors)
    found = np.empty((len(units), count), dtype=np.intp)
    for first in range(0, len(units), ROWS_AT_ONCE):
        cosines = units[first : first + ROWS_AT_ONCE] @ units.T
        rows = np.arange(len(cosines))
        cosines[rows, first + rows] = -np.inf
        found[first : first + len(cosines)] = np.argsort(-cosines, axis=-1, kind="stable")[:, :count]
    return found


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
    theirs, ours = unit(known), unit(asked)
    right = 0
    for first in range(0, len(ours), ROWS_AT_ONCE):
        cosines = ours[first : first + ROWS_AT_ONCE] @ theirs.T
        chosen = np.argsort(-cosines, axis=-1, kind="stable")[:, :count]
        for row, wanted in zip(chosen.tolist(), gold[first : first + ROWS_AT_ONCE], strict=True):
            names = [labels[i] for i in row]
            right += max(names, key=lambda name: (names.count(name), -names.index(name))) == wanted
    return right / max(1, len(ours))


def vector_distance(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> tuple[float, float]:
    """One minus the cosine of the two vectors of a text, mean over texts; and the share of texts whose nearest text is another one."""
    theirs, ours = unit(expected), unit(actual)
    apart = 1 - np.einsum("tw,tw->t", theirs.astype(np.float64), ours.astype(np.float64))
    other = (nearest(expected, 1) != nearest(actual, 1)).any(axis=-1) if len(expected) > 1 else np.zeros(1)
    return float(apart.mean()), float(other.mean())


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each of `values` among all of them, less the mean rank; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = last - (counts - 1) / 2
    return np.asarray(ranks[place.reshape(values.shape)] - (values.size + 1) / 2)
