"""Nearest vectors and near duplicates, against every product computed at once."""

import numpy as np
import pytest

from compress import selecting
from compress.selecting import Nearest, distinct


def unit(rows: int, seed: int) -> np.ndarray:
    """Random vectors of length 1."""
    drawn = np.random.default_rng(seed).standard_normal((rows, 16)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@pytest.mark.parametrize("shard", [7, 64, 300])
def test_the_nearest_are_those_of_all_products_however_the_bank_is_cut(
    shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selecting, "BLOCK", 5)
    queries, bank = unit(12, 0), unit(300, 1)
    nearest = Nearest(queries, 4)
    for first in range(0, len(bank), shard):
        nearest.add(first, bank[first : first + shard])
    products = queries.astype(np.float64) @ bank.astype(np.float64).T
    best = np.argsort(-products, axis=1)[:, :4]
    chosen = nearest.chosen()
    assert {place for place, _, _ in chosen} == set(best.flatten().tolist())
    cosines = [cosine for _, _, cosine in chosen]
    assert cosines == sorted(cosines, reverse=True)
    for place, query, cosine in chosen:
        among = [q for q in range(12) if place in best[q]]
        assert query == max(among, key=lambda q: products[q, place])
        assert cosine == pytest.approx(products[query, place], abs=1e-6)


def test_a_bank_with_fewer_texts_than_are_asked_for_is_chosen_whole() -> None:
    nearest = Nearest(unit(3, 0), 10)
    nearest.add(0, unit(4, 1))
    assert sorted(place for place, _, _ in nearest.chosen()) == [0, 1, 2, 3]


def test_of_near_duplicates_the_first_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "BLOCK", 4)
    vectors = unit(10, 2)
    vectors[3], vectors[9] = vectors[0], vectors[5]
    none = np.zeros((0, 16), dtype=np.float32)
    kept = distinct(vectors, 0.99, none)
    assert kept == [0, 1, 2, 4, 5, 6, 7, 8]
    products = vectors[kept] @ vectors[kept].T - np.eye(len(kept))
    assert products.max() <= 0.99
    known = np.concatenate([unit(9, 5), vectors[[2, 7]]])
    assert distinct(vectors, 0.99, known) == [0, 1, 4, 5, 6, 8]
