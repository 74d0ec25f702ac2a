"""What a stopping server does with a request that arrives at that very moment."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S
from server_process import closed, read_answer, serving
from starlette.types import Receive, Scope, Send

from serve.http.connections import protocol
from serve.http.connections.limits import Watch
from serve.http.connections.protocol import Connection
from serve.observe.metrics import Metrics
from serve.settings import ConnectionLimits

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


def test_a_request_that_has_arrived_unread_is_answered() -> None:
    async def run() -> None:
        async with connected() as (connection, client):
            client.sendall(REQUEST)
            assert (await answered(client))[0] == 200
            client.sendall(REQUEST)
            connection.shutdown()  # the loop has had no turn to read it
            assert (await answered(client))[0] == 200
            connection.shutdown()
            assert await asyncio.to_thread(closed, client)

    asyncio.run(run())


@pytest.mark.parametrize("arrived_bytes", [0, 10])
def test_a_request_that_is_just_beginning_is_answered(monkeypatch: pytest.MonkeyPatch, arrived_bytes: int) -> None:
    monkeypatch.setattr(protocol, "ARRIVING_S", PATIENCE_S)

    async def run() -> None:
        async with connected() as (connection, client):
            client.sendall(REQUEST[:arrived_bytes])
            while connection._silent_bytes < arrived_bytes:
                await asyncio.sleep(0.001)
            connection.shutdown()
            client.sendall(REQUEST[arrived_bytes:])
            assert (await answered(client))[0] == 200
            connection.shutdown()
            assert await asyncio.to_thread(closed, client)

    asyncio.run(run())


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
            status, headers, _ = read_answer(client)
            assert (status, headers["connection"]) == (200, "close")
        assert server.process.wait(PATIENCE_S) == 0
