"""What the server counts, for Prometheus to scrape. Each app has its own registry, so that two apps never mix."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve.batcher import Batcher
from serve.bundle import Manifest
from serve.model_process import Answered
from serve.work import Parts, Work

# Seconds: from one short text at an idle server to a full queue.
LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
BATCH_BUCKETS_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The server's counters. Units are in the names, as Prometheus asks: seconds and texts."""

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
        self.batch_texts = Histogram(
            "stillroom_batch_texts",
            "Texts in one run of the model",
            ["model"],
            buckets=BATCH_BUCKETS_TEXTS,
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "stillroom_stage_seconds",
            "Seconds in one stage, per run of the model: tokenise, run, decode",
            ["model", "stage"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.tokens = Counter(
            "stillroom_tokens",
            "Tokens that the model computed: of texts, and padding",
            ["model", "kind"],
            registry=registry,
        )
        self.released = Counter(
            "stillroom_batches_released",
            "Batches given to a process, by reason: idle (it had nothing to do), full, freed (it took all that waited)",
            ["model", "reason"],
            registry=registry,
        )
        self.restarts = Counter(
            "stillroom_process_restarts", "Attempts to replace a process that died", ["model"], registry=registry
        )
        self.reloads = Counter(
            "stillroom_reloads", "Bundles opened again while served", ["model", "result"], registry=registry
        )
        self.queue_texts = Gauge("stillroom_queue_texts", "Texts that wait for the model", ["model"], registry=registry)
        self.model_info = Gauge(
            "stillroom_model_info",
            "1 for each model served",
            ["model", "task", "variant", "digest"],
            registry=registry,
        )
        self._serving: dict[str, tuple[str, str, str, str]] = {}

    def serving(self, manifest: Manifest, variant: str, batcher: Batcher[Work, Answered]) -> None:
        """Speaks of a model that is served from now on, in place of an earlier one of its name."""
        self.queue_texts.labels(manifest.name).set_function(lambda: batcher.waiting)
        if before := self._serving.get(manifest.name):
            self.model_info.remove(*before)
        self._serving[manifest.name] = (manifest.name, manifest.task, variant, manifest.digest)
        self.model_info.labels(*self._serving[manifest.name]).set(1)

    def ran(self, model: str, parts: Parts) -> None:
        """Counts one run of a model."""
        self.batch_texts.labels(model).observe(parts.texts)
        for stage, seconds in (("tokenise", parts.tokenise_s), ("run", parts.run_s), ("decode", parts.decode_s)):
            self.stage_seconds.labels(model, stage).observe(seconds)
        self.tokens.labels(model, "text").inc(parts.tokens)
        self.tokens.labels(model, "padding").inc(parts.padded_tokens - parts.tokens)

    def text(self) -> bytes:
        """Everything counted so far, in Prometheus's text format."""
        return generate_latest(self.registry)
