"""Which clients a real server lets in, and what its log has of them."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S
from server_process import HTTP, ROOT, Server, read_answer, request, serving, until
from starlette.testclient import TestClient

from serve.http.access import Access
from serve.http.api_keys import read_keys
from serve.http.app import create_app, hosts_of
from serve.settings import ServeSettings

ALICE, BOB, CAROL = "alice-0123456789abcdef", "bob-0123456789abcdef", "carol-0123456789abcdef"
PAGES = "https://app.example"
ROME = {"text": "fly to rome"}
EVERYWHERE = "0.0.0.0"  # noqa: S104  # what is warned of


@pytest.fixture(scope="module")
def server(entities_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice:{ALICE}\nbob:{BOB} rate=2/h\ncarol:{CAROL} concurrency=1\n")
    origins = ["--allow-origin", PAGES, "--allow-origin", "http://localhost:3000"]
    proxies = {"FORWARDED_ALLOW_IPS": "10.0.0.0/8"}
    with serving(entities_bundle, "--host", EVERYWHERE, "--keys", keys, *origins, environment=proxies) as server:
        yield server


@pytest.fixture(scope="module")
def open_server(entities_bundle: Path) -> Iterator[Server]:
    """Without keys, on every address, with lines of text in its log."""
    with serving(entities_bundle, "--host", EVERYWHERE, "--log-texts", "--log-format", "text") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_a_key_nothing_is_answered(client: httpx.Client) -> None:
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


def test_a_model_answers_a_post_to_the_path_of_the_page_only_with_a_key(client: httpx.Client) -> None:
    for path in ("/", "/models/cities", "/embed"):
        assert client.post(path, json={"inputs": "fly to rome"}).status_code == 401
    assert client.post("/", json={"inputs": "fly to rome"}, headers=bearer(ALICE)).status_code == 200


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
    with server.held() as let_go, ThreadPoolExecutor(1) as thread:
        first = thread.submit(server.post, "/v1/entities", json=ROME, headers=bearer(CAROL))
        until(lambda: client.get("/v1/models", headers=bearer(CAROL)).status_code == 429)
        assert not first.done()
        let_go()
        assert first.result().status_code == 200
    assert client.get("/v1/models", headers=bearer(CAROL)).status_code == 200


def test_a_page_of_an_allowed_origin_may_call_and_no_other(client: httpx.Client) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,authorization"}
    allowed = client.options("/v1/entities", headers={"Origin": PAGES, **asks})
    assert (allowed.status_code, allowed.content) == (204, b"")
    assert allowed.headers["access-control-allow-origin"] == PAGES
    assert "POST" in allowed.headers["access-control-allow-methods"]
    names = set(allowed.headers["access-control-allow-headers"].split(", "))
    assert {"content-type", "authorization", "x-api-key"} <= names
    assert "origin" in allowed.headers["vary"].lower()

    by_openai = {
        **asks,
        "Access-Control-Request-Headers": "authorization,x-stainless-os,x-stainless-retry-count,x-evil",
    }
    allowed = client.options("/v1/embeddings", headers={"Origin": PAGES, **by_openai})
    names = set(allowed.headers["access-control-allow-headers"].split(", "))
    assert {"authorization", "x-stainless-os", "x-stainless-retry-count"} <= names
    assert "x-evil" not in names

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
    without_key = client.post("/v1/entities", json=ROME, headers={"Origin": PAGES})
    assert without_key.headers["access-control-allow-origin"] == PAGES
    other = client.post("/v1/entities", json=ROME, headers={"Origin": "https://app.example.evil", **bearer(ALICE)})
    assert "access-control-allow-origin" not in other.headers
    assert "origin" in other.headers["vary"].lower()


def test_a_request_is_one_line_of_json_with_its_key_model_and_sizes(client: httpx.Client, server: Server) -> None:
    sent = b'{"text": ["fly to rome", "oslo"]}'
    headers = {"Content-Type": "application/json", "X-Request-Id": "seen-1", **bearer(ALICE)}
    client.post("/v1/entities", content=sent, headers=headers)
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
    assert 'stillroom_key_requests_total{process="0",key="alice",status="200"}' in metrics
    server.logged(lambda entry: entry["request_id"] == "wrong-1")
    for told in (metrics, "\n".join(server.log())):
        for secret in (ALICE, BOB, CAROL, "a-wrong-key", "my-secret-place"):
            assert secret not in told


def test_probes_are_not_logged_when_all_is_well(client: httpx.Client, server: Server) -> None:
    client.get("/healthz", headers={"X-Request-Id": "probe-1"})
    client.get("/v1/models", headers={"X-Request-Id": "after-probe", **bearer(ALICE)})
    server.logged(lambda entry: entry["request_id"] == "after-probe")
    assert not [entry for entry in server.entries() if entry["request_id"] == "probe-1"]


def test_without_keys_all_is_open_and_other_origins_are_closed(open_server: Server) -> None:
    asked = {"Origin": PAGES, "X-Request-Id": "open-1", "Host": "any.example"}
    answer = open_server.post("/v1/entities", json={"text": "fly\nto rome"}, headers=asked)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]
    preflight = {"Origin": PAGES, "Access-Control-Request-Method": "POST"}
    assert HTTP.options(f"{open_server.url}/v1/entities", headers=preflight).status_code == 405
    assert open_server.get("/metrics").status_code == 200
    until(lambda: any("request_id=open-1" in line for line in open_server.log()))
    (line,) = [line for line in open_server.log() if "request_id=open-1" in line]
    assert "status=200" in line
    assert line.endswith(r'texts=["fly\nto rome"]')


def test_a_server_that_others_reach_without_a_key_warns_once_and_no_other(
    server: Server, open_server: Server, plain_server: Server
) -> None:
    until(lambda: any("ready" in line for line in open_server.log()))  # which is logged last
    (warning,) = [line for line in open_server.log() if "without keys" in line]
    assert EVERYWHERE in warning
    assert "--keys" in warning
    for other in (server, plain_server):
        other.logged(lambda _: True, "ready")
        assert not [line for line in other.log() if "without keys" in line]


def test_keys_are_read_again_on_sighup_with_open_metrics_and_no_log(entities_bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{ALICE}\n")
    with serving(entities_bundle, "--keys", keys, "--open-metrics", "--no-access-log") as server:

        def status(key: str) -> int:
            return server.get("/v1/models", headers=bearer(key)).status_code

        assert (status(ALICE), status(BOB), server.get("/metrics").status_code) == (200, 401, 200)
        keys.write_text("nonsense\n")
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: any(f"keys stay as they were: {keys}, line 1" in line for line in server.log()))
        assert (status(ALICE), status(BOB)) == (200, 401)
        keys.write_text(f"bob:{BOB}\n")
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: status(BOB) == 200)
        assert status(ALICE) == 401
        assert server.entries() == []


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
        (["--connections", "0", "--head-s", "-1"], "2. --head-s is -1"),
        (["--bodies-bytes", "10"], "give at least the 1,000,000 bytes of --body-bytes"),
        (["--tls-key", "key.pem"], "--tls-key needs --tls-cert"),
        (["--alias", "prod"], "'prod'; give OTHER=NAME"),
        (["--alias", "=cities"], "'=cities'; give OTHER=NAME"),
        (["--alias", "prod="], "'prod='; give OTHER=NAME"),
        (["--request-texts", "0"], "--request-texts"),
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


OWN = ["localhost", "LOCALHOST:80", "localhost.", "stillroom.localhost", "a.B.localhost.:8000", "127.0.0.1", "127.9.9.9:8000",
       "[::1]:8000", "ner.example", "ner.Example:443"]  # fmt: skip
FOREIGN = ["evil.example", "ner.example.evil.example", "localhost.evil.example", "evillocalhost", "127.0.0.1.evil.example",
           "sub.ner.example", "other"]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "keys", "hosts", "status"),
    [
        pytest.param(ServeSettings(allow_host=("NER.example.",)), "", OWN, 200, id="its-own-names"),
        pytest.param(ServeSettings(allow_host=("NER.example.",)), "", FOREIGN, 403, id="others"),
        pytest.param(ServeSettings(), "", FOREIGN, 403, id="on-the-loopback-by-itself"),
        pytest.param(ServeSettings(), f"alice:{ALICE}", FOREIGN, 200, id="with-keys"),
        pytest.param(ServeSettings(allow_host=("*",)), "", FOREIGN, 200, id="any-name-allowed"),
        pytest.param(ServeSettings(host=EVERYWHERE), "", FOREIGN, 200, id="on-every-address"),
    ],
)
def test_a_server_on_the_loopback_without_keys_answers_only_for_its_own_names(
    settings: ServeSettings,
    keys: str,
    hosts: list[str],
    status: int,
    entities_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {"STILLROOM_KEYS": keys} if keys else {}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    access = Access(read_keys(None, environment), hosts=hosts_of(settings))
    client = TestClient(create_app([entities_bundle], settings, access))
    for host in hosts:
        for path in ("/v1/models", "/", "/metrics", "/v2", "/healthz"):
            answer = client.get(path, headers={"Host": host, **bearer(ALICE)})
            assert answer.status_code == status, (host, path)
            assert ("--allow-host" in answer.text) is (status == 403)


FORWARDED = {"X-Forwarded-For": "203.0.113.7, 127.0.0.1", "X-Forwarded-Proto": "https"}


def test_the_address_of_a_client_is_believed_from_trusted_proxies_alone(server: Server, plain_server: Server) -> None:
    # By default those of this machine are trusted.
    for asked, client, scheme in ((plain_server, "203.0.113.7", "https"), (server, "127.0.0.1", "http")):
        assert f"curl -s {scheme}://" in asked.get("/docs", headers=FORWARDED).text
        assert asked.logged(lambda entry: entry["path"] == "/docs")["client"] == client  # awaited here
