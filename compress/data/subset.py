"""Draws some of many rows with a seed, because the first rows of a file may all have the same label."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Row = TypeVar("Row")


def subset(rows: Sequence[Row], count: int, seed: int = 0) -> list[Row]:
    """`count` of `rows`, drawn without repeats, in their own order; all rows if there are no more.

    The same rows, count and seed give the same subset.
    """
    if len(rows) <= count:
        return list(rows)
    drawn = np.random.default_rng(seed).choice(len(rows), count, replace=False)
    return [rows[i] for i in sorted(drawn)]
