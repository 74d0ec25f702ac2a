"""Candidates side by side on batches and lengths: one JSON document of raw samples, conditions and ratios."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NotRequired, TypedDict

from latency.candidates import Candidate, size_bytes
from latency.machine import MachineFacts, machine_facts
from latency.measurement import Condition, Measurement, ratio
from latency.turns import Progress, measure
from latency.workloads import from_texts
from serve.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class CandidateRow(TypedDict):
    """One candidate at one batch and length."""

    name: str
    runtime: str
    precision: str
    batch: int
    tokens: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    texts_per_s: float
    metric: NotRequired[float]  # the task metric at this precision
    size_bytes: int  # of the weights on disk
    doubts: list[str]
    warmup: int  # calls made and not kept
    conditions: dict[str, Condition]
    samples_ms: list[float]
    turn_sizes: list[int]  # samples of each turn


class RatioRow(TypedDict):
    """`a`'s p50 over `b`'s on one workload, with a 95 % interval."""

    a: str
    b: str
    ratio: float
    low: float
    high: float
    batch: int
    tokens: int


class ProfileDocument(TypedDict):
    """What `profile` returns, and what `report.json` keeps under "latency"."""

    machine: MachineFacts
    candidates: list[CandidateRow]
    ratios: list[RatioRow]


def profile(
    candidates: Sequence[Candidate],
    texts: Sequence[str],
    tokenizer: "Tokenizer",
    *,
    batches: Sequence[int] = (1, 8),
    lengths: Sequence[int] = (16, 128),
    seconds: float = 2.8,
    turns: int = 7,
    min_samples: int = 21,
    metrics: Mapping[str, float] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> ProfileDocument:
    """Times `candidates` on every batch size and length in tokens, and compares each with the first, the reference.

    `seconds` of timed calls go to each candidate and workload, spread over `turns`. `metrics` holds the task metric by
    candidate name. Raises BadInput for a metric of an unknown candidate, and what `measure` and `from_texts` raise.
    """
    names = [candidate.name for candidate in candidates]
    unknown = sorted(set(metrics or {}) - set(names))
    if unknown:
        raise BadInput(f"metrics were given for {', '.join(unknown)}; the candidates are {', '.join(names)}")
    if turns < 2:
        raise BadInput(f"{turns} turns were asked for; a ratio's interval needs 2 or more")
    machine = machine_facts()  # before the measuring, which would be the load that it sees
    workloads = [from_texts(texts, tokenizer, batch, tokens) for batch in batches for tokens in lengths]
    measurements = measure(
        candidates,
        workloads,
        turns=turns,
        seconds_per_turn=seconds / turns,
        min_samples=min_samples,
        seed=seed,
        progress=progress,
    )
    by_name = {candidate.name: candidate for candidate in candidates}
    reference = {(m.batch, m.tokens): m for m in measurements if m.candidate == names[0]}
    return ProfileDocument(
        machine=machine,
        candidates=[_row(by_name[m.candidate], m, metrics or {}) for m in measurements],
        ratios=[_ratio_row(reference[m.batch, m.tokens], m, seed) for m in measurements if m.candidate != names[0]],
    )


def _row(candidate: Candidate, measured: Measurement, metrics: Mapping[str, float]) -> CandidateRow:
    row = CandidateRow(
        name=candidate.name,
        runtime=candidate.runtime,
        precision=candidate.precision,
        batch=measured.batch,
        tokens=measured.tokens,
        p50_ms=round(measured.p50_ms, 4),
        p90_ms=round(measured.p90_ms, 4),
        p99_ms=round(measured.p99_ms, 4),
        texts_per_s=round(measured.texts_per_s, 1),
        size_bytes=size_bytes(candidate),
        doubts=measured.doubts(),
        warmup=measured.warmup,
        conditions=measured.conditions,
        samples_ms=list(measured.samples_ms),
        turn_sizes=list(measured.turn_sizes),
    )
    if candidate.name in metrics:
        row["metric"] = metrics[candidate.name]
    return row


def _ratio_row(reference: Measurement, measured: Measurement, seed: int) -> RatioRow:
    found = ratio(reference, measured, seed=seed)
    return RatioRow(
        a=found.a,
        b=found.b,
        ratio=round(found.ratio, 4),
        low=round(found.low, 4),
        high=round(found.high, 4),
        batch=measured.batch,
        tokens=measured.tokens,
    )
