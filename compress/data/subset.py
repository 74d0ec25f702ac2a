"""A few of many rows, drawn with a seed: the first rows of a file may all have one label."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Row = TypeVar("Row")


def subset(rows: Sequence[Row], count: int, seed: int = 0) -> list[Row]:
    """`count` of `rows`, drawn without repeats, in their own order; all of them where there are no more.

    Equal rows, count and seed give an equal subset.
    """
    if len(rows) <= count:
        return list(rows)
    drawn = np.random.default_rng(seed).choice(len(rows), count, replace=False)
    return [rows[i] for i in sorted(drawn)]
