"""Who is let in by a real server, and what its log has of them."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from patience import PATIENCE_S
from server_process import ROOT, Server, read_answer, request, serving, until

ALICE, BOB, CAROL = "alice-0123456789abcdef", "bob-0123456789abcdef", "carol-0123456789abcdef"
PAGES = "https://app.example"
ROME = {"text": "fly to rome"}


@pytest.fixture(scope="module")
def server(entities_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice:{ALICE}\nbob:{BOB} rate=2/h\ncarol:{CAROL} concurrency=1\n")
    with serving(
        entities_bundle, "--keys", keys, "--allow-origin", PAGES, "--allow-origin", "http://localhost:3000"
    ) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_only_who_has_a_key_is_answered(client: httpx.Client) -> None:
    for headers in ({}, bearer("wrong"), {"X-Api-Key": ALICE[:-1]}):
        for refused in (
            client.post("/v1/entities", json=ROME, headers=headers),
            client.get("/v1/models", headers=headers),
            client.get("/metrics", headers=headers),
            client.get("/anything", headers=headers),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
            assert refused.headers["www-authenticate"].startswith("Bearer")
            assert refused.headers["x-request-id"]
    assert client.post("/v1/entities", json=ROME, headers=bearer(ALICE)).status_code == 200
    assert client.post("/v1/entities", json=ROME, headers={"X-Api-Key": ALICE}).status_code == 200
    assert client.get("/anything", headers=bearer(ALICE)).status_code == 404


def test_health_and_the_page_are_open(client: httpx.Client) -> None:
    for path in ("/healthz", "/readyz", "/", "/openapi.json"):
        assert client.get(path).status_code == 200


def test_a_key_over_its_rate_is_told_when_to_come_again_and_others_are_answered(client: httpx.Client) -> None:
    asked = [client.get("/v1/models", headers=bearer(BOB)) for _ in range(2)]
    assert [answer.status_code for answer in asked] == [200, 429]
    assert asked[1].json()["error"]["code"] == "rate_limited"
    assert 1700 < int(asked[1].headers["retry-after"]) <= 1800  # 2 an hour
    assert client.get("/v1/models", headers=bearer(ALICE)).status_code == 200


def test_a_key_may_have_so_many_requests_at_once(client: httpx.Client, server: Server) -> None:
    (worker,) = psutil.Process(server.process.pid).children()
    worker.suspend()
    try:
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(
                httpx.post, f"{server.url}/v1/entities", json=ROME, headers=bearer(CAROL), timeout=PATIENCE_S
            )
            until(lambda: client.get("/v1/models", headers=bearer(CAROL)).status_code == 429)
            assert not first.done()
            worker.resume()
            assert first.result().status_code == 200
    finally:
        worker.resume()
    assert client.get("/v1/models", headers=bearer(CAROL)).status_code == 200


def test_a_page_of_an_allowed_origin_may_call_and_no_other(client: httpx.Client) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,authorization"}
    allowed = client.options("/v1/entities", headers={"Origin": PAGES, **asks})
    assert (allowed.status_code, allowed.content) == (204, b"")
    assert allowed.headers["access-control-allow-origin"] == PAGES
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert {"content-type", "authorization", "x-api-key"} <= set(
        allowed.headers["access-control-allow-headers"].split(", ")
    )
    assert "origin" in allowed.headers["vary"].lower()

    refused = client.options("/v1/entities", headers={"Origin": "https://evil.example", **asks})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert "access-control-allow-origin" not in refused.headers

    no_page = client.options("/v1/entities", headers={**asks, **bearer(ALICE)})
    assert no_page.status_code == 405  # a request like any other
    assert "access-control-allow-methods" not in no_page.headers

    answered = client.post("/v1/entities", json=ROME, headers={"Origin": PAGES, **bearer(ALICE)})
    assert answered.headers["access-control-allow-origin"] == PAGES
    assert "x-request-id" in answered.headers["access-control-expose-headers"]
    # A page may read why it was refused, too.
    assert (
        client.post("/v1/entities", json=ROME, headers={"Origin": PAGES}).headers["access-control-allow-origin"]
        == PAGES
    )
    other = client.post("/v1/entities", json=ROME, headers={"Origin": "https://app.example.evil", **bearer(ALICE)})
    assert "access-control-allow-origin" not in other.headers
    assert "origin" in other.headers["vary"].lower()


def test_a_request_is_one_line_of_json_that_says_who_what_and_how_long(client: httpx.Client, server: Server) -> None:
    sent = b'{"text": ["fly to rome", "oslo"]}'
    client.post(
        "/v1/entities",
        content=sent,
        headers={"Content-Type": "application/json", "X-Request-Id": "seen-1", **bearer(ALICE)},
    )
    entry = server.logged(lambda entry: entry["request_id"] == "seen-1")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("time"))
    assert entry.pop("ms") > 0
    assert entry.pop("answer_bytes") > 100
    assert entry == {
        "level": "info",
        "logger": "serve.access",
        "message": "request",
        "request_id": "seen-1",
        "key": "alice",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/entities",
        "status": 200,
        "error": None,
        "model": "cities",
        "texts_count": 2,
        "body_bytes": len(sent),
    }


def test_no_line_can_be_forged_and_no_terminal_steered(client: httpx.Client, server: Server) -> None:
    forged = '{"message": "request", "status": 200}'
    client.get(
        f"/no%0a{forged}%1b[2J%e2%80%a8%c2%9b".replace('"', "%22"),
        headers={"X-Request-Id": "a b", **bearer(ALICE)},
    )
    entry = server.logged(lambda entry: entry["path"].startswith("/no"))
    assert entry["path"] == f"/no\n{forged}\x1b[2J\u2028\x9b"
    assert re.fullmatch("[0-9a-f]{32}", entry["request_id"])
    assert all(line.isascii() and line.isprintable() for line in server.log())


def test_keys_and_texts_are_in_no_log_and_no_metric(client: httpx.Client, server: Server) -> None:
    client.post("/v1/entities", json={"text": "fly to oslo from my-secret-place"}, headers=bearer(ALICE))
    client.post("/v1/entities", json=ROME, headers={"X-Api-Key": "a-wrong-key-of-somebody", "X-Request-Id": "wrong-1"})
    metrics = client.get("/metrics", headers=bearer(ALICE)).text
    assert 'stillroom_key_requests_total{key="alice",status="200"}' in metrics
    server.logged(lambda entry: entry["request_id"] == "wrong-1")
    for told in (metrics, "\n".join(server.log())):
        for secret in (ALICE, BOB, CAROL, "a-wrong-key", "my-secret-place"):
            assert secret not in told


def test_probes_are_not_logged_when_all_is_well(client: httpx.Client, server: Server) -> None:
    client.get("/healthz", headers={"X-Request-Id": "probe-1"})
    client.get("/v1/models", headers={"X-Request-Id": "after-probe", **bearer(ALICE)})
    server.logged(lambda entry: entry["request_id"] == "after-probe")
    assert not [entry for entry in server.entries() if entry["request_id"] == "probe-1"]


def test_without_keys_all_is_open_and_other_origins_are_closed(entities_bundle: Path, tmp_path: Path) -> None:
    with serving(entities_bundle, "--log-texts", "--log-format", "text") as server:
        answer = httpx.post(
            f"{server.url}/v1/entities",
            json={"text": "fly\nto rome"},
            headers={"Origin": PAGES, "X-Request-Id": "open-1"},
            timeout=PATIENCE_S,
        )
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        asks = {"Origin": PAGES, "Access-Control-Request-Method": "POST"}
        assert httpx.options(f"{server.url}/v1/entities", headers=asks, timeout=PATIENCE_S).status_code == 405
        assert httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).status_code == 200
        until(lambda: any("request_id=open-1" in line for line in server.log()))
        (line,) = [line for line in server.log() if "request_id=open-1" in line]
        assert "status=200" in line
        assert line.endswith(r'texts=["fly\nto rome"]')


def test_metrics_are_open_where_that_was_asked(entities_bundle: Path) -> None:
    environment = {"STILLROOM_KEYS": f"alice:{ALICE}"}
    with serving(entities_bundle, "--open-metrics", "--no-access-log", environment=environment) as server:
        assert httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).status_code == 401
        assert httpx.get(f"{server.url}/v1/models", headers=bearer(ALICE), timeout=PATIENCE_S).status_code == 200
        assert server.entries() == []


def test_keys_are_read_again_on_sighup(entities_bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{ALICE}\n")
    with serving(entities_bundle, "--keys", keys) as server:

        def status(key: str) -> int:
            return httpx.get(f"{server.url}/v1/models", headers=bearer(key), timeout=PATIENCE_S).status_code

        assert (status(ALICE), status(BOB)) == (200, 401)
        keys.write_text("nonsense\n")
        os.kill(server.process.pid, signal.SIGHUP)
        server.logged(
            lambda entry: entry["level"] == "error",
            "keys stay as they were: "
            f"{keys}, line 1: cannot be read; give `name:key`, or `name sha256:HEX` with 64 hexadecimal digits",
        )
        assert (status(ALICE), status(BOB)) == (200, 401)
        keys.write_text(f"bob:{BOB}\n")
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: status(BOB) == 200)
        assert status(ALICE) == 401


def test_a_log_that_nobody_reads_costs_lines_and_not_answers(entities_bundle: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "serve",
        str(entities_bundle),
        "--port",
        "0",
        "--processes",
        "1",
        "--linger-s",
        "0",
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        try:
            url = process.stdout.readline().strip()
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
                until(lambda: client.get("/readyz").status_code == 200)
                for number in range(60):  # 60 lines of 2 kB are more than a pipe holds
                    body = client.get(f"/{number:04}{'%0a' * 1000}")
                    assert body.status_code == 404
                assert client.post("/v1/entities", json=ROME).status_code == 200
            process.terminate()
            process.wait(PATIENCE_S)
        finally:
            process.kill()
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--keys", "nowhere"], "the keys in nowhere cannot be read"),
        (["--allow-origin", "app.example"], "--allow-origin is 'app.example'; give http or https"),
        (
            ["--connections", "0", "--head-s", "-1"],
            "1. --connections is 0; give a whole number from 1.\n2. --head-s is -1",
        ),
        (["--bodies-bytes", "10"], "give at least the 1,000,000 bytes of --body-bytes"),
        (["--tls-key", "key.pem"], "--tls-key needs --tls-cert"),
        (["--tls-cert", "nowhere.pem"], "the certificate nowhere.pem"),
    ],
)
def test_settings_that_cannot_be_are_told_before_it_serves(
    entities_bundle: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    from serve.__main__ import main

    assert main([str(entities_bundle), "--port", "0", *arguments]) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert said in error


def test_a_request_before_its_key_is_known_is_not_read(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(request(b"", length=900_000))
        status, _, _ = read_answer(connection)
        assert status == 401


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        pytest.param(["--host", "0.0.0.0"], True, id="every-address"),  # noqa: S104  # what is warned of
        pytest.param([], False, id="loopback"),
        pytest.param(["--host", "localhost"], False, id="loopback-by-name"),
        pytest.param(["--host", "0.0.0.0", "--keys"], False, id="with-keys"),  # noqa: S104
    ],
)
def test_a_server_that_others_reach_without_a_key_says_so_once(
    entities_bundle: Path, tmp_path: Path, arguments: list[str], warned: bool
) -> None:
    if "--keys" in arguments:
        (tmp_path / "keys").write_text(f"alice:{ALICE}\n")
        arguments = [*arguments, str(tmp_path / "keys")]
    with serving(entities_bundle, *arguments) as server:
        until(lambda: bool(server.entries("ready")))  # which is logged last
        said = [entry["message"] for entry in map(json.loads, server.log()) if "without keys" in entry["message"]]
    assert len(said) == warned
    if warned:
        assert "without keys on 0.0.0.0" in said[0]
        assert "give --keys" in said[0]


def test_a_server_on_the_loopback_without_keys_answers_only_for_its_own_names(entities_bundle: Path) -> None:
    with serving(entities_bundle, "--allow-host", "NER.example.") as server:
        for host in (
            "localhost",
            "LOCALHOST:80",
            "localhost.",
            "stillroom.localhost",
            "a.B.localhost.:8000",
            "127.0.0.1",
            "127.9.9.9:8000",
            "[::1]:8000",
            "ner.example",
            "ner.Example:443",
        ):
            answer = httpx.post(f"{server.url}/v1/entities", json=ROME, headers={"Host": host}, timeout=PATIENCE_S)
            assert answer.status_code == 200, host
        for host in (
            "evil.example",
            "ner.example.evil.example",
            "localhost.evil.example",
            "evillocalhost",
            "127.0.0.1.evil.example",
            "sub.ner.example",
            "other",
        ):
            for path in ("/v1/models", "/", "/metrics", "/v2", "/readyz"):
                answer = httpx.get(f"{server.url}{path}", headers={"Host": host}, timeout=PATIENCE_S)
                assert answer.status_code == 403, (host, path)
                assert "--allow-host" in answer.text


def test_a_server_with_keys_or_with_any_host_allowed_answers_for_every_name(
    client: httpx.Client, entities_bundle: Path
) -> None:
    there = {"Host": "ner.example"}
    assert client.get("/v1/models", headers={**there, **bearer(ALICE)}).status_code == 200
    with serving(entities_bundle, "--allow-host", "*") as server:
        assert httpx.get(f"{server.url}/v1/models", headers=there, timeout=PATIENCE_S).status_code == 200
