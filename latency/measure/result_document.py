"""The JSON document of `stillroom profile`: raw samples, their conditions, and all derived figures."""

from typing import Literal, NotRequired, TypedDict

from latency.measure.machine import MachineFacts
from latency.measure.statistics import Condition

Interval = list[float]  # [low, high], 95 %


class CandidateRow(TypedDict):
    """One candidate at one batch size and length: the model alone, on rows of exactly that many tokens."""

    name: str
    runtime: str
    precision: str
    device: str
    batch: int
    tokens: int
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    intervals_ms: dict[str, Interval]  # by percentile: "p50", "p90", "p95", "p99"
    texts_per_s: float
    metric: NotRequired[float]  # the task metric of this candidate
    size_bytes: int  # of the weights on disk
    doubts: list[str]
    warmup: int  # calls that were not recorded
    conditions: dict[str, Condition]
    samples_ms: list[float]
    turn_sizes: list[int]  # samples of each turn


class RatioRow(TypedDict):
    """`a`'s p50 over `b`'s on one workload, paired turn by turn, with a 95 % interval; above 1: `b` is faster."""

    a: str
    b: str
    ratio: float
    low: float
    high: float
    batch: int
    tokens: int


class SingleStream(TypedDict):
    """One real text at a time, from text to answer: tokenise, run, decode."""

    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    intervals_ms: dict[str, Interval]
    texts_per_s: float  # one after another, from the mean latency
    over_first: NotRequired[list[float]]  # [ratio, low, high]: p50 of the first candidate over this one's, same texts
    parts_ms: dict[str, float]  # medians of "tokenise", "run", "decode"
    doubts: list[str]
    conditions: dict[str, Condition]
    samples: list[list[float]]  # [tokens, tokenise_ms, run_ms, decode_ms] of each call
    turn_sizes: list[int]


class Offline(TypedDict):
    """All texts at once, sorted by length into batches of a token budget: the throughput of one process."""

    texts: int  # in a pass
    texts_per_s: float
    interval: Interval
    tokens_per_s: float  # without padding
    padding_share: float  # of all computed tokens
    batch_tokens: int
    joules_per_text: NotRequired[float]  # of all processor packages, other processes included
    passes_s: list[float]  # wall seconds of each pass over the texts


class Trial(TypedDict):
    """One tried rate of arrivals."""

    rate_per_s: float
    queries: int  # answered; fewer than arrived when the trial missed its bound and was cut short
    p50_ms: float  # from the due moment
    p99_ms: float
    held: bool  # p99 stayed under the bound
    latencies_ms: list[float]


class Server(TypedDict):
    """Poisson arrivals, whether or not earlier texts are answered."""

    bound_ms: float
    rate_per_s: float  # the highest whose p99 stayed under the bound; 0: no tried rate did
    trials: list[Trial]


class Cost(TypedDict, total=False):
    """The costs of a model. An absent figure is unknown on this machine."""

    cold_start_ms: float  # process start to first answer
    load_ms: float
    first_answer_ms: float
    memory_peak_bytes: int  # resident memory of the whole process
    memory_steady_bytes: int  # after measuring
    size_bytes: int
    parameters: int
    flops_per_text: float  # at the texts' mean length, without padding
    gflop_per_s: float  # reached offline
    peak_share: float  # of the machine's measured matrix peak at this precision
    bytes_per_text: float  # single stream, the least to move: every weight once
    bandwidth_share: float  # of the machine's measured bandwidth, single stream
    joules_per_text: float
    texts_per_hour: float
    price_per_million: float  # in the unit of the price per core-hour that was given


class OperatorRow(TypedDict):
    """One kind of operator in one layer of the graph."""

    layer: str  # "embeddings", "layer 0", ..., "head"
    kind: str  # "MatMul", "LayerNormalization", ...
    ms: float  # of one call: the sum of its nodes' medians
    share: float  # of the graph's time
    calls: int  # nodes of this kind in the layer


class Operators(TypedDict):
    """Time of a graph by operator, for one row of the grid's first length."""

    tokens: int
    top: list[OperatorRow]  # the ten with the largest share
    by_kind: dict[str, float]  # share of the time
    by_layer: dict[str, float]
    matrix_share: float  # in products of matrices, attention included


class Metric(TypedDict):
    """The task metric of one candidate, on the labelled texts that it was timed on."""

    name: str
    value: float
    low: float
    high: float
    examples: int


class ModelRow(TypedDict):
    """All results of one candidate except the grid."""

    name: str
    model: str  # the path of the file or folder that ran
    runtime: str
    precision: str
    device: str
    threads: int
    metric: NotRequired[Metric]
    single_stream: NotRequired[SingleStream]
    offline: NotRequired[Offline]
    server: NotRequired[Server]
    cost: Cost
    operators: NotRequired[Operators]
    notes: list[str]  # what was left out for this candidate, and the reason


class Peaks(TypedDict, total=False):
    """The peaks of this machine in products of large matrices and in copying, with the candidates' threads."""

    threads: int
    fp32_gflop_per_s: float
    bf16_gflop_per_s: float
    int8_gflop_per_s: float  # billions of integer operations
    bandwidth_gb_per_s: float


class Work(TypedDict):
    """The timed texts."""

    source: str
    texts: int
    tokens_mean: float
    tokens_percentiles: dict[str, float]  # "p50", "p90", "p99", "max"


Verdict = Literal["met", "perhaps", "missed"]  # "perhaps": the interval crosses the budget


class Budget(TypedDict):
    """The answer to --budget-ms."""

    budget_ms: float
    percentile: int
    best: str | None  # the candidate with the best metric (without metrics: the fastest) that meets it
    nearest: str  # the fastest at that percentile
    nearest_ms: float
    verdict: Verdict
    sentence: str


class SweepRow(TypedDict):
    """One use of the cores: `processes` copies of one model with `threads` threads each."""

    name: str
    threads: int
    processes: int
    p50_ms: float
    p99_ms: float
    texts_per_s: float  # of all processes together


class PaperTiming(TypedDict):
    """The time measured here for a model of the papers, in the fastest runtime of a kind."""

    name: str
    p50_ms: float
    speedup: list[float]  # [ratio, low, high] over the teacher in torch fp32 on the same device; empty where not timed


class PaperRow(TypedDict):
    """A model of the papers: the published time and speed-up, and those measured here by runtime and precision."""

    model: str
    device: str
    tokens: int
    theirs_ms: float
    theirs_speedup: float
    ours: dict[str, PaperTiming]


class GivenModel(TypedDict):
    """A model as given, so that it can be timed again."""

    model: str  # its path
    mark: str  # SHA-256 of its content


class RegressionRow(TypedDict):
    """A model compared with its earlier version, timed together: `ratio` is the new time over the old."""

    name: str
    before: str
    where: str  # "batch 1 x 16 tokens", "single stream"
    ratio: float
    low: float
    high: float
    slower: bool


class SpeedGate(TypedDict):
    """A gate on the speed of a model relative to an earlier report, and its result."""

    name: str
    value: float
    needed: float
    passed: bool


class ProfileDocument(TypedDict):
    """The result of `profile`, and the value of "latency" in `report.json`."""

    machine: MachineFacts
    candidates: list[CandidateRow]
    ratios: list[RatioRow]
    models: NotRequired[list[ModelRow]]
    work: NotRequired[Work]
    peaks: NotRequired[Peaks]
    front: NotRequired[list[str]]  # names on the Pareto front of metric against single-stream p50
    budget: NotRequired[Budget]
    sweep: NotRequired[list[SweepRow]]
    paper: NotRequired[list[PaperRow]]
    given: NotRequired[list[GivenModel]]
    regression: NotRequired[list[RegressionRow]]
    gates: NotRequired[list[SpeedGate]]  # one for each row of `regression`
    report: NotRequired[str]  # the page, if --out was given
    command: NotRequired[str]  # the command that measures these figures again
    warnings: NotRequired[list[str]]
    left_out: NotRequired[
        list[str]
    ]  # what was not timed and why; of runtimes that are not installed, how to install them
