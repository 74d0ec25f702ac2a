"""What a timing is: raw samples with their conditions. Every summary is derived, and a measurement can doubt itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from serve.errors import BadInput

Condition = str | int | float

# A p99 of fewer samples than this has less than one sample beyond it: it is the slowest call under another name.
SAMPLES_FOR_P99 = 100
# torch.utils.benchmark warns of a measurement from the same spread on.
WIDE_SPREAD = 0.10
# Cores' worth of work by others (or taken by the hypervisor) from which a timing is no longer the candidate's own.
OTHER_LOAD_CORES = 0.10


class MeasurementDocument(TypedDict):
    """`Measurement` as JSON."""

    candidate: str
    batch: int
    tokens: int
    samples_ms: list[float]
    warmup: int
    conditions: dict[str, Condition]
    turn_sizes: list[int]


@dataclass(frozen=True)
class Measurement:
    """The times of one candidate on one workload.

    Raises BadInput when there are no samples, or when `turn_sizes` does not add up to their number.
    """

    candidate: str
    batch: int  # texts per call
    tokens: int  # real tokens per text, special tokens included
    samples_ms: tuple[float, ...]  # wall time of each timed call, in the order taken
    warmup: int  # calls that were made and not kept
    conditions: dict[str, Condition] = field(default_factory=dict)
    turn_sizes: tuple[int, ...] = ()  # samples of each turn, in order; empty means one turn

    def __post_init__(self) -> None:
        if not self.samples_ms:
            raise BadInput(f"the measurement of {self.candidate!r} has no samples; at least one timed call was needed")
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
    def p90_ms(self) -> float:
        """Nine calls in ten were at least as fast."""
        return self._percentile_ms(90)

    @property
    def p99_ms(self) -> float:
        """Ninety-nine calls in a hundred were at least as fast; see `doubts` for how far to trust it."""
        return self._percentile_ms(99)

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
        """Reasons not to lean on these numbers, one sentence each; empty when there are none."""
        found = []
        count = len(self.samples_ms)
        if count < SAMPLES_FOR_P99:
            found.append(
                f"p99 rests on {count} samples: below {SAMPLES_FOR_P99} it says little more than the slowest call"
            )
        quarter_ms, three_quarters_ms = np.percentile(self.samples_ms, [25, 75])
        spread = float(three_quarters_ms - quarter_ms) / self.p50_ms
        if spread > WIDE_SPREAD:
            found.append(f"wide spread: the middle half of the calls spans {spread:.0%} of the median")
        medians_ms = [float(np.median(turn_ms)) for turn_ms in self.turns_ms()]
        if max(medians_ms) > 1.25 * min(medians_ms):
            found.append(f"turns disagree: their medians run from {min(medians_ms):.4g} to {max(medians_ms):.4g} ms")
        other_cores = self.conditions.get("other_load_cores", 0.0)
        if isinstance(other_cores, int | float) and other_cores > OTHER_LOAD_CORES:
            found.append(f"other load seen: something else used {other_cores:.2g} cores while this was timed")
        return found

    def to_json(self) -> MeasurementDocument:
        """Everything measured, nothing derived; `from_json` reads it back."""
        return MeasurementDocument(
            candidate=self.candidate,
            batch=self.batch,
            tokens=self.tokens,
            samples_ms=list(self.samples_ms),
            warmup=self.warmup,
            conditions=dict(self.conditions),
            turn_sizes=list(self.turn_sizes),
        )

    @classmethod
    def from_json(cls, document: MeasurementDocument) -> "Measurement":
        """The measurement that `to_json` wrote. Raises BadInput when a key is missing."""
        missing = sorted(MeasurementDocument.__required_keys__ - document.keys())
        if missing:
            raise BadInput(f"a measurement without {', '.join(missing)}; take one that `Measurement.to_json` wrote")
        return cls(
            candidate=document["candidate"],
            batch=document["batch"],
            tokens=document["tokens"],
            samples_ms=tuple(document["samples_ms"]),
            warmup=document["warmup"],
            conditions=dict(document["conditions"]),
            turn_sizes=tuple(document["turn_sizes"]),
        )


class Ratio(NamedTuple):
    """`a`'s median time over `b`'s (above 1: `b` is faster), with a 95 % interval."""

    a: str
    b: str
    ratio: float
    low: float
    high: float


def ratio(a: Measurement, b: Measurement, *, resamples: int = 2000, seed: int = 0) -> Ratio:
    """`a.p50_ms / b.p50_ms` with a percentile bootstrap over turns.

    Calls of one turn share the machine's mood (clock, caches, neighbours), so the turn, not the call, is what is drawn
    with replacement. Equal numbers of turns are drawn in pairs: turn i of both was taken at nearly the same time.
    Raises BadInput for different workloads, or fewer than two turns.
    """
    if (a.batch, a.tokens) != (b.batch, b.tokens):
        raise BadInput(
            f"{a.candidate!r} was timed at batch {a.batch} x {a.tokens} tokens and {b.candidate!r} at "
            f"batch {b.batch} x {b.tokens}; a ratio needs one workload for both"
        )
    turns_a, turns_b = a.turns_ms(), b.turns_ms()
    if min(len(turns_a), len(turns_b)) < 2:
        raise BadInput(
            f"{a.candidate!r} has {len(turns_a)} turns and {b.candidate!r} has {len(turns_b)}; "
            "an interval needs at least 2 of each: measure with turns=2 or more"
        )
    rng = np.random.default_rng(seed)
    drawn = np.empty(resamples)
    for i in range(resamples):
        picks_a = rng.integers(len(turns_a), size=len(turns_a))
        picks_b = picks_a if len(turns_a) == len(turns_b) else rng.integers(len(turns_b), size=len(turns_b))
        drawn[i] = _median_of(turns_a, picks_a) / _median_of(turns_b, picks_b)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Ratio(a.candidate, b.candidate, a.p50_ms / b.p50_ms, float(low), float(high))


def _median_of(turns_ms: Sequence[npt.NDArray[np.float64]], picks: npt.NDArray[np.int64]) -> float:
    return float(np.median(np.concatenate([turns_ms[i] for i in picks])))
