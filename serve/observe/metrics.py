"""The server's metrics for Prometheus. Each app has its own registry, so that two apps in one process do not mix."""

from collections.abc import Callable
from functools import cache

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

# Seconds: from one short text at an idle server to a full queue.
LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# Seconds: from the tokens of one short text to a long batch of a slow model.
STAGE_BUCKETS_S = (0.0001, 0.0002, 0.0005, *LATENCY_BUCKETS_S[:-1])
BATCH_BUCKETS_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# No second series with the time of creation for each counter and histogram: hardly any query reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The server's metrics. Units are in the names, as Prometheus recommends: seconds and texts."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("stillroom_requests", "Requests answered", ["endpoint", "status"], registry=registry)
        self.request_seconds = Histogram(
            "stillroom_request_seconds",
            "Seconds from request to answer",
            ["endpoint"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
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
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self.batch_texts = Histogram(
            "stillroom_batch_texts",
            "Texts in one run of the model",
            ["model"],
            buckets=BATCH_BUCKETS_TEXTS,
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "stillroom_stage_seconds",
            "Seconds in one stage: tokenise, per batch; run and decode, per run of the model",
            ["model", "stage"],
            buckets=STAGE_BUCKETS_S,
            registry=registry,
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
        # To find a series by its labels takes longer than to count.
        self._queue_seconds = cache(self.queue_seconds.labels)
        self._stage_seconds = cache(self.stage_seconds.labels)
        self._batch_texts = cache(self.batch_texts.labels)
        self._tokens = cache(self.tokens.labels)

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
        self._queue_seconds(model).observe(queue_s)

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
            self._stage_seconds(model, "tokenise").observe(tokenise_s)
        if not texts:
            return
        self._batch_texts(model).observe(texts)
        self._stage_seconds(model, "run").observe(run_s)
        self._stage_seconds(model, "decode").observe(decode_s)
        self._tokens(model, "text").inc(tokens)
        self._tokens(model, "padding").inc(padded_tokens - tokens)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)
