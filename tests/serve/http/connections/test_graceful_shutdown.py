"""How a server stops: in good order, in bounded time, whoever is connected."""

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from patience import PATIENCE_S
from server_process import Server, closed, read_answer, request, serving, until

ROME = b'{"text": "fly to rome"}'
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
READY = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def clients() -> Iterator[list[socket.socket]]:
    clients: list[socket.socket] = []
    yield clients
    for client in clients:
        client.close()


def refuses(server: Server) -> bool:
    """Whether it takes no new connection: it has heard the signal."""
    try:
        server.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def ended(server: Server) -> int:
    return server.process.wait(PATIENCE_S)


def test_it_says_so_and_closes_each_connection_after_its_answer(
    entities_bundle: Path, clients: list[socket.socket]
) -> None:
    with serving(entities_bundle, "--linger-s", 10, "--drain-s", 60) as server:
        kept, probe, late = [server.connect() for _ in range(3)]
        clients += [kept, probe, late]
        for client in (kept, probe):
            client.sendall(HEALTH)
            assert "connection" not in read_answer(client)[1]
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/readyz", timeout=PATIENCE_S).status_code == 503)
        kept.sendall(request(ROME))
        status, headers, body = read_answer(kept)
        assert (status, headers["connection"]) == (200, "close")
        assert json.loads(body)["results"][0]["entities"]
        assert closed(kept)
        probe.sendall(READY)
        status, headers, body = read_answer(probe)
        assert (status, headers["connection"], json.loads(body)["error"]["code"]) == (503, "close", "unavailable")
        new = server.connect()
        clients.append(new)
        new.sendall(READY)
        assert read_answer(new)[0] == 503
        assert ended(server) == 0
        with pytest.raises(ConnectionRefusedError):
            server.connect()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_and_slow_clients_do_not_keep_it(
    entities_bundle: Path, clients: list[socket.socket], number: signal.Signals
) -> None:
    limits = ["--drain-s", 1, "--head-s", 600, "--body-s", 600, "--write-s", 600, "--least-bytes-per-s", 1]
    with serving(entities_bundle, *limits) as server:
        idle, silent, head, body, unread = (socket.socket() for _ in range(5))
        clients += [idle, silent, head, body, unread]
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for client in clients:
            client.settimeout(PATIENCE_S)
            client.connect(server.address)
        idle.sendall(HEALTH)
        assert read_answer(idle)[0] == 200
        head.sendall(b"POST /v1/entities HTTP/1.1\r\n")
        body.sendall(request(ROME, length=1000))
        unread.sendall(request(json.dumps({"text": ["rome " * 30] * 1024}).encode()))
        server.logged(lambda entry: entry.get("texts_count") == 1024)
        server.process.send_signal(number)
        assert ended(server) == 0
        reasons = [entry["reason"] for entry in server.entries("cut")]
        assert reasons == ["stopping", "stopping"]  # the body and the answer; the others were closed at once


def test_what_was_accepted_is_answered(entities_bundle: Path, clients: list[socket.socket]) -> None:
    with serving(entities_bundle) as server:
        (worker,) = psutil.Process(server.process.pid).children()
        worker.suspend()
        for _ in range(5):
            client = server.connect()
            clients.append(client)
            client.sendall(request(ROME))
        until(lambda: server.metric("stillroom_connections") >= 6)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server))
        worker.resume()
        for client in clients:
            status, headers, _ = read_answer(client)
            assert (status, headers["connection"]) == (200, "close")
        assert ended(server) == 0


def test_a_model_that_does_not_answer_does_not_keep_it(entities_bundle: Path, clients: list[socket.socket]) -> None:
    with serving(entities_bundle, "--drain-s", 0.5) as server:
        (worker,) = psutil.Process(server.process.pid).children()
        worker.suspend()
        client = server.connect()
        clients.append(client)
        client.sendall(request(ROME))
        until(lambda: server.metric("stillroom_connections") >= 2)
        server.process.send_signal(signal.SIGTERM)
        assert closed(client)
        assert ended(server) == 0
        assert not worker.is_running()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(
    entities_bundle: Path, clients: list[socket.socket], number: signal.Signals
) -> None:
    with serving(entities_bundle, "--drain-s", 600, "--body-s", 600, "--least-bytes-per-s", 1) as server:
        workers = psutil.Process(server.process.pid).children()
        client = server.connect()
        clients.append(client)
        client.sendall(request(ROME, length=1000))
        until(lambda: httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).status_code == 200)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server))
        assert server.process.poll() is None
        server.process.send_signal(number)
        assert ended(server) == -number
        psutil.wait_procs(workers, timeout=PATIENCE_S)
        assert not any(worker.is_running() for worker in workers)
