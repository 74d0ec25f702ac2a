"""Measurements: raw samples with their conditions, the summaries derived from them, and reasons to doubt them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from serve.errors import BadInput

Condition = str | int | float

# With fewer samples than this, less than one lies beyond the p99, which is then hardly more than the slowest call.
SAMPLES_FOR_P99 = 100
# torch.utils.benchmark warns from the same spread on.
WIDE_SPREAD = 0.10
# A measurement drifts when the medians of its last and its first third of turns differ by more than this share.
DRIFT = 0.10
# Fewer pairs have no 95 % interval: even the widest interval of the signed-rank test covers less.
PAIRS_FOR_INTERVAL = 6
PERCENTILES = (50, 90, 95, 99)
RESAMPLES = 400
# Standard deviation of the logarithm of a ratio between pairs of processes of the same model, which differ in their place in
# memory. 400 pairs of a 0.5 ms encoder, 2026-11-23, benchmarks/latency/instrument.py: without it, 9 % of the intervals of
# equal pairs left out a ratio of 1, instead of 5 %.
BETWEEN_PROCESS_SD = 0.003
# Other load (of other processes or the hypervisor), in cores, from which a timing is in doubt.
OTHER_LOAD_CORES = 0.10
# The beginnings of doubts that a reader can act on; reports group doubts by them.
FEW_SAMPLES, TIME_UP, OTHER_LOAD = "p99 rests on", "the time was up", "other load seen"


@dataclass(frozen=True)
class Measurement:
    """The times of one candidate on one workload.

    Raises BadInput when there are no samples, or when `turn_sizes` does not add up to their number.
    """

    candidate: str
    batch: int  # texts per call
    tokens: int | None  # per text, special tokens included; None: real texts of all lengths
    samples_ms: tuple[float, ...]  # wall time of each timed call, in the order taken
    warmup: int  # calls that were not recorded
    conditions: dict[str, Condition] = field(default_factory=dict)
    turn_sizes: tuple[int, ...] = ()  # samples of each turn, in order; empty means one turn

    def __post_init__(self) -> None:
        if not self.samples_ms:
            raise BadInput(f"the measurement of {self.candidate!r} has no samples; time at least one call")
        if self.turn_sizes and sum(self.turn_sizes) != len(self.samples_ms):
            raise BadInput(
                f"the turns of {self.candidate!r} hold {sum(self.turn_sizes)} samples; "
                f"they must add up to the {len(self.samples_ms)} samples given"
            )

    @property
    def p50_ms(self) -> float:
        """Median time of a call."""
        return self._percentile_ms(50)

    @property
    def p99_ms(self) -> float:
        """Ninety-nine calls in a hundred were at least as fast; see `doubts` for how far to trust it."""
        return self._percentile_ms(99)

    def percentiles_ms(self) -> dict[str, float]:
        """The times that 50, 90, 95 and 99 calls in a hundred kept, as `{"p50_ms": time, ...}`."""
        return {f"p{percent}_ms": round(self._percentile_ms(percent), 4) for percent in PERCENTILES}

    def intervals_ms(self, seed: int = 0) -> dict[str, list[float]]:
        """95 % intervals of p50, p90, p95 and p99 as `{"p50": [low, high], ...}`; empty for a single turn.

        A percentile bootstrap over turns: calls of one turn share the machine's state (clock, caches, other load), so turns
        are drawn with replacement, not calls.
        """
        turns_ms = self.turns_ms()
        if len(turns_ms) < 2:
            return {}
        samples_ms = np.concatenate(list(turns_ms))
        order = np.argsort(samples_ms)
        turn_of = np.repeat(np.arange(len(turns_ms)), [len(turn) for turn in turns_ms])[order]
        sorted_ms = samples_ms[order]
        rng = np.random.default_rng(seed)
        found = {percent: np.empty(RESAMPLES) for percent in PERCENTILES}
        for i in range(RESAMPLES):
            drawn = np.bincount(rng.integers(len(turns_ms), size=len(turns_ms)), minlength=len(turns_ms))
            so_far = np.cumsum(drawn[turn_of])
            for percent, values in found.items():
                at = np.searchsorted(so_far, percent / 100 * so_far[-1])
                values[i] = sorted_ms[min(int(at), len(sorted_ms) - 1)]
        return {
            f"p{percent}": [float(x) for x in np.percentile(values, [2.5, 97.5])] for percent, values in found.items()
        }

    @property
    def texts_per_s(self) -> float:
        """Texts answered per second at the median, one call at a time."""
        return self.batch * 1000.0 / self.p50_ms

    def _percentile_ms(self, percent: float) -> float:
        return float(np.percentile(self.samples_ms, percent))

    def turns_ms(self) -> list[npt.NDArray[np.float64]]:
        """The samples of each turn, in order."""
        samples_ms = np.asarray(self.samples_ms, dtype=np.float64)
        return np.split(samples_ms, np.cumsum(self.turn_sizes)[:-1]) if self.turn_sizes else [samples_ms]

    def doubts(self) -> list[str]:
        """Reasons not to rely on these numbers, one sentence each; empty without any."""
        found = []
        count = len(self.samples_ms)
        if count < SAMPLES_FOR_P99:
            found.append(f"{FEW_SAMPLES} {count} of the {SAMPLES_FOR_P99} samples that it needs")
        if self.tokens is not None:  # calls on real texts differ because their texts do
            found += self._unsteadiness()
        if self.conditions.get("stopped") == "time":
            found.append(f"{TIME_UP} before its interval was as narrow as requested")
        other_cores = self.conditions.get("other_load_cores", 0.0)
        if isinstance(other_cores, int | float) and other_cores > OTHER_LOAD_CORES:
            found.append(f"{OTHER_LOAD}: other processes used {other_cores:.2g} cores during the timing")
        return found

    def _unsteadiness(self) -> list[str]:
        found = []
        quarter_ms, three_quarters_ms = np.percentile(self.samples_ms, [25, 75])
        spread = float(three_quarters_ms - quarter_ms) / self.p50_ms
        if spread > WIDE_SPREAD:
            found.append(f"wide spread: the middle half of the calls spans {spread:.0%} of the median")
        medians_ms = [float(np.median(turn_ms)) for turn_ms in self.turns_ms()]
        slow_ms, fast_ms = np.percentile(medians_ms, [90, 10])
        if slow_ms > 1.25 * fast_ms:
            found.append(f"turns disagree: the medians of 80 % of the turns are from {fast_ms:.4g} to {slow_ms:.4g} ms")
        third = len(medians_ms) // 3
        if third >= 2:
            drift = float(np.median(medians_ms[-third:]) / np.median(medians_ms[:third]))
            if abs(drift - 1) > DRIFT:
                found.append(f"drifted: calls of the last third took {drift:.2f} times as long as those of the first")
        return found


class Ratio(NamedTuple):
    """The median time of `a` over that of `b` (above 1: `b` is faster), with a 95 % interval."""

    a: str
    b: str
    ratio: float
    low: float
    high: float


def ratio(a: Measurement, b: Measurement) -> Ratio:
    """The p50 of `a` over that of `b`, paired turn by turn; see `process_ratio`.

    Raises BadInput for different workloads, different numbers of turns, or fewer than 2 turns.
    """
    if (a.batch, a.tokens) != (b.batch, b.tokens):
        raise BadInput(
            f"{a.candidate!r} was timed at batch {a.batch} x {a.tokens} tokens and {b.candidate!r} at "
            f"batch {b.batch} x {b.tokens}; a ratio needs one workload for both"
        )
    turns_a, turns_b = a.turns_ms(), b.turns_ms()
    if len(turns_a) != len(turns_b) or len(turns_a) < 2:
        raise BadInput(
            f"{a.candidate!r} has {len(turns_a)} turns and {b.candidate!r} has {len(turns_b)}; "
            "a ratio pairs turns that were taken together: measure both at once, with 2 turns or more"
        )
    found, low, high = process_ratio(turns_a, turns_b)
    return Ratio(a.candidate, b.candidate, found, low, high)


def process_ratio(
    turns_a: Sequence[npt.NDArray[np.float64]], turns_b: Sequence[npt.NDArray[np.float64]]
) -> tuple[float, float, float]:
    """`paired_ratio` of two models, each timed in one process, with an interval that also covers other processes of the models.

    More turns do not reduce the difference between processes, so `BETWEEN_PROCESS_SD` is added to each side in quadrature.
    """
    found, low, high = paired_ratio(turns_a, turns_b)
    luck = 1.959964 * BETWEEN_PROCESS_SD
    low = found * math.exp(-math.hypot(math.log(found / low), luck))
    return found, low, found * math.exp(math.hypot(math.log(high / found), luck))


def paired_ratio(
    turns_a: Sequence[npt.NDArray[np.float64]], turns_b: Sequence[npt.NDArray[np.float64]]
) -> tuple[float, float, float]:
    """The ratio of medians of turns that were taken together, and its 95 % interval.

    Turns i of both are taken at nearly the same time in a random order, so for equal candidates the logarithm of the ratio
    of their medians is symmetric about 0, even under other load. Wilcoxon's signed-rank test needs this symmetry. The
    estimate is that of the test (Hodges and Lehmann 1963), the interval its inversion (Hollander, Wolfe and Chicken 2014,
    section 3.3). For fewer than 6 pairs the interval is their whole range, which covers less than 95 %.
    """
    logs = np.array([math.log(np.median(x) / np.median(y)) for x, y in zip(turns_a, turns_b, strict=True)])
    first, second = np.triu_indices(len(logs))
    averages = np.sort((logs[first] + logs[second]) / 2)
    outside = _outside(len(logs))
    found, low, high = np.exp([np.median(averages), averages[outside], averages[-1 - outside]])
    return float(found), float(low), float(high)


def _outside(pairs: int) -> int:
    """How many of the ordered averages of pairs lie below the 95 % interval; as many lie above it."""
    if pairs < PAIRS_FOR_INTERVAL:
        return 0
    total = pairs * (pairs + 1) // 2
    if pairs > 60:  # from here on the normal approximation is off by 1 at most
        deviation = math.sqrt(pairs * (pairs + 1) * (2 * pairs + 1) / 24)
        return max(0, math.floor(total / 2 - 1.959964 * deviation))
    # The exact distribution of the rank sum: each rank is added with probability 1/2.
    ways = np.zeros(total + 1)
    ways[0] = 1.0
    for rank in range(1, pairs + 1):
        ways[rank:] += ways[:-rank].copy()
    return int(np.searchsorted(np.cumsum(ways) / ways.sum(), 0.025, side="right")) - 1
