"""Finds the fastest int8 file that passes the gate on validation.

Three kinds are tried in order until one passes: 7-bit weights, which give the same sums on every processor; 8-bit
weights, which do not on processors without VNNI; and 7-bit weights with the products that cost most accuracy put back to
float32 one by one. Both whole and clipped ranges are tried; of those that pass, the one with the smaller mean divergence
from float32 on validation is taken. The task metric of a few hundred texts is too coarse for that choice.
"""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from compress.data.batches import batches_by_length
from compress.data.encoded import Encoded
from compress.data.examples import Example, clusters_of
from compress.data.sampler import subset
from compress.evaluation.metrics import Prediction, Score
from export.precision.int8 import NO_SATURATION, Quantised, WeightBits, quantise_static
from export.precision.int8_preparation import Prepared
from serve.bundle.cpu import cpu_features, suits
from serve.bundle.runtimes import Runtime
from serve.model.session import Session

if TYPE_CHECKING:
    pass

# Validation texts on which the cost of each product is measured: a divergence needs fewer texts than a metric.
SWEEP_TEXTS = 256

UNREPAIRED = "unrepaired.onnx"

# The largest share of products that a repair puts back to float32.
MOST_KEPT = 0.5

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """A graph's metric on a split, and how far its answers are from float32's."""

    value: float
    """The task metric."""
    low: float
    high: float
    share: float
    """Share of float32's metric; without labels, share of the rows with float32's label, or for numbers and vectors the metric against
    float32's."""
    divergence: float
    """Mean over rows of the Kullback-Leibler divergence from float32's label distribution, in nats. For numbers, the mean squared
    difference as a share of their variance; for vectors, the mean of one minus the cosine."""
    labels_changed_per_10k: float
    """Per 10,000 rows; a row is a word in token classification, an end of an answer to a question, else a text. Numbers change where they
    can be told apart, a vector where the nearest text is another."""
    answers_changed: int
    """Texts whose answer differs from float32's in any part."""
    spans_changed: int
    """Entities (or labels that apply) that are in only one of the two answers."""


@dataclass(frozen=True)
class Weighed:
    """A graph's distance from float32: with `product` alone in int8, or with it and those before it back in float32."""

    product: str
    divergence: float
    share: float


@dataclass(frozen=True)
class Attempt:
    """One int8 file that was evaluated."""

    weight_bits: WeightBits
    clipped: bool
    verdict: Verdict


@dataclass
class Search:
    """How the int8 file was found."""

    needed: float
    """The gate: the least share of float32's metric."""
    tried: list[Attempt] = field(default_factory=list)
    costs: list[Weighed] = field(default_factory=list)
    """The cost of each product when it alone is int8, the costliest first; empty without a repair."""
    repaired: list[Weighed] = field(default_factory=list)
    """The products put back to float32 in order, with the result of each and those before it."""
    reached: Verdict | None = None
    held: bool = False
    weight_bits: WeightBits = 7
    clipped: bool = False


class Judged(NamedTuple):
    """The logits of one graph for all texts, and its verdict."""

    logits: list[np.ndarray]
    verdict: Verdict


class Evaluator:
    """Validation texts, and float32's answers to them.

    Without labels (`labelled` False) float32's answers are the reference, and a graph's share is the share of rows to
    which it gives float32's label. For questions it chooses on these texts the score from which answers are given, unless `chooses` is
    false: then it is that of `encoded`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        encoded: Encoded,
        fp32: Path,
        max_length: int,
        threads: int | None = None,
        *,
        labelled: bool = True,
        chooses: bool = True,
    ) -> None:
        self.encoded = encoded
        self.task = task = encoded.task
        self.max_length = max_length
        self.threads = threads
        self.fp32_file = fp32
        self.labelled = labelled
        self.expected = self.logits(fp32)
        if chooses:
            self.encoded = encoded = task.with_threshold(encoded, examples, self.expected)
        self.said = task.predictions(encoded, self.expected)
        self.clusters = clusters_of(examples) if labelled else None
        self.gold: list[Prediction] = [task.gold_of(e) for e in examples] if labelled else self.said
        self.fp32: Score = task.metric.score(self.gold, self.said, clusters=self.clusters)

    def judge(self, onnx_file: Path, runtime: Runtime = "onnxruntime") -> Judged:
        """The logits of `onnx_file` for all texts, and its verdict. float32 in onnxruntime is not run again."""
        known = onnx_file == self.fp32_file and runtime == "onnxruntime"
        logits = self.expected if known else self.logits(onnx_file, runtime)
        return Judged(logits, self._verdict_on(logits))

    def logits(
        self, onnx_file: Path, runtime: Runtime = "onnxruntime", encoded: Encoded | None = None
    ) -> list[np.ndarray]:
        """The logits of `onnx_file` for all texts, or for those in `encoded`, as from `session_logits`."""
        session = Session(onnx_file, self.threads, runtime, self.max_length)
        return session_logits(session, self.encoded if encoded is None else encoded)

    def _verdict_on(self, actual: Sequence[np.ndarray]) -> Verdict:
        said = self.task.predictions(self.encoded, actual)
        reached = self.task.metric.score(self.gold, said, clusters=self.clusters)
        divergence, changed = self.task.distance(self.expected, actual)
        return Verdict(
            reached.value,
            reached.low,
            reached.high,
            self._share(reached.value, changed),
            divergence,
            changed * 10_000,
            self.task.answers_changed(self.said, said),
            sum(
                len(ours ^ theirs)
                for ours, theirs in zip(said, self.said, strict=True)
                if isinstance(ours, frozenset) and isinstance(theirs, frozenset)
            ),
        )

    def _share(self, reached: float, changed: float) -> float:
        if self.labelled:
            return reached / max(self.fp32.value, 1e-12)
        return 1 - changed if self.task.share_of_rows else reached

    def cost(self, onnx_file: Path, runtime: Runtime = "onnxruntime") -> tuple[float, float]:
        """The divergence, and the share of float32's metric, on the same `SWEEP_TEXTS` texts in every call."""
        asked = subset(range(len(self.gold)), SWEEP_TEXTS)
        gold = [self.gold[i] for i in asked]
        owners = self.encoded.owners
        chosen = asked if owners is None else np.flatnonzero(np.isin(owners, asked)).tolist()
        part = self.encoded.take(chosen)
        expected = [self.expected[i] for i in chosen]
        actual = self.logits(onnx_file, runtime, part)
        metric = self.task.metric
        ours, theirs = (
            metric.value(metric.counts(gold, self.task.predictions(part, logits))) for logits in (actual, expected)
        )
        return self.task.distance(expected, actual)[0], ours / max(theirs, 1e-12)


def with_intervals(scores: Mapping[str, Score | Verdict]) -> dict[str, dict[str, float]]:
    """Plain JSON types: each metric with the ends of its interval, by the names of `scores`."""
    return {name: {"value": each.value, "low": each.low, "high": each.high} for name, each in scores.items()}


def session_logits(session: Session, encoded: Encoded) -> list[np.ndarray]:
    """The logits of each text's rows from a session, in the shapes of `compress.evaluation.predictions.row_logits`."""
    out: list[np.ndarray] = [np.empty(0)] * len(encoded)
    for chosen in batches_by_length([len(ids) for ids in encoded.ids]):
        for i, logits in zip(chosen, session.run([encoded.encodings[i] for i in chosen]), strict=True):
            out[i] = logits[encoded.rows[i]] if encoded.task.per_token else logits[None]
    return out


class Found(NamedTuple):
    """The int8 file that was found, its search, and its logits and verdict on validation."""

    quantised: Quantised
    search: Search
    judged: Judged


def find_int8(
    prepared: Prepared,
    evaluator: Evaluator,
    out: Path,
    gate: float,
    progress: Progress = lambda _: None,
    *,
    runtime: Runtime = "onnxruntime",
    features: Collection[str] | None = None,
) -> Found:
    """Write the int8 file `out`: the first in the module's order that keeps the share `gate` of float32's metric in `runtime`.

    When none does, `Search.held` is False and `out` is the last file tried. The file before a repair is kept beside it as
    `unrepaired.onnx`. 8-bit weights are tried only where the processor has one of `NO_SATURATION`; `features` replaces
    this machine's features. Each file runs over all texts once.
    """
    search = Search(needed=gate)

    def quantised(bits: WeightBits, clipped: bool, kept: Sequence[str] = ()) -> Quantised:
        return quantise_static(prepared.model, out, prepared.ranges, weight_bits=bits, clipped=clipped, kept=kept)

    def attempt(bits: WeightBits, clipped: bool) -> tuple[Attempt, Judged]:
        quantised(bits, clipped)
        judged = evaluator.judge(out, runtime)
        return Attempt(bits, clipped, judged.verdict), judged

    def take(attempted: tuple[Attempt, Judged]) -> Found:
        tried, judged = attempted
        search.reached, search.weight_bits, search.clipped = tried.verdict, tried.weight_bits, tried.clipped
        return Found(quantised(tried.weight_bits, tried.clipped), search, judged)

    every: tuple[WeightBits, ...] = (7,)
    if suits(NO_SATURATION, cpu_features() if features is None else features):
        every = (7, 8)
    nearest: list[tuple[Attempt, Judged]] = []
    for bits in every:
        both = [attempt(bits, clipped) for clipped in (False, True)]
        search.tried += [tried for tried, _ in both]
        holding = [each for each in both if each[0].verdict.share >= gate]
        nearest.append(min(holding or both, key=lambda each: each[0].verdict.divergence))
        if holding:
            search.held = True
            return take(nearest[-1])
    seven = nearest[0]
    share = seven[0].verdict.share
    progress(f"int8 keeps {share:.4f} of the fp32 metric, needed {gate:g}: measuring what each product costs")
    search.costs = _costs(prepared, evaluator, out, runtime, clipped=seven[0].clipped, progress=progress)
    found = take(seven)
    shutil.copyfile(out, out.with_name(UNREPAIRED))
    kept: list[str] = []
    for cost in search.costs[: int(len(prepared.products) * MOST_KEPT)]:
        kept.append(cost.product)
        found = Found(quantised(7, search.clipped, kept), search, evaluator.judge(out, runtime))
        search.reached = found.judged.verdict
        search.repaired.append(Weighed(cost.product, search.reached.divergence, search.reached.share))
        progress(f"{cost.product} back to fp32: int8 keeps {search.reached.share:.4f} of the fp32 metric")
        if search.reached.share >= gate:
            search.held = True
            break
    return found


def _costs(
    prepared: Prepared, evaluator: Evaluator, out: Path, runtime: Runtime, *, clipped: bool, progress: Progress
) -> list[Weighed]:
    """The cost of each product alone, the costliest first. `out` is overwritten."""
    found = []
    for number, name in enumerate(prepared.products, 1):
        others = [product for product in prepared.products if product != name]
        quantise_static(prepared.model, out, prepared.ranges, clipped=clipped, kept=others)
        divergence, share = evaluator.cost(out, runtime)
        found.append(Weighed(name, divergence, share))
        if number % 6 == 0:
            progress(f"{number} of {len(prepared.products)} products measured")
    return sorted(found, key=lambda cost: -cost.divergence)
