"""A real server in a process of its own, asked over loopback."""

import base64
import gzip
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_bundles import write_manifest
from patience import PATIENCE_S
from repository import ROOT

from serve.__main__ import main
from serve.errors import BadInput
from serve.http.app import create_app
from serve.model.pipeline import Pipeline

JSON = {"Content-Type": "application/json"}


def test_one_text_gets_one_answer(client: httpx.Client) -> None:
    response = client.post("/v1/entities", json={"text": "Fly to 😀 Rome"})

    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "model": "cities",
        "variant": "fp32",
        "results": [
            {
                "entities": [{"label": "city", "text": "Rome", "start": 9, "end": 13, "score": 0.93624}],
                "truncated": False,
            }
        ],
    }


def test_entities_are_read_as_asked(client: httpx.Client, entities_bundle: Path) -> None:
    pipeline, long = Pipeline(entities_bundle), "york a " * 30
    answers = []
    for options in ({}, {"aggregation": "strict"}, {"constrained": True}, {"truncate": True}):
        (result,) = client.post("/v1/entities", json={"text": long, **options}).json()["results"]
        assert result == pipeline(long, **options)
        answers.append(result)
    assert [(len(answer["entities"]), answer["truncated"]) for answer in answers] == [
        (30, False),
        (0, False),
        (30, False),
        (15, True),
    ]
    assert answers[0] != answers[2]


def test_a_text_of_the_most_characters_taken_is_answered_whole(client: httpx.Client) -> None:
    text = ("fly to rome from new york " * 4_000)[:100_000]
    (result,) = client.post("/v1/entities", json={"text": text}).json()["results"]
    assert len(result["entities"]) == text.count("rome") + text.count("new york")
    assert result["truncated"] is False


def test_a_model_that_does_not_know_when_to_abstain_says_so(client: httpx.Client) -> None:
    response = client.post("/v1/classify", json={"text": "refund", "abstain": True})
    assert response.status_code == 422
    assert response.json()["error"]["field"] == "abstain"
    assert "abstain_below" in response.json()["error"]["message"]
    assert "abstained" not in client.post("/v1/classify", json={"text": "refund"}).json()["results"][0]


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=5), unit=st.sampled_from(["codepoints", "utf16", "utf8"])
)
def test_any_text_of_json_is_answered_with_exact_spans(client: httpx.Client, texts: list[str], unit: str) -> None:
    encoding, unit_bytes = {"codepoints": ("utf-32-le", 4), "utf16": ("utf-16-le", 2), "utf8": ("utf-8", 1)}[unit]
    texts = [f"{text}rome" for text in texts]
    response = client.post("/v1/entities", json={"text": texts, "offsets": unit})
    assert response.status_code == 200
    results = response.json()["results"]
    assert len(results) == len(texts)
    for text, result in zip(texts, results, strict=True):
        encoded = text.encode(encoding)
        for entity in result["entities"]:
            cut = encoded[entity["start"] * unit_bytes : entity["end"] * unit_bytes].decode(encoding)
            assert cut == entity["text"] != ""


CODES = {400: "bad_request", 404: "not_found", 413: "too_large", 422: "invalid_input"}
BAD_ENTITIES: dict[str, tuple[bytes, int, str | None]] = {
    "no-text": (b"{}", 422, "text"),
    "a-number-for-text": (b'{"text": 7}', 422, "text"),
    "null-for-text": (b'{"text": null}', 422, "text"),
    "no-texts": (b'{"text": []}', 422, "text"),
    "a-number-in-texts": (b'{"text": ["a", 2]}', 422, "text[1]"),
    "unknown-field": (b'{"text": "a", "txt": 1}', 422, "txt"),
    "not-its-field": (b'{"text": "a", "top_k": 1}', 422, "top_k"),
    "half-a-pair": (b'{"text": "a\\ud83d"}', 422, "text"),
    "other-half": (b'{"text": ["\\udc00"]}', 422, "text[0]"),
    "score": (b'{"text": "a", "min_score": 2}', 422, "min_score"),
    "offsets": (b'{"text": "a", "offsets": "x"}', 422, "offsets"),
    "not-an-object": (b"[]", 422, None),
    "not-json": (b"text=a", 400, None),
    "nothing": (b"", 400, None),
    "not-utf-8": (b'{"text": "\xff"}', 400, None),
    "nan": (b'{"text": "a", "min_score": NaN}', 400, None),
    "very-deep": (b'{"text":' + b"[" * 100_000, 422, "text[0]"),
    "no-such-model": (b'{"text": "a", "model": "x"}', 404, "model"),
    "other-task": (b'{"text": "a", "model": "intents"}', 422, "model"),
    "long-text": (b'{"text": "%s"}' % (b"a" * 100_001), 413, "text"),
    "many-texts": (b'{"text": [%s"a"]}' % (b'"a",' * 2048), 413, "text"),
    "2-mb": (b'{"text": "%s"}' % (b"a" * 2_000_000), 413, None),
}


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        *(pytest.param("/v1/entities", *given, id=name) for name, given in BAD_ENTITIES.items()),
        pytest.param("/v1/classify", b'{"text": "a", "top_k": 0}', 422, "top_k", id="no-labels"),
        pytest.param("/v1/classify", b'{"text": ["a"], "text_pair": "b"}', 422, "text_pair", id="pair-for-list"),
        pytest.param("/v1/nothing", b"{}", 404, None, id="no-such-path"),
        pytest.param("/v1/entities/", b"{}", 404, None, id="a-slash-too-many"),
    ],
)
def test_bad_requests_get_an_error_by_field(
    client: httpx.Client, path: str, body: bytes, status: int, field: str | None
) -> None:
    response = client.post(path, content=body, headers=JSON)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert (error["code"], error.get("field")) == (CODES[status], field)
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert set(error) <= {"code", "message", "field", "type", "param"}
    assert len(error["message"]) > 20


def test_errors_say_what_to_do_and_the_connection_serves_on(client: httpx.Client) -> None:
    wrong = client.post("/v1/classify", json={"text": "a", "model": "cities"}).json()["error"]["message"]
    assert "/v1/entities" in wrong
    unknown = client.post("/v1/entities", json={"text": "a", "model": "x"}).json()["error"]["message"]
    assert "'cities', 'intents'" in unknown
    assert client.post("/v1/entities", json={"text": "rome"}).status_code == 200


def test_only_json_and_only_the_offered_method_are_taken(client: httpx.Client) -> None:
    form = client.post("/v1/entities", data={"text": "a"})
    assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert client.post("/v1/entities", content=b'{"text": "a"}').status_code == 415
    with_charset = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/entities", content=b'{"text": "a"}', headers=with_charset).status_code == 200

    packed = {**with_charset, "Content-Encoding": "gzip"}
    assert client.post("/v1/entities", content=gzip.compress(b'{"text": "a"}'), headers=packed).status_code == 415
    as_it_is = {**with_charset, "Content-Encoding": "identity"}
    assert client.post("/v1/entities", content=b'{"text": "a"}', headers=as_it_is).status_code == 200

    get = client.get("/v1/entities")
    assert (get.status_code, get.json()["error"]["code"]) == (405, "method_not_allowed")
    assert get.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("length", "sent"),
    [
        pytest.param("Content-Length: 2000000", b"", id="declared"),
        pytest.param("Transfer-Encoding: chunked", (b"186a0\r\n" + b"a" * 100_000 + b"\r\n") * 11, id="undeclared"),
    ],
)
def test_a_body_that_is_too_long_is_refused_before_it_has_come(client: httpx.Client, length: str, sent: bytes) -> None:
    head = f"POST /v1/entities HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + sent)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")  # and it has not ended


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        ("refund", ""),
        (["rome", "refund"], "text 2 of 2"),
        (["rome", "refund", "rome", "refund", "a"], "texts 2, 4 of 5"),
    ],
)
def test_a_model_that_gives_nan_is_a_fault_of_the_server(
    client: httpx.Client, texts: str | list[str], named: str
) -> None:
    asked = {"text": texts, "model": "broken"}
    response = client.post("/v1/entities", json=asked, headers={"X-Request-Id": "nan-1"})
    assert response.status_code == 500
    (error,) = response.json().values()
    assert error.keys() == {"code", "message", "type", "param"}
    assert error["code"] == "internal"
    assert named in error["message"]
    assert "nan-1" in error["message"]
    assert "finite" not in error["message"]  # why is in the log alone
    assert client.post("/v1/entities", json={"text": "rome", "model": "broken"}).status_code == 200


def test_a_fault_of_the_server_is_500_by_its_other_protocol_too(client: httpx.Client) -> None:
    asked = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["refund"]}]}
    failed = client.post("/v2/models/broken/infer", json=asked)
    assert failed.status_code == 500
    assert "finite" not in failed.text
    assert failed.headers["x-request-id"] in failed.text


def test_request_ids_are_echoed_or_made(client: httpx.Client) -> None:
    made = {client.get("/healthz").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    odd = client.get("/nowhere", headers={"X-Request-Id": "a b<script>"})
    assert re.fullmatch("[0-9a-f]{32}", odd.headers["x-request-id"])
    for path in ("/", "/docs", "/openapi.json", "/v2", "/v2/nothing", "/nothing"):
        assert client.get(path, headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine", path


def test_models_are_described(client: httpx.Client, entities_bundle: Path) -> None:
    listed = client.get("/v1/models").json()
    cities, intents, *_ = listed["models"]
    manifest = json.loads((entities_bundle / "manifest.json").read_text())
    assert cities == {
        "name": "cities",
        "aliases": [],
        "task": "token-classification",
        "multi_label": False,
        "relations": False,
        "labels": ["O", "B-city", "I-city"],
        "vector_width": 0,
        "max_length": 32,
        "variant": "fp32",
        "variants": ["fp32"],
        "promises": [],
        "device": "cpu",
        "digest": manifest["digest"],
    }
    assert intents["task"] == "text-classification"
    # OpenAI's form is beside its own.
    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == [each["name"] for each in listed["models"]]
    assert {each["object"] for each in listed["data"]} == {"model"}


def test_the_page_needs_nothing_from_elsewhere_and_its_policy_fits_it(client: httpx.Client) -> None:
    response = client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(r"""(?:src|href)=["'](?!/|data:)""", response.text)
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode() in policy


def test_a_bundle_with_a_changed_byte_is_refused_by_name(bundle_copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    graph = bytearray((bundle_copy / "onnx" / "model.onnx").read_bytes())
    graph[len(graph) // 2] ^= 1
    (bundle_copy / "onnx" / "model.onnx").write_bytes(graph)
    assert main([str(bundle_copy), "--port", "0"]) == 2
    said, error = capfd.readouterr()
    assert said == ""
    assert error.startswith(f"error: the bundle {bundle_copy}")
    assert "onnx/model.onnx" in error
    assert "Traceback" not in error


def test_two_bundles_of_one_name_are_refused(entities_bundle: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(entities_bundle, tmp_path / "other"))
    write_manifest(other, name="cities")
    with pytest.raises(BadInput, match="'cities'"):
        create_app([entities_bundle, other])


def test_a_port_in_use_is_told_in_one_line(entities_bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([str(entities_bundle), "--port", str(port)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"127.0.0.1, port {port}" in line


LIGHT = """
import sys
def absent(*names):
    assert "serve" in sys.modules
    found = sorted(set(names) & {name.partition(".")[0] for name in sys.modules})
    assert not found, found
import serve
absent("torch", "transformers", "onnxruntime", "numpy")
import serve.__main__
from serve.http.app import create_app
create_app(sys.argv[1:])
absent("torch", "transformers", "datasets", "onnx", "opentelemetry")
"""


@pytest.mark.parametrize(
    "tracing", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}]
)
def test_a_server_imports_no_more_than_it_needs(entities_bundle: Path, tracing: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", LIGHT, entities_bundle]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | tracing, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
