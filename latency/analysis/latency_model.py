"""A latency model: the time of one call as a sum of the costs of a student's operators, fitted to the times of some students.

All times are of one machine, runtime, precision, number of threads and number of tokens. With these fixed, the work of an operator
depends on the shape alone: products with weights on widths multiplied, everything else on one width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from compress.models.shapes import Shape

# What each part of a student costs is its work by these, times a fitted number.
OPERATORS = (
    "call",  # once
    "embeddings",  # a unit of width
    "layer",  # once a layer
    "attention projections",  # a weight of the four products of a layer
    "feed-forward",  # a weight of the two products of a layer
    "attention",  # a head of a layer
    "attention values",  # a unit of width of a layer: also its norms and sums
    "activation",  # a unit of the feed-forward layer, by the teacher's activation
    "relu",  # the same by ReLU, where that is not the teacher's
)


class Timed(NamedTuple):
    """The measured time of one student's call."""

    shape: Shape
    p50_ms: float
    p99_ms: float

    def percentile_ms(self, percentile: int) -> float:
        """The time that 50 or 99 calls of 100 stayed within. Raises ValueError: another percentile."""
        return {50: self.p50_ms, 99: self.p99_ms}[_known(percentile)]


class Errors(NamedTuple):
    """Relative errors of predictions on students that were not fitted."""

    median: float
    worst: float
    students: int


@dataclass(frozen=True)
class LatencyModel:
    """Predicts the time of one call from a student's shape."""

    ms_by_operator: Mapping[str, float]
    """Milliseconds of one unit of each of `OPERATORS`; what documents of earlier versions lack costs nothing."""
    p99_over_p50: float
    """Median of the measured students' ratios."""

    def p50_ms(self, shape: Shape) -> float:
        """The median time of a call."""
        return float(np.dot(_work(shape), [self.ms_by_operator.get(name, 0.0) for name in OPERATORS]))

    def percentile_ms(self, shape: Shape, percentile: int) -> float:
        """The time that 50 or 99 calls of 100 stay within. Raises ValueError: another percentile."""
        return self.p50_ms(shape) * (1.0 if _known(percentile) == 50 else self.p99_over_p50)

    def errors_on(self, timed: Sequence[Timed]) -> Errors:
        """How far predicted medians are from measured ones, as shares of the latter."""
        shares = [abs(self.p50_ms(each.shape) / each.p50_ms - 1) for each in timed]
        return Errors(float(np.median(shares)), max(shares), len(shares))


def fit(timed: Sequence[Timed]) -> LatencyModel:
    """The costs of operators with the least sum of squared relative errors, none of them negative. It needs one student or more."""
    from scipy.optimize import nnls

    work = np.array([_work(each.shape) for each in timed])
    shares = work / np.array([each.p50_ms for each in timed])[:, None]
    norms = np.linalg.norm(shares, axis=0)
    scale = np.where(norms > 0, norms, 1.0)  # the units are of very different sizes; some students may have none of one
    costs, _ = nnls(shares / scale, np.ones(len(timed)))
    ratio = float(np.median([each.p99_ms / each.p50_ms for each in timed]))
    return LatencyModel(dict(zip(OPERATORS, map(float, costs / scale), strict=True)), ratio)


def _known(percentile: int) -> int:
    if percentile not in (50, 99):
        raise ValueError(f"p50 and p99 are known, not p{percentile}")
    return percentile


def _work(shape: Shape) -> list[float]:
    """How many units of each of `OPERATORS` a call computes."""
    layers, hidden = shape.layers, shape.hidden
    return [
        1.0, hidden, layers, 4 * layers * hidden**2, 2 * layers * hidden * shape.ffn, layers * shape.heads, layers * hidden,
        *((0, layers * shape.ffn) if shape.activation == "relu" else (layers * shape.ffn, 0)),
    ]  # fmt: skip
