"""A real server in a process of its own, asked over loopback."""

import base64
import gzip
import hashlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_bundles import write_manifest
from patience import PATIENCE_S
from repository import ROOT
from server_process import running, until, wait_until_ready

from serve.model.pipeline import Pipeline

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client(entities_bundle: Path, intents_bundle: Path, broken_bundle: Path) -> Iterator[httpx.Client]:
    with (
        running(entities_bundle, intents_bundle, broken_bundle) as (url, _),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        wait_until_ready(client)
        yield client


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


def test_the_server_and_the_pipeline_answer_alike(client: httpx.Client, entities_bundle: Path) -> None:
    texts = ["from oslo\r\n\tplease " * 3, "rome", "", "１２ new york 😀", "fly to paris", "mu\u0308nchen", "a " * 40]
    results = client.post("/v1/entities", json={"text": texts}).json()["results"]
    assert results == Pipeline(entities_bundle)(texts)


def test_the_unit_of_offsets_and_the_least_score_are_heeded(client: httpx.Client) -> None:
    asked = {"text": "😀 Rome", "offsets": "utf16"}
    (entity,) = client.post("/v1/entities", json=asked).json()["results"][0]["entities"]
    assert (entity["start"], entity["end"]) == (3, 7)
    assert client.post("/v1/entities", json={**asked, "min_score": 0.99}).json()["results"][0]["entities"] == []


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


def test_texts_are_classified_by_the_only_model_of_that_task(client: httpx.Client, intents_bundle: Path) -> None:
    asked = {"text": ["i love it", "refund please"], "text_pair": ["a", "b"], "top_k": 2}
    answer = client.post("/v1/classify", json=asked).json()
    assert answer["model"] == "intents"
    assert answer["results"] == Pipeline(intents_bundle)(asked["text"], text_pair=["a", "b"], top_k=2)
    assert [result["labels"][0]["label"] for result in answer["results"]] == ["praise", "refund"]


def test_many_at_once_each_get_their_own_answer(client: httpx.Client) -> None:
    texts = [f"{'please ' * (index % 7)}{['rome', 'a', 'oslo'][index % 3]}" for index in range(60)]

    def ask(text: str) -> list[str]:
        (result,) = client.post("/v1/entities", json={"text": text}).json()["results"]
        return [entity["text"] for entity in result["entities"]]

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, texts))
    assert answers == [[city] if city != "a" else [] for city in (text.split()[-1] for text in texts)]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=5), unit=st.sampled_from(["codepoints", "utf16", "utf8"])
)
def test_any_text_that_json_can_carry_is_answered_with_exact_spans(
    client: httpx.Client, texts: list[str], unit: str
) -> None:
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


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        pytest.param("/v1/entities", b"{}", (422, "invalid_input", "text"), id="no-text"),
        pytest.param("/v1/entities", b'{"text": 7}', (422, "invalid_input", "text"), id="a-number-for-text"),
        pytest.param("/v1/entities", b'{"text": null}', (422, "invalid_input", "text"), id="null-for-text"),
        pytest.param("/v1/entities", b'{"text": []}', (422, "invalid_input", "text"), id="no-texts"),
        pytest.param("/v1/entities", b'{"text": ["a", 2]}', (422, "invalid_input", "text[1]"), id="a-number-in-texts"),
        pytest.param("/v1/entities", b'{"text": "a", "txt": 1}', (422, "invalid_input", "txt"), id="unknown-field"),
        pytest.param("/v1/entities", b'{"text": "a", "top_k": 1}', (422, "invalid_input", "top_k"), id="not-its-field"),
        pytest.param("/v1/entities", b'{"text": "a\\ud83d"}', (422, "invalid_input", "text"), id="half-a-pair"),
        pytest.param("/v1/entities", b'{"text": ["\\udc00"]}', (422, "invalid_input", "text[0]"), id="other-half"),
        pytest.param("/v1/entities", b'{"text": "a", "min_score": 2}', (422, "invalid_input", "min_score"), id="score"),
        pytest.param("/v1/entities", b'{"text": "a", "offsets": "x"}', (422, "invalid_input", "offsets"), id="offsets"),
        pytest.param("/v1/entities", b"[]", (422, "invalid_input", None), id="not-an-object"),
        pytest.param("/v1/entities", b"text=a", (400, "bad_request", None), id="not-json"),
        pytest.param("/v1/entities", b"", (400, "bad_request", None), id="nothing"),
        pytest.param("/v1/entities", b'{"text": "\xff"}', (400, "bad_request", None), id="not-utf-8"),
        pytest.param("/v1/entities", b'{"text": "a", "min_score": NaN}', (400, "bad_request", None), id="nan"),
        pytest.param("/v1/entities", b'{"text":' + b"[" * 100_000, (422, "invalid_input", "text[0]"), id="very-deep"),
        pytest.param("/v1/entities", b'{"text": "a", "model": "x"}', (404, "not_found", "model"), id="no-such-model"),
        pytest.param(
            "/v1/entities", b'{"text": "a", "model": "intents"}', (422, "invalid_input", "model"), id="other-task"
        ),
        pytest.param("/v1/classify", b'{"text": "a", "top_k": 0}', (422, "invalid_input", "top_k"), id="no-labels"),
        pytest.param(
            "/v1/classify",
            b'{"text": ["a"], "text_pair": "b"}',
            (422, "invalid_input", "text_pair"),
            id="pair-for-list",
        ),
        pytest.param("/v1/entities", b'{"text": "%s"}' % (b"a" * 100_001), (413, "too_large", "text"), id="long-text"),
        pytest.param(
            "/v1/entities", json.dumps({"text": ["a"] * 1025}).encode(), (413, "too_large", "text"), id="many-texts"
        ),
        pytest.param("/v1/entities", b'{"text": "%s"}' % (b"a" * 2_000_000), (413, "too_large", None), id="2-mb"),
        pytest.param("/v1/nothing", b"{}", (404, "not_found", None), id="no-such-path"),
        pytest.param("/v1/entities/", b"{}", (404, "not_found", None), id="a-slash-too-many"),
    ],
)
def test_bad_requests_get_one_error_that_names_the_field(
    client: httpx.Client, path: str, body: bytes, expected: tuple[int, str, str | None]
) -> None:
    status, code, field = expected
    response = client.post(path, content=body, headers=JSON)

    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert error["code"] == code
    assert error.get("field") == field
    assert set(error) <= {"code", "message", "field"}
    assert len(error["message"]) > 20
    # The connection is fit for the next request.
    assert client.post("/v1/entities", json={"text": "rome"}).status_code == 200


def test_errors_say_what_to_do(client: httpx.Client) -> None:
    def message(path: str, **asked: object) -> str:
        return str(client.post(path, json=asked).json()["error"]["message"])

    assert message("/v1/entities") == "text: missing; give a string, or a list of strings"
    assert message("/v1/classify", text="a", model="cities").endswith("post to /v1/entities instead")
    assert "the models are 'cities', 'intents', 'broken'" in message("/v1/entities", text="a", model="x")
    assert "the fields are text, model, min_score, offsets" in message("/v1/entities", text="a", txt="b")


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


def test_a_body_of_undeclared_length_is_read_no_further_than_the_limit(client: httpx.Client) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=PATIENCE_S) as connection:
        connection.sendall(
            b"POST /v1/entities HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"186a0\r\n" + b"a" * 100_000 + b"\r\n"
        for _ in range(11):
            connection.sendall(chunk)
        # The body has not ended, and the answer is there.
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_body_declared_too_long_is_refused_before_it_is_sent(client: httpx.Client) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=PATIENCE_S) as connection:
        connection.sendall(
            b"POST /v1/entities HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 2000000\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_model_that_gives_nan_is_a_server_fault_and_never_an_answer(client: httpx.Client) -> None:
    response = client.post(
        "/v1/entities", json={"text": ["rome", "refund"], "model": "broken"}, headers={"X-Request-Id": "nan-1"}
    )
    assert response.status_code == 500
    assert response.json() == {
        "error": {
            "code": "internal",
            "message": "the model failed on text 2 of 2; send the others without it. The server's log has the reason, under request nan-1",
        }
    }
    alone = client.post(
        "/v1/entities", json={"text": "refund", "model": "broken"}, headers={"X-Request-Id": "nan-2"}
    ).json()
    assert alone["error"]["message"] == "the server failed; its log has the reason, under request nan-2"
    assert client.post("/v1/entities", json={"text": "rome", "model": "broken"}).status_code == 200


def test_texts_on_which_a_model_fails_are_named_so_that_the_others_can_be_sent(client: httpx.Client) -> None:
    texts = ["rome", "refund", "fly to rome", "refund", "rome"]
    message = client.post("/v1/entities", json={"text": texts, "model": "broken"}).json()["error"]["message"]
    assert "the model failed on texts 2, 4 of 5; send the others without them." in message


def test_a_fault_of_the_server_is_500_by_its_other_protocol_too(client: httpx.Client) -> None:
    asked = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["refund"]}]}
    failed = client.post("/v2/models/broken/infer", json=asked)
    assert failed.status_code == 500
    assert "finite" not in failed.text  # why is in the log alone
    assert failed.headers["x-request-id"] in failed.text


def test_request_ids_are_echoed_or_made(client: httpx.Client) -> None:
    assert client.get("/healthz", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = {client.get("/healthz").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    odd = client.get("/nowhere", headers={"X-Request-Id": "a b<script>"})
    assert re.fullmatch("[0-9a-f]{32}", odd.headers["x-request-id"])


def test_models_are_described(client: httpx.Client, entities_bundle: Path) -> None:
    cities, intents, _ = client.get("/v1/models").json()["models"]
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


def test_metrics_count_requests_batches_and_stages(client: httpx.Client) -> None:
    def value(sample: str) -> float:
        found = re.search(rf"^{re.escape(sample)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    good = 'stillroom_requests_total{endpoint="/v1/classify",status="200"}'
    bad = 'stillroom_requests_total{endpoint="/v1/classify",status="422"}'
    batches = 'stillroom_batch_texts_sum{model="intents"}'
    before = [value(good), value(bad), value(batches)]
    client.post("/v1/classify", json={"text": ["a", "b", "rome"]})
    client.post("/v1/classify", json={"text": []})
    assert [value(good), value(bad), value(batches)] == [before[0] + 1, before[1] + 1, before[2] + 3]
    for stage in ("tokenise", "run", "decode"):
        assert value(f'stillroom_stage_seconds_count{{model="intents",stage="{stage}"}}') > 0
    assert value('stillroom_queue_texts{model="cities"}') == 0
    assert 'stillroom_model_info{digest="' in client.get("/metrics").text


def test_paths_of_scanners_are_counted_together(client: httpx.Client) -> None:
    client.get("/wp-login.php")
    text = client.get("/metrics").text
    assert 'endpoint="other",status="404"' in text
    assert "wp-login" not in text


def test_openapi_describes_every_endpoint_and_resolves(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()

    version = client.get("/v2/models/cities").json()["versions"][0]
    for path, methods in document["paths"].items():
        real_path = path.replace("{name}", "cities").replace("{version}", version)
        for method in methods:
            assert client.request(method, real_path).status_code != 404, path
            assert client.request("PATCH", real_path).status_code == 405
    for reference in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)):
        assert reference in document["components"]["schemas"]
    entities = document["components"]["schemas"]["EntitiesRequest"]
    assert set(entities["properties"]) == {
        "text",
        "model",
        "min_score",
        "offsets",
        "aggregation",
        "constrained",
        "truncate",
        "promise",
    }
    assert entities["required"] == ["text"]


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


def test_sigterm_lets_requests_under_way_finish_and_exits_0(entities_bundle: Path) -> None:
    with running(entities_bundle) as (url, process), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        wait_until_ready(client)
        signalled = threading.Event()

        def body() -> Iterator[bytes]:
            yield b'{"text": '
            assert signalled.wait(PATIENCE_S)
            time.sleep(0.3)  # the signal falls into the middle of this request
            yield b'"fly to rome"}'

        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(client.post, "/v1/entities", content=body(), headers=JSON)
            until(lambda: "held_body_bytes 9.0" in httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text)
            process.send_signal(signal.SIGTERM)
            signalled.set()
            assert answer.result().json()["results"][0]["entities"][0]["text"] == "Rome".lower()
        assert process.wait(timeout=PATIENCE_S) == 0


def run_to_the_end(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serve", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_bundle_with_one_byte_changed_is_refused_by_name(
    entities_bundle: Path, copied: Callable[[Path], Path]
) -> None:
    folder = copied(entities_bundle)
    graph = bytearray((folder / "onnx" / "model.onnx").read_bytes())
    graph[len(graph) // 2] ^= 1
    (folder / "onnx" / "model.onnx").write_bytes(graph)

    finished = run_to_the_end(folder, "--port", "0")

    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.startswith(f"error: the bundle {folder}")
    assert "onnx/model.onnx was changed" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_two_bundles_of_one_name_are_refused(entities_bundle: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(entities_bundle, tmp_path / "other"))
    write_manifest(other, name="cities")
    finished = run_to_the_end(entities_bundle, other, "--port", "0")
    assert finished.returncode == 2
    assert "several bundles have the name 'cities'" in finished.stderr


@pytest.mark.parametrize("alias", ["prod", "=cities", "prod="])
def test_an_alias_that_is_none_is_refused(entities_bundle: Path, alias: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "serve", entities_bundle, "--alias", alias],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert repr(alias) in done.stderr
    assert "OTHER=NAME" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_alias_on_the_command_line_is_a_name_to_ask_by(entities_bundle: Path) -> None:
    with running(entities_bundle, "--alias", "prod=cities") as (url, _), httpx.Client(base_url=url) as client:
        (described,) = client.get("/v1/models").json()["models"]
        assert (described["name"], described["aliases"]) == ("cities", ["prod"])


def test_a_port_in_use_is_told_in_one_line(entities_bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finished = run_to_the_end(entities_bundle, "--port", port)
    assert finished.returncode == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1


PROBE = "import sys; {imports}; sys.exit(', '.join(sorted({{{banned}}} & set(sys.modules))))"


@pytest.mark.parametrize(
    ("imports", "banned", "found"),
    [
        ("import serve, serve.http.app, serve.__main__", "'torch', 'transformers', 'datasets', 'onnx'", ""),
        ("import serve", "'torch', 'transformers', 'onnxruntime', 'numpy'", ""),
        ("import serve, colorsys", "'torch', 'colorsys'", "colorsys"),
    ],
    ids=["the-server-without-torch", "the-package-without-its-runtime", "this-test-can-fail"],
)
def test_a_fresh_interpreter_imports_no_more_than_it_needs(imports: str, banned: str, found: str) -> None:
    command = [sys.executable, "-c", PROBE.format(imports=imports, banned=banned)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert finished.stderr.strip() == found
