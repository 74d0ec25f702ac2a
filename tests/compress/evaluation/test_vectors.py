"""Scores of vectors against SciPy and scikit-learn, on random and on degenerate cases."""

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from compress.evaluation.vectors import (
    PARTNERS,
    SIMILARITY,
    nearest,
    neighbour_accuracy,
    recall_at,
    similarities,
    vector_distance,
    vector_scores,
)


def drawn(texts: int, width: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((texts, width)).astype(np.float32)
    if seed % 3 == 0:  # some texts are equal
        rows[texts // 2 :] = rows[: texts - texts // 2]
    return list(rows)


def test_the_metric_is_the_rank_correlation_of_all_similarities() -> None:
    for seed in range(200):
        texts = 3 + seed % 20
        theirs, ours = drawn(texts, 6, seed), drawn(texts, 4, seed + 1)
        a, b = (np.stack(rows).astype(np.float64) for rows in (theirs, ours))
        a, b = (rows / np.linalg.norm(rows, axis=-1, keepdims=True) for rows in (a, b))
        apart = ~np.eye(texts, dtype=bool)
        # Equal texts have equal similarities, which rounding must not order.
        x, y = (np.round((rows @ rows.T)[apart], 6) for rows in (a, b))
        expected = spearmanr(x, y).statistic if len(set(x)) > 1 and len(set(y)) > 1 else 0.0
        assert SIMILARITY.score(theirs, ours).value == pytest.approx(expected, abs=1e-6), seed


def test_the_same_similarities_in_another_space_are_the_same() -> None:
    vectors = drawn(50, 8, 1)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))[0]
    turned = [5 * vector @ rotation for vector in vectors]
    scores = vector_scores(vectors, turned)
    assert scores["similarity_spearman"].value == pytest.approx(1, abs=1e-6)
    assert scores["recall_at_10"].value == 1


def test_order_of_the_texts_changes_little_and_more_texts_than_partners_are_compared_with_some() -> None:
    theirs = drawn(300, 8, 1)
    ours = [vector + 0.5 * noise for vector, noise in zip(theirs, drawn(300, 8, 2), strict=True)]
    assert similarities(theirs).shape == (300, PARTNERS)
    found = SIMILARITY.score(theirs, ours)
    assert found.low < found.value < found.high
    other = SIMILARITY.score(theirs[::-1], ours[::-1])
    assert other.value == pytest.approx(found.value, abs=0.03)
    unrelated = SIMILARITY.score(theirs, drawn(300, 8, 5))
    assert abs(unrelated.value) < 0.05


def test_the_interval_is_as_wide_as_the_metric_varies_between_samples() -> None:
    """Of 60 samples of one kind of texts: the spread of the metric, and the mean width that the bootstrap gives."""
    values, widths = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        theirs = rng.standard_normal((120, 6))
        ours = theirs + 0.7 * rng.standard_normal((120, 6))
        found = SIMILARITY.score(list(theirs), list(ours))
        values.append(found.value)
        widths.append(found.high - found.low)
    assert np.mean(widths) == pytest.approx(2 * 1.96 * np.std(values), rel=0.3)


def test_a_vector_of_zeros_is_similar_to_nothing() -> None:
    vectors = [*drawn(5, 4, 1), np.zeros(4, dtype=np.float32)]
    assert np.isfinite(similarities(vectors)).all()
    assert SIMILARITY.score(vectors, [np.zeros(4)] * 6).value == 0


@pytest.mark.parametrize("count", [1, 10])
def test_nearest_texts_are_those_of_scikit_learn(count: int) -> None:
    vectors = drawn(60, 8, 1)
    stacked = np.stack(vectors)
    theirs = NearestNeighbors(n_neighbors=count, metric="cosine").fit(stacked).kneighbors(return_distance=False)
    assert (nearest(vectors, count) == theirs).all()
    ours = [vector + noise for vector, noise in zip(vectors, drawn(60, 8, 2), strict=True)]
    others = NearestNeighbors(n_neighbors=count, metric="cosine").fit(np.stack(ours)).kneighbors(return_distance=False)
    expected = [len(set(a) & set(b)) / count for a, b in zip(theirs, others, strict=True)]
    assert recall_at(vectors, ours, count).tolist() == pytest.approx(expected)


def test_the_nearest_known_text_gives_the_label() -> None:
    known, asked = drawn(80, 6, 1), drawn(40, 6, 2)
    rng = np.random.default_rng(0)
    labels, gold = ([f"label {i}" for i in rng.integers(0, 4, size=size)] for size in (80, 40))
    theirs = KNeighborsClassifier(1, metric="cosine").fit(np.stack(known), labels).score(np.stack(asked), gold)
    assert neighbour_accuracy(known, labels, asked, gold) == pytest.approx(theirs)
    assert neighbour_accuracy(known, labels, known, labels) == 1


def test_of_several_neighbours_the_most_frequent_label_wins_and_among_equals_the_nearest() -> None:
    known = [np.array([1.0, 0.0]), np.array([1.0, 0.2]), np.array([1.0, 0.3])]
    asked = [np.array([1.0, 0.01])]
    assert neighbour_accuracy(known, ["a", "b", "b"], asked, ["b"], count=3) == 1
    assert neighbour_accuracy(known, ["a", "b", "b"], asked, ["a"], count=2) == 1


def test_a_distance_is_that_of_directions_and_counts_texts_with_another_neighbour() -> None:
    vectors = drawn(30, 8, 1)
    assert vector_distance(vectors, [2 * vector for vector in vectors]) == (pytest.approx(0, abs=1e-6), 0)
    divergence, changed = vector_distance(vectors, drawn(30, 8, 2))
    assert divergence == pytest.approx(1, abs=0.2)
    assert changed > 0.8
