"""Traces, as a collector receives them from a real server."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from patience import PATIENCE_S
from server_process import ROOT, running, wait_until_ready

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


@contextlib.contextmanager
def collecting() -> Iterator[tuple[str, list[bytes]]]:
    """The URL of a collector on loopback, and the bodies that it was sent."""
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{collector.server_port}", bodies
        finally:
            collector.shutdown()
            thread.join()


def attributes(span: Span) -> dict[str, object]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


@pytest.fixture(scope="module")
def collected(entities_bundle: Path, broken_bundle: Path) -> tuple[bytes, dict[str, str], list[Span]]:
    """All bytes, the resource and the spans of a server that was asked four things and told to stop."""
    with collecting() as (collector, bodies), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector)
        patch.setenv("OTEL_SERVICE_NAME", "cities-api")
        with (
            running(entities_bundle, broken_bundle) as (url, _),
            httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
        ):
            wait_until_ready(client)
            headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01", "X-Request-Id": "the-first"}
            client.post("/v1/entities", json={"text": ["fly to rome", "oslo"]}, headers=headers).raise_for_status()
            unsampled = {"traceparent": f"00-{TRACE_ID}-{CALLER}-00", "X-Request-Id": "the-unsampled"}
            client.post("/v1/entities", json={"text": "paris"}, headers=unsampled).raise_for_status()
            client.post("/v1/entities", json={"text": 1}, headers={"X-Request-Id": "the-refused"})
            failing = {"text": "refund", "model": "broken"}
            client.post("/v1/entities", json=failing, headers={"X-Request-Id": "the-failed"})
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    resources = [resource for request in requests for resource in request.resource_spans]
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    named = {each.key: each.value.string_value for each in resources[0].resource.attributes}
    return b"".join(bodies), named, spans


def test_a_request_is_a_span_below_its_callers_with_its_stages_in_order(
    collected: tuple[bytes, dict[str, str], list[Span]],
) -> None:
    _, resource, spans = collected
    (request,) = [span for span in spans if attributes(span).get("stillroom.request_id") == "the-first"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE_ID, CALLER)
    assert (request.name, request.kind) == ("POST /v1/entities", Span.SPAN_KIND_SERVER)
    assert attributes(request) == {
        "http.request.method": "POST",
        "http.route": "/v1/entities",
        "http.response.status_code": 200,
        "stillroom.request_id": "the-first",
        "stillroom.model": "cities",
        "stillroom.variant": "fp32",
        "stillroom.texts": 2,
    }
    stages = [span for span in spans if span.parent_span_id == request.span_id]
    assert [stage.name for stage in stages] == ["queue", "tokenise", "run", "decode"]
    moments = [request.start_time_unix_nano]
    for stage in stages:
        moments += [stage.start_time_unix_nano, stage.end_time_unix_nano]
    assert moments == sorted(moments)
    assert stages[-1].end_time_unix_nano <= request.end_time_unix_nano
    assert resource["service.name"] == "cities-api"


def test_a_refusal_is_a_span_with_its_code_and_what_its_caller_does_not_sample_is_none(
    collected: tuple[bytes, dict[str, str], list[Span]],
) -> None:
    _, _, spans = collected
    requests = {attributes(span)["stillroom.request_id"]: span for span in spans if span.kind == Span.SPAN_KIND_SERVER}
    assert set(requests) == {"the-first", "the-refused", "the-failed"}  # and no probe of readiness
    refused = attributes(requests["the-refused"])
    assert (refused["http.response.status_code"], refused["error.type"]) == (422, "invalid_input")
    assert len(requests["the-refused"].trace_id) == 16
    # What the client did wrong is no failure of the server; only that is marked.
    failed = {request_id for request_id, span in requests.items() if span.status.code == Status.STATUS_CODE_ERROR}
    assert failed == {"the-failed"}
    assert attributes(requests["the-failed"])["http.response.status_code"] == 500


def test_no_span_holds_a_text(collected: tuple[bytes, dict[str, str], list[Span]]) -> None:
    sent, _, _ = collected
    assert b"the-first" in sent
    assert not re.search(rb"rome|oslo|paris", sent, re.IGNORECASE)


def test_a_server_that_is_not_asked_to_trace_imports_nothing_for_it(entities_bundle: Path) -> None:
    code = (
        "import sys; from serve.http.app import create_app; create_app(sys.argv[1:]);"
        "print([name for name in sys.modules if name.partition('.')[0] == 'opentelemetry'])"
    )
    for switched_off in ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        done = subprocess.run(
            [sys.executable, "-c", code, entities_bundle],
            cwd=ROOT,
            env={**environment, **switched_off},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "[]\n"


def test_a_server_without_the_packages_says_so_and_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from serve.observe.tracing import traces_from_environment

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert traces_from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}) is None
    assert "pip install '.[otel]'" in caplog.text


def test_a_collector_that_cannot_be_reached_costs_no_answer(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with running(entities_bundle) as (url, process), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            wait_until_ready(client)
            for _ in range(3):
                client.post("/v1/entities", json={"text": "rome"}).raise_for_status()
            process.terminate()
            process.wait(timeout=PATIENCE_S)
        assert process.returncode == 0
