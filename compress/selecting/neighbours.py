"""The nearest texts by their vectors, exactly: every product is computed, a block at a time."""

import numpy as np

BLOCK = 4_096  # vectors whose products with all others are in memory at once


class Nearest:
    """The `k` nearest texts of a bank to each of some queries, of all that were added so far."""

    def __init__(self, queries: np.ndarray, k: int) -> None:
        self.queries = queries
        self.similarity: np.ndarray = np.full((len(queries), k), -np.inf, dtype=np.float32)
        """Cosines, (queries, k), in no order."""
        self.index: np.ndarray = np.zeros((len(queries), k), dtype=np.int64)
        """The places in the bank; only where the similarity is finite."""

    def add(self, first: int, vectors: np.ndarray) -> None:
        """The `vectors` of the texts of the bank from place `first` on."""
        k = self.similarity.shape[1]
        for start in range(0, len(self.queries), BLOCK):
            part = slice(start, start + BLOCK)
            products = self.queries[part] @ vectors.T
            places = np.broadcast_to(np.arange(first, first + len(vectors)), products.shape)
            known = np.concatenate([self.similarity[part], products], axis=1)
            index = np.concatenate([self.index[part], places], axis=1)
            best = np.argpartition(-known, k - 1, axis=1)[:, :k]
            self.similarity[part] = np.take_along_axis(known, best, axis=1)
            self.index[part] = np.take_along_axis(index, best, axis=1)

    def chosen(self) -> list[tuple[int, int, float]]:
        """Each text that is among the nearest of a query, with the query that it is nearest to and their cosine; the nearest first."""
        there = np.isfinite(self.similarity)
        query = np.broadcast_to(np.arange(len(self.queries))[:, None], there.shape)[there]
        index, cosine = self.index[there], self.similarity[there]
        order = np.lexsort((query, -cosine, index))
        index, query, cosine = index[order], query[order], cosine[order]
        first = np.unique(index, return_index=True)[1]  # of each text the nearest query; ties go to the first
        best = first[np.lexsort((index[first], -cosine[first]))]
        return list(zip(index[best].tolist(), query[best].tolist(), cosine[best].tolist(), strict=True))


def distinct(vectors: np.ndarray, above: float, known: np.ndarray) -> list[int]:
    """The places of `vectors`, in order, without those whose cosine is over `above` with one of `known` or an earlier one that is kept."""
    kept: list[int] = []
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK]
        near = np.zeros(len(block), dtype=bool)
        for begin in range(0, len(known), BLOCK):
            near |= (block @ known[begin : begin + BLOCK].T > above).any(axis=1)
        for begin in range(0, len(kept), BLOCK):
            near |= (block @ vectors[kept[begin : begin + BLOCK]].T > above).any(axis=1)
        among = block @ block.T > above
        here: list[int] = []
        for i in np.flatnonzero(~near).tolist():
            if not among[i, here].any():
                here.append(i)
        kept += [start + i for i in here]
    return kept
