"""Traces, as a collector receives them from a real server."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import Asked, answer
from loopback import serving as loopback
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from repository import ROOT
from server_process import serving
from starlette.testclient import TestClient

from serve.http.app import create_app
from serve.settings import ServeSettings

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


async def accept(asked: Asked) -> bytes:
    """A collector's answer to spans."""
    assert asked.head.startswith("POST /v1/traces ")
    return answer()


def attributes(span: Span) -> dict[str, object]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


@pytest.fixture(scope="module")
def collected(entities_bundle: Path, broken_bundle: Path) -> tuple[bytes, dict[str, str], list[Span]]:
    """All bytes, the resource and the spans of a server that was asked four things and told to stop."""
    with loopback(accept) as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://localhost:{collector.port}")
        patch.setenv("OTEL_SERVICE_NAME", "cities-api")
        with serving(entities_bundle, broken_bundle) as server:
            headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01", "X-Request-Id": "the-first"}
            server.post("/v1/entities", json={"text": ["fly to rome", "oslo"]}, headers=headers).raise_for_status()
            unsampled = {"traceparent": f"00-{TRACE_ID}-{CALLER}-00", "X-Request-Id": "the-unsampled"}
            server.post("/v1/entities", json={"text": "paris"}, headers=unsampled).raise_for_status()
            server.post("/v1/entities", json={"text": 1}, headers={"X-Request-Id": "the-refused"})
            failing = {"text": "refund", "model": "broken"}
            server.post("/v1/entities", json=failing, headers={"X-Request-Id": "the-failed"})
    bodies = [asked.body for asked in collector.asked]
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    resources = [resource for request in requests for resource in request.resource_spans]
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    named = {each.key: each.value.string_value for each in resources[0].resource.attributes}
    return b"".join(bodies), named, spans


def test_a_request_is_a_span_with_its_stages_in_order(collected: tuple[bytes, dict[str, str], list[Span]]) -> None:
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


def test_refusals_are_spans_and_unsampled_requests_are_not(collected: tuple[bytes, dict[str, str], list[Span]]) -> None:
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


def test_without_the_packages_it_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from serve.observe.tracing import traces_from_environment

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert traces_from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}) is None
    assert "pip install '.[otel]'" in caplog.text


def test_an_absent_collector_costs_no_answer(entities_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with TestClient(create_app([entities_bundle], ServeSettings(processes=1))) as client:
            for _ in range(3):
                client.post("/v1/entities", json={"text": "rome"}).raise_for_status()


def test_onnxruntime_is_told_to_report_nothing_before_it_is_loaded(entities_bundle: Path, tmp_path: Path) -> None:
    # What would stop it by itself is left out: it looks for the names that continuous integration sets.
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    code = f"from serve import Pipeline; Pipeline({str(entities_bundle)!r})('Ms Keller moved to Graz')"
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, cwd=tmp_path, check=True)
    # Where it does report, it keeps an identifier and a queue of events here.
    assert not list((tmp_path / ".cache").rglob("*"))


def test_reports_of_onnxruntime_can_be_switched_on() -> None:
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "0", "PYTHONPATH": str(ROOT)}
    code = "import os, serve; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    said = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert said.stdout.strip() == "0"
