"""How a server stops: in good order, in bounded time, whoever is connected."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest
from coroutines import asynchronous
from patience import PATIENCE_S
from server_process import Server, closed, read_answer, request, serving, until
from starlette.types import Receive, Scope, Send

from serve.http.connections import protocol
from serve.http.connections.limits import Watch
from serve.http.connections.protocol import Connection
from serve.observe.metrics import Metrics
from serve.settings import ConnectionLimits

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


def test_each_connection_is_closed_after_its_answer(entities_bundle: Path, clients: list[socket.socket]) -> None:
    with serving(entities_bundle, "--linger-s", 3, "--drain-s", 60) as server:
        kept, probe = [server.connect() for _ in range(2)]
        clients += [kept, probe]
        for client in (kept, probe):
            client.sendall(HEALTH)
            assert "connection" not in read_answer(client)[1]
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/readyz").status_code == 503)
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


def test_idle_and_slow_clients_do_not_keep_it(entities_bundle: Path, clients: list[socket.socket]) -> None:
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
        server.process.send_signal(signal.SIGINT)
        assert ended(server) == 0
        reasons = [entry["reason"] for entry in server.entries("cut")]
        assert reasons == ["stopping", "stopping"]  # the body and the answer; the others were closed at once


def test_what_was_accepted_is_answered_as_is_half_a_body(entities_bundle: Path, clients: list[socket.socket]) -> None:
    with serving(entities_bundle) as server, server.held() as let_go:
        for _ in range(5):
            client = server.connect()
            clients.append(client)
            client.sendall(request(ROME))
        half = server.connect()
        clients.append(half)
        half.sendall(request(ROME)[:-5])
        until(lambda: server.metric("stillroom_connections") >= 7)
        until(lambda: server.metric("stillroom_held_body_bytes") % len(ROME) == len(ROME) - 5)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server))
        let_go()
        half.sendall(ROME[-5:])
        for client in clients:
            assert read_answer(client)[0] == 200
            assert closed(client)
        assert ended(server) == 0


def test_a_model_that_does_not_answer_does_not_keep_it(entities_bundle: Path, clients: list[socket.socket]) -> None:
    leaving = {f"serve.http.connections.server.{name}": 0.5 for name in ("CUT_OFF_S", "LEAVE_S")}
    with serving(entities_bundle, "--drain-s", 0.5, constants=leaving) as server:
        (process,) = server.processes()
        with server.held():
            client = server.connect()
            clients.append(client)
            client.sendall(request(ROME))
            until(lambda: server.metric("stillroom_connections") >= 2)
            server.process.send_signal(signal.SIGTERM)
            assert closed(client)
            assert ended(server) == 0
        assert not process.is_running()


def test_a_second_signal_ends_it_at_once(entities_bundle: Path, clients: list[socket.socket]) -> None:
    with serving(entities_bundle, "--drain-s", 600, "--body-s", 600, "--least-bytes-per-s", 1) as server:
        processes = server.processes()
        client = server.connect()
        clients.append(client)
        client.sendall(request(ROME, length=1000))
        until(lambda: server.get("/healthz").status_code == 200)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server))
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert ended(server) == -signal.SIGINT
        psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert not any(process.is_running() for process in processes)


REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, socket.socket]]:
    """The server's end of a connection, and the client's."""
    theirs, ours = socket.socketpair()
    with theirs, ours:
        theirs.settimeout(PATIENCE_S)
        ours.setblocking(False)
        watch = Watch(ConnectionLimits(), Metrics())
        loop = asyncio.get_running_loop()
        transport, connection = await loop.connect_accepted_socket(lambda: Connection(app, watch), ours)
        yield connection, theirs
        transport.close()
        await asyncio.sleep(0)


async def answered(client: socket.socket) -> tuple[int, dict[str, str]]:
    status, headers, _ = await asyncio.to_thread(read_answer, client)
    return status, headers


@asynchronous
async def test_a_request_that_has_arrived_unread_is_answered() -> None:
    async with connected() as (connection, client):
        client.sendall(REQUEST)
        assert (await answered(client))[0] == 200
        client.sendall(REQUEST)
        connection.shutdown()  # the loop has had no turn to read it
        assert (await answered(client))[0] == 200
        connection.shutdown()
        assert await asyncio.to_thread(closed, client)


@pytest.mark.parametrize("arrived_bytes", [0, 10])
@asynchronous
async def test_a_request_that_is_beginning_is_answered(monkeypatch: pytest.MonkeyPatch, arrived_bytes: int) -> None:
    monkeypatch.setattr(protocol, "ARRIVING_S", PATIENCE_S)
    async with connected() as (connection, client):
        client.sendall(REQUEST[:arrived_bytes])
        while connection._silent_bytes < arrived_bytes:
            await asyncio.sleep(0.001)
        connection.shutdown()
        client.sendall(REQUEST[arrived_bytes:])
        assert (await answered(client))[0] == 200
        connection.shutdown()
        assert await asyncio.to_thread(closed, client)


def test_every_connection_that_waits_to_be_accepted_is_answered(entities_bundle: Path) -> None:
    with serving(entities_bundle) as server, ExitStack() as stack:
        process = psutil.Process(server.process.pid)
        process.suspend()
        try:
            clients = [stack.enter_context(server.connect()) for _ in range(600)]
            for client in clients:
                client.sendall(REQUEST)
            process.send_signal(signal.SIGTERM)
        finally:
            process.resume()
        for client in clients:
            assert read_answer(client)[0] == 200
            assert closed(client)
        assert server.process.wait(PATIENCE_S) == 0
