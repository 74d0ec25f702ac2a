"""A real server in a process of its own, whose log can be read, and raw connections to it."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from patience import PATIENCE_S
from repository import ROOT

# `httpx.get` reads the certificates of the system each time, which takes longer than most answers. A connection serves one request.
HTTP = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))

# `python -m serve` with some constants of its modules changed, and whose models stand still while there is a file.
SERVE = """
import os, time
from importlib import import_module
import serve.__main__
from serve.model.session import Session
for name, value in {constants!r}.items():
    module, _, constant = name.rpartition(".")
    assert hasattr(import_module(module), constant), name
    setattr(import_module(module), constant, value)
run = Session.run
def run_unless_held(session, rows):
    while os.path.exists({hold!r}):
        time.sleep(0.005)
    return run(session, rows)
Session.run = run_unless_held
raise SystemExit(serve.__main__.main())
"""


class Server:
    """`python -m serve`, running."""

    def __init__(self, url: str, process: subprocess.Popen[str], log: Path) -> None:
        self.url = url
        self.process = process
        self._log = log
        self._hold = hold_of(log)
        self.address = ("127.0.0.1", int(url.rpartition(":")[2]))

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Within it, until what it gives is called, its models stand still, while the rest of it goes on."""
        self._hold.touch()
        try:
            yield lambda: self._hold.unlink(missing_ok=True)
        finally:
            self._hold.unlink(missing_ok=True)

    def processes(self) -> list[psutil.Process]:
        """The processes that serve; the one that was started accepts for them."""
        return psutil.Process(self.process.pid).children()

    def log(self) -> list[str]:
        """The whole lines of its log so far; one that it is still writing is not among them."""
        written, _, _ = self._log.read_text().rpartition("\n")
        return written.splitlines()

    def entries(self, message: str = "request") -> list[dict[str, Any]]:
        """The entries of its JSON log with that message."""
        return [entry for entry in map(json.loads, self.log()) if entry["message"] == message]

    def logged(self, wanted: Callable[[dict[str, Any]], bool], message: str = "request") -> dict[str, Any]:
        """The first such entry, once it is there."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [entry for entry in self.entries(message) if wanted(entry)]
            return bool(found)

        until(there)
        return found[0]

    def connect(self) -> socket.socket:
        """A new connection to it."""
        return socket.create_connection(self.address, timeout=PATIENCE_S)

    def get(self, path: str, **how: Any) -> httpx.Response:
        """The answer to a GET, on a connection of its own."""
        return HTTP.get(f"{self.url}{path}", **how)

    def post(self, path: str, **how: Any) -> httpx.Response:
        """The answer to a POST, on a connection of its own."""
        return HTTP.post(f"{self.url}{path}", **how)

    def metric(self, sample: str) -> float:
        """What its first process says of one sample, 0 where it says nothing."""
        return value_of(sample, self.get("/metrics").text)


@contextmanager
def serving(
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    ready: bool = True,
    said: str = "http://",
    constants: Mapping[str, float] | None = None,
) -> Iterator[Server]:
    """A server that reads and computes in one process with one thread, ready unless told not to wait, stopped at the end.

    `constants` are other values of those of its modules, by their whole names. It is never too far behind to read, unless told: on a busy
    machine it would answer 429 to what a test asks.
    """
    changed = {"serve.http.connections.limits.BEHIND_S": 600.0, **(constants or {})}
    command = [*map(str, arguments), "--port", "0", "--threads", "1"]
    if "--processes" not in command:
        command += ["--processes", "1"]
    if "--linger-s" not in command:
        command += ["--linger-s", "0"]
    with (
        # Read by its name: a reader of `log` would share its position with the server, which moves it while it is read.
        tempfile.NamedTemporaryFile("a") as log,
        subprocess.Popen(
            [sys.executable, "-c", SERVE.format(constants=changed, hold=str(hold_of(Path(log.name)))), *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **(environment or {})},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            server = Server(url, process, Path(log.name)) if url.startswith(said) else None
            assert server, (url, Path(log.name).read_text())
            if ready:
                until(lambda: HTTP.get(f"{url}/readyz").status_code == 200)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(timeout=PATIENCE_S)
            except BaseException:
                process.kill()
                raise


def value_of(sample: str, metrics: str) -> float:
    """The value of one sample of the first process, or of the one that it names; 0 where there is none."""
    name, _, labels = sample.partition("{")
    of_first = f'{name}{{process="0"' + (f",{labels}" if labels else "}")
    found = re.search(rf"^(?:{re.escape(sample)}|{re.escape(of_first)}) (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


def hold_of(log: Path) -> Path:
    """The file while which the models of the server with that log stand still."""
    return log.with_suffix(".hold")


def until(condition: Callable[[], bool]) -> None:
    """Waits for it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (names in small letters) and body of the next answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        part = connection.recv(65536)
        assert part, body
        body += part
    return int(first.split()[1]), headers, body


def closed(connection: socket.socket) -> bool:
    """Whether the server closes it, after whatever it still sends."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True  # otherwise `recv` ran out of its time


def request(body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A POST to /v1/entities."""
    lines = ["POST /v1/entities HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body) if length is None else length}", "", ""]).encode() + body
