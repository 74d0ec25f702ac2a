"""Traces for OpenTelemetry: one span for each request, with the stages of its answer as children. Off by default.

The environment variable OTEL_EXPORTER_OTLP_ENDPOINT switches tracing on and is the address of the collector. The SDK itself
reads the standard's other variables, such as OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS. Spans hold no
texts, no labels and no keys.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Scope

from serve.observe.request_context import RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("serve")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

# How long a stopping server tries to send its last spans.
LAST_SENDING_S = 2.0


class Traces:
    """Spans of requests. A thread of its own gives them to `exporter` in batches."""

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # A service name in the environment takes precedence over ours.
        resource = Resource.create().merge(Resource({SERVICE_NAME: "stillroom"})).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._exporter = exporter
        self._tracer = self._provider.get_tracer("stillroom")
        self._propagator = TraceContextTextMapPropagator()

    def add(self, scope: Scope, context: RequestContext, endpoint: str) -> None:
        """Adds the spans of a request that has just ended, as children of the caller's span if it sent a `traceparent`.

        Only POST is traced: requests to models, and not health checks.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        if scope["method"] != "POST":
            return
        ended_s = time.perf_counter()
        zero_ns = time.time_ns() - int(ended_s * 1e9)  # the time of day at 0 of perf_counter
        headers = Headers(scope=scope)
        span = self._tracer.start_span(
            f"POST {endpoint}",
            self._propagator.extract(
                {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
            ),
            SpanKind.SERVER,
            _attributes(context, endpoint),
            start_time=zero_ns + int(context.begun_s * 1e9),
        )
        if span.is_recording():
            if context.status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            inside, at_s = set_span_in_context(span), context.queued_s
            for name, seconds in context.stage_seconds().items():
                stage = self._tracer.start_span(name, inside, start_time=zero_ns + int(at_s * 1e9))
                # Stages are timed in another process; none may end after its request.
                at_s = min(at_s + seconds, ended_s)
                stage.end(zero_ns + int(at_s * 1e9))
        span.end(zero_ns + int(ended_s * 1e9))

    def close(self) -> None:
        """Sends the remaining spans; gives up if the collector has not accepted them after `LAST_SENDING_S`."""
        giving_up = threading.Timer(LAST_SENDING_S, self._exporter.shutdown)
        giving_up.start()
        try:
            self._provider.shutdown()
        finally:
            giving_up.cancel()


def traces_from_environment(environment: Mapping[str, str] = os.environ) -> Traces | None:
    """Traces to the collector that `environment` names; None, and nothing imported, if it names none.

    If the packages for tracing are missing, it logs a warning and returns None. It is no error, since such variables are often set
    for a whole cluster.
    """
    off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none"
    )
    named = next((name for name in ENDPOINTS if environment.get(name)), None)
    if off or named is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        log.warning(
            "%s is set, but requests are not traced (%s); in a clone of stillroom, pip install '.[otel]'", named, error
        )
        return None
    return Traces(OTLPSpanExporter())


def _attributes(context: RequestContext, endpoint: str) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "http.request.method": "POST",
        "http.route": endpoint,
        "http.response.status_code": context.status,
        "stillroom.request_id": context.request_id,
    }
    if context.model is not None and context.variant is not None:
        attributes |= {
            "stillroom.model": context.model,
            "stillroom.variant": context.variant,
            "stillroom.texts": context.texts,
        }
    if context.error_code is not None:
        attributes["error.type"] = context.error_code
    return attributes
