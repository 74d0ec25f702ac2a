"""What the server counts, for Prometheus to scrape. Each app has its own registry, so that two apps never mix."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
            "Texts per run of the model",
            ["model"],
            buckets=BATCH_BUCKETS_TEXTS,
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "stillroom_stage_seconds",
            "Seconds in one stage: tokenise and decode per request, run per batch",
            ["model", "stage"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.queue_texts = Gauge("stillroom_queue_texts", "Texts that wait for the model", ["model"], registry=registry)
        self.model_info = Gauge(
            "stillroom_model_info",
            "1 for each model served",
            ["model", "task", "variant", "digest"],
            registry=registry,
        )

    def text(self) -> bytes:
        """Everything counted so far, in Prometheus's text format."""
        return generate_latest(self.registry)
