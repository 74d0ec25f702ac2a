"""HTTP servers on loopback, in a thread, whose every answer a test decides down to the bytes."""

import asyncio
import contextlib
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from patience import PATIENCE_S


@dataclass(frozen=True)
class Asked:
    """One request."""

    head: str
    body: bytes
    number: int  # of all, from 0
    on_connection: int  # of its connection, from 0


PAUSE = b"<pause>"  # in what is written: a moment passes between the parts
# What is written back; None closes the connection without a word.
Handler = Callable[[Asked], Awaitable[bytes | None]]


def answer(status: int = 200, body: bytes = b"{}", *headers: str) -> bytes:
    """An answer with its length, after which the connection stays open."""
    lines = [f"HTTP/1.1 {status} Said", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


class Loopback:
    """A server under way: its address, and what it was asked."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None) -> None:
        self.handler, self.tls = handler, tls
        self.asked: list[Asked] = []
        self.connections = self.most_connections = 0
        self.listening = threading.Event()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://localhost:{self.port}/v1/ask?key=1"

    async def run(self) -> None:
        self.loop, self.stopping = asyncio.get_running_loop(), asyncio.Event()
        self.listener = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self.listener.sockets[0].getsockname()[1]
        self.listening.set()
        await self.stopping.wait()
        self.listener.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.most_connections = max(self.most_connections, self.connections)
        try:
            for on_connection in range(1_000_000):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                size = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(size[1]) if size else 0)
                self.asked.append(Asked(head, body, len(self.asked), on_connection))
                said = await self.handler(self.asked[-1])
                if said is None:
                    break
                for number, part in enumerate(said.split(PAUSE)):
                    await asyncio.sleep(0.005 * (number > 0))
                    writer.write(part)
                if (
                    b"content-length" not in said.lower() and b"chunked" not in said
                ) or b"connection: close" in said.lower():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
            return
        finally:
            self.connections -= 1
        writer.close()


@contextlib.contextmanager
def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> Iterator[Loopback]:
    """A server that answers as `handler` says, until the end of the block."""
    server = Loopback(handler, tls)
    thread = threading.Thread(target=lambda: asyncio.run(server.run()), daemon=True)
    thread.start()
    assert server.listening.wait(PATIENCE_S)
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(server.stopping.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def self_signed(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for localhost that nobody signed but itself, and the context of a server that shows it.

    A test that asks for it is skipped where there is no openssl command.
    """
    if not shutil.which("openssl"):
        pytest.skip("makes its certificate with the openssl command")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost -days 2"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    return certificate, tls
