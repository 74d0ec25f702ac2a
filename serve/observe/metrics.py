"""The server's metrics for Prometheus. Each app has its own registry, so that two apps in one process do not mix."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

# Seconds: from one short text at an idle server to a full queue.
LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# Seconds: from the tokens of one short text to a long batch of a slow model.
STAGE_BUCKETS_S = (0.0001, 0.0002, 0.0005, *LATENCY_BUCKETS_S[:-1])
BATCH_BUCKETS_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


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
            "stillroom_request_seconds",
            "Seconds from request to answer",
            ["endpoint"],
            LATENCY_BUCKETS_S,
            registry,
        )
        self.errors = Counter(
            "stillroom_errors",
            "Requests answered with an error, or not answered because the client left (client_gone), by the error's code",
            ["endpoint", "code"],
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "stillroom_queue_seconds",
            "Seconds that a request waited for a worker process: the wait of the text that was answered last",
            ["model"],
            STAGE_BUCKETS_S,
            registry,
        )
        self.batch_texts = Histogram(
            "stillroom_batch_texts",
            "Texts in one run of the model",
            ["model"],
            BATCH_BUCKETS_TEXTS,
            registry,
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
            "Batches given to a worker process, by reason: idle (it was idle or new), full, freed (it took all waiting texts)",
            ["model", "reason"],
            registry=registry,
        )
        self.restarts = Counter(
            "stillroom_process_restarts", "Attempts to replace a worker process that died", ["model"], registry=registry
        )
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
        self.processes = Gauge("stillroom_processes", "Worker processes that can compute", ["model"], registry=registry)
        self.model_info = Gauge(
            "stillroom_model_info",
            "1 for each model served",
            ["model", "task", "variant", "digest"],
            registry=registry,
        )
        self.connections = Gauge("stillroom_connections", "Open connections", registry=registry)
        self.shed = Counter(
            "stillroom_shed_requests",
            "Requests answered 429 before they were read, by reason: full (the queue of every model), behind (too many to read)",
            ["reason"],
            registry=registry,
        )
        for reason in ("full", "behind"):  # present from the start: in Prometheus a sum with a missing series is empty
            self.shed.labels(reason)
        self.connections_cut = Counter(
            "stillroom_connections_cut",
            "Connections cut off or refused, by reason",
            ["reason"],
            registry=registry,
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
        processes: Callable[[], int],
    ) -> None:
        """Adds a model that is served from now on, or replaces an earlier one of its name.

        `waiting_texts` (texts in the model's queue) and `processes` (its worker processes) are called at each scrape.
        """
        self.queue_texts.labels(model).set_function(waiting_texts)
        self.processes.labels(model).set_function(processes)
        if before := self._serving.get(model):
            self.model_info.remove(*before)
        self._serving[model] = (model, task, variant, digest)
        self.model_info.labels(*self._serving[model]).set(1)

    def answered(self, model: str, queue_s: float) -> None:
        """Counts one request that a model has answered."""
        self.queue_seconds.labels(model).observe(queue_s)

    def ran(
        self,
        model: str,
        *,
        texts: int,
        tokens: int,
        padded_tokens: int,
        tokenise_s: float,
        run_s: float,
        decode_s: float,
    ) -> None:
        """Counts one run of a model. Without texts it counts only the time to tokenise a batch in which some texts failed."""
        if tokenise_s:  # of the whole batch, given with its first run
            self.stage_seconds.labels(model, "tokenise").observe(tokenise_s)
        if not texts:
            return
        self.batch_texts.labels(model).observe(texts)
        self.stage_seconds.labels(model, "run").observe(run_s)
        self.stage_seconds.labels(model, "decode").observe(decode_s)
        self.tokens.labels(model, "text").inc(tokens)
        self.tokens.labels(model, "padding").inc(padded_tokens - tokens)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)
