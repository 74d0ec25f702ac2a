"""Poisson arrivals, and the search for the highest rate that a server sustains."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from serve.errors import BadInput


def poisson_s(rate_per_s: float, queries: int, seed: int) -> npt.NDArray[np.float64]:
    """The due moments of `queries` queries, (queries,) rising seconds from 0, at `rate_per_s` on average.

    The gaps have an exponential distribution, as for many independent users: the server scenario of MLPerf Inference
    (Reddi et al. 2020). A seed gives the same pattern at every rate, scaled in time.
    Raises BadInput for a rate that is not a finite number above 0, or fewer than one query.
    """
    if not (math.isfinite(rate_per_s) and rate_per_s > 0 and queries > 0):
        raise BadInput(
            f"{queries} queries at {rate_per_s:g}/s were asked for; both must be above 0, and the rate finite"
        )
    return np.cumsum(np.random.default_rng(seed).exponential(size=queries)) / rate_per_s


def late_allowed(queries: int) -> int:
    """How many of `queries` may exceed a bound while their p99, with numpy's interpolation, can stay within it."""
    return queries - 1 - math.floor(0.99 * (queries - 1))


def highest_rate(try_rate: Callable[[float], bool], low: float, high: float, tolerance: float = 0.05) -> float:
    """The highest rate from `low` to `high` at which `try_rate` returned True; 0.0 when `low` failed.

    The rate is doubled from `low` until it fails. The gap is then halved (by its ratio) until the rate that failed is at
    most `1 + tolerance` times the rate that held.

    A trial is noisy: other load on the machine fails a sustainable rate more often than chance passes an unsustainable one.
    So a rate fails only after two failed trials in a row. The rate returned has itself held, and is never a point between.

    At most `2 * (2 + log2(high / low) + log2(log(2) / log(1 + tolerance)))` trials are made, whatever their results. Raises
    BadInput when `low` is not above 0, `high` is less than `low` or not finite, or `tolerance` is not above 0.
    """
    if not (0 < low <= high < math.inf and tolerance > 0):
        raise BadInput(
            f"rates from {low:g} to {high:g} with a tolerance of {tolerance:g} were asked for; "
            "0 < lowest <= highest < infinity and a tolerance above 0 are needed"
        )

    def holds(rate: float) -> bool:
        return try_rate(rate) or try_rate(rate)

    if not holds(low):
        return 0.0
    held, failed = low, math.inf
    while held < high and failed == math.inf:
        rate = min(2 * held, high)
        if holds(rate):
            held = rate
        else:
            failed = rate
    while held * (1 + tolerance) < failed < math.inf:
        rate = math.sqrt(held * failed)
        if holds(rate):
            held = rate
        else:
            failed = rate
    return held
