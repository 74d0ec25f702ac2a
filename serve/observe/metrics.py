"""The server's metrics for Prometheus, and the watch on texts that are unlike those of validation.

Each app has its own registry, so that two apps in one process do not mix.
"""

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from serve.observe.logs import FIELDS

log = logging.getLogger("serve")

# Seconds: from one short text at an idle server to a full queue.
LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# Seconds: from the tokens of one short text to a long batch of a slow model.
STAGE_BUCKETS_S = (0.0001, 0.0002, 0.0005, *LATENCY_BUCKETS_S[:-1])
BATCH_BUCKETS_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# See `Drift`.
WINDOW_TEXTS = 250
LONG_WINDOWS = 4
ALARM_DEVIATIONS = 5.0
# `confidence` is the mean of `serve.text.answers.confidence` over texts, `tokens` that of their lengths.
Quantity = Literal["confidence", "tokens"]
# Where all texts of validation are alike, a change by less than a third of this is no alarm.
LEAST_DEVIATION = {"confidence": 0.01, "tokens": 0.5}


class Counter:
    """A counter by labels. prometheus_client's has a lock for threads, which costs more than the count; only one thread counts here."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._described = (name, text)
        self._labels = labels
        self._counts: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> "Count":
        """The count of the series with these values of the labels."""
        if (count := self._counts.get(values)) is None:
            count = self._counts[values] = Count()
        return count

    def collect(self) -> Iterator[Metric]:
        """The family, for a scrape."""
        family = CounterMetricFamily(*self._described, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count.value)
        yield family


class Count:
    """The count of one series."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Adds `amount`."""
        self.value += amount


class Histogram:
    """A histogram by labels; see `Counter`."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._described = (name, text)
        self._labels = labels
        self._buckets = buckets
        self._spread: dict[tuple[str, ...], Spread] = {}
        registry.register(self)

    def labels(self, *values: str) -> "Spread":
        """What was observed of the series with these values of the labels."""
        if (spread := self._spread.get(values)) is None:
            spread = self._spread[values] = Spread(self._buckets)
        return spread

    def collect(self) -> Iterator[Metric]:
        """The family, for a scrape."""
        family = HistogramMetricFamily(*self._described, labels=self._labels)
        bounds = [*map(floatToGoString, self._buckets), "+Inf"]
        for values, spread in self._spread.items():
            family.add_metric(values, list(zip(bounds, accumulate(spread.counts), strict=True)), spread.total)
        yield family


class Spread:
    """Observations of one series: how many in each bucket (its bound included), and their sum."""

    __slots__ = ("_buckets", "counts", "total")

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = buckets
        self.counts = [0.0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Adds one."""
        self.counts[bisect_left(self._buckets, value)] += 1
        self.total += value


class Metrics:
    """The server's metrics. Units are in the names, as Prometheus recommends: seconds and texts."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("stillroom_requests", "Requests answered", ["endpoint", "status"], registry=registry)
        self.request_seconds = Histogram(
            "stillroom_request_seconds", "Seconds from request to answer", ["endpoint"], LATENCY_BUCKETS_S, registry
        )
        self.errors = Counter(
            "stillroom_errors",
            "Requests answered with an error, or not answered because the client left (client_gone), by the error's code",
            ["endpoint", "code"],
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "stillroom_queue_seconds",
            "Seconds that a request waited for the model: the wait of the text that was answered last",
            ["model"],
            STAGE_BUCKETS_S,
            registry,
        )
        self.batch_texts = Histogram(
            "stillroom_batch_texts", "Texts in one run of the model", ["model"], BATCH_BUCKETS_TEXTS, registry
        )
        self.stage_seconds = Histogram(
            "stillroom_stage_seconds",
            "Seconds in one stage: tokenise, per batch; run and decode, per run of the model",
            ["model", "stage"],
            STAGE_BUCKETS_S,
            registry,
        )
        self.tokens = Counter(
            "stillroom_tokens",
            "Tokens that the model computed, by kind: text, padding",
            ["model", "kind"],
            registry=registry,
        )
        self.released = Counter(
            "stillroom_batches_released",
            "Batches given to the model, by reason: idle (nothing was computed), full, freed (it took all waiting texts)",
            ["model", "reason"],
            registry=registry,
        )
        self.memo_hits = Counter("stillroom_memo_hits", "Texts answered from the memo", ["model"], registry=registry)
        self.memo_misses = Counter(
            "stillroom_memo_misses", "Texts computed since the memo had no answer", ["model"], registry=registry
        )
        self.memo_bytes = Gauge("stillroom_memo_bytes", "Bytes of the answers in the memo", registry=registry)
        self.reloads = Counter(
            "stillroom_reloads", "Bundles opened again while served", ["model", "result"], registry=registry
        )
        watched = ["model", "of"]
        self.drift_mean = Gauge(
            "stillroom_drift_mean", "Mean of the last whole window of texts", watched, registry=registry
        )
        self.drift_expected = Gauge("stillroom_drift_expected", "Mean of validation texts", watched, registry=registry)
        self.drift_deviations = Gauge(
            "stillroom_drift_deviations",
            "Standard deviations from the mean of validation texts",
            watched,
            registry=registry,
        )
        self.drift_alarms = Counter(
            "stillroom_drift_alarms", "How often texts became unlike those of validation", watched, registry=registry
        )
        self.queue_texts = Gauge("stillroom_queue_texts", "Texts that wait for the model", ["model"], registry=registry)
        self.processes = Gauge("stillroom_processes", "Processes that can compute", ["model"], registry=registry)
        self.model_info = Gauge(
            "stillroom_model_info", "1 for each model served", ["model", "task", "variant", "digest"], registry=registry
        )
        self.connections = Gauge("stillroom_connections", "Open connections", registry=registry)
        self.shed = Counter(
            "stillroom_shed_requests",
            "Requests answered 429 before they were read, by reason: full (the queue of every model), behind (too many to read), "
            "unread (clients have not read their answers)",
            ["reason"],
            registry=registry,
        )
        # Present from the start: in Prometheus a sum with a missing series is empty.
        for reason in ("full", "behind", "unread"):
            self.shed.labels(reason)
        self.connections_cut = Counter(
            "stillroom_connections_cut", "Connections cut off or refused, by reason", ["reason"], registry=registry
        )
        self.key_requests = Counter(
            "stillroom_key_requests", "Requests by the name of their key", ["key", "status"], registry=registry
        )
        self.held_body_bytes = Gauge(
            "stillroom_held_body_bytes", "Bytes of request bodies in memory", registry=registry
        )
        ProcessCollector(registry=registry)  # CPU time, memory and open files of the server's own process
        self._serving: dict[str, tuple[str, str, str, str]] = {}

    def serving(
        self,
        model: str,
        *,
        task: str,
        variant: str,
        digest: str,
        waiting_texts: Callable[[], int],
        ready: Callable[[], bool],
    ) -> None:
        """Adds a model that is served from now on, or replaces an earlier one of its name.

        `waiting_texts` (texts in the model's queues) and `ready` (whether it can compute) are called at each scrape.
        """
        self.queue_texts.labels(model).set_function(waiting_texts)
        self.processes.labels(model).set_function(lambda: int(ready()))
        if before := self._serving.get(model):
            self.model_info.remove(*before)
        self._serving[model] = (model, task, variant, digest)
        self.model_info.labels(*self._serving[model]).set(1)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class Expected(NamedTuple):
    """The mean and the standard deviation over `texts` texts of validation."""

    texts: int
    mean: float
    deviation: float


def deviations(mean: float, texts: int, expected: Expected, least: float = LEAST_DEVIATION["confidence"]) -> float:
    """How many standard deviations, each `least` or more for one text, a mean over `texts` texts is above that of validation."""
    deviation = max(expected.deviation, least)
    return (mean - expected.mean) / (deviation * math.sqrt(1 / texts + 1 / expected.texts))


class Drift:
    """Watches a quantity of the texts of the model called `model`: how sure it is of its answers, or how long they are.

    It logs when they are no longer like those of the validation split, and when they are as before. Every `WINDOW_TEXTS` texts, their
    mean, and that of the last `LONG_WINDOWS` windows together, are compared with that of validation: z = (mean - mu) / (sigma
    sqrt(1/n + 1/N)), with mu and sigma of the N texts of validation. Beyond `ALARM_DEVIATIONS` the texts have changed: one window shows a
    large change soon, several show a small one. No window of texts like those of validation reached that
    (docs/measurements/server.md, "Drift"), though both quantities are skewed.
    """

    def __init__(self, model: str, of: Quantity, expected: Expected, metrics: Metrics) -> None:
        self._model, self._of, self._expected, self._metrics = model, of, expected, metrics
        self._texts, self._sum = 0, 0.0
        self._windows: deque[tuple[int, float]] = deque(maxlen=LONG_WINDOWS)  # texts and sum of the last ones
        self.alarmed = False
        metrics.drift_expected.labels(model, of).set(expected.mean)

    def add(self, texts: int, total: float) -> None:
        """Adds `texts` texts, of which `total` is the sum; a whole window is compared, and the next one begins."""
        self._texts += texts
        self._sum += total
        if self._texts < WINDOW_TEXTS:
            return
        self._windows.append((self._texts, self._sum))
        self._texts, self._sum = 0, 0.0
        last = self._windows[-1]
        together = sum(count for count, _ in self._windows), sum(of for _, of in self._windows)
        least = LEAST_DEVIATION[self._of]
        away = max((deviations(of / count, count, self._expected, least) for count, of in (last, together)), key=abs)
        self._metrics.drift_mean.labels(self._model, self._of).set(last[1] / last[0])
        self._metrics.drift_deviations.labels(self._model, self._of).set(away)
        changed = abs(away) > ALARM_DEVIATIONS
        fields: dict[str, object] = {"model": self._model, "of": self._of}
        if changed and not self.alarmed:
            self._metrics.drift_alarms.labels(self._model, self._of).inc()
            mean = round(together[1] / together[0], 4)
            fields |= {"mean": mean, "validation_mean": self._expected.mean, "texts": together[0]}
            log.warning("texts are unlike those of validation: %.1f deviations", away, extra={FIELDS: fields})
        if self.alarmed and not changed:
            log.warning("texts are like those of validation again", extra={FIELDS: fields})
        self.alarmed = changed
