"""`stillroom serve` as a service manager, a terminal and a pipe treat it: SIGHUP at any time, streams that are closed."""

import asyncio
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from coroutines import asynchronous
from patience import PATIENCE_S
from repository import ROOT
from server_process import HTTP, until

from serve.http.connections.sockets import OTHER_FILES, is_loopback, openable_connections, reloading_on_hangup

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")

KINDS = {"one-process": (), "two-processes": ("--processes", "2")}


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """A server in a process group of its own, with its output in a pipe and its log in a file."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process, self._log = process, log

    def log(self) -> str:
        return self._log.read_text()

    def line(self, *, while_waiting: signal.Signals | None = None) -> str:
        """The first line that it prints, at once also into a pipe; meanwhile it gets that signal again and again."""
        assert self.process.stdout
        deadline_s = time.monotonic() + PATIENCE_S
        while not select.select([self.process.stdout], [], [], 0.02)[0]:
            assert time.monotonic() < deadline_s
            if while_waiting:
                self.process.send_signal(while_waiting)
        return self.process.stdout.readline().decode().strip()

    def until_ready(self, url: str) -> None:
        until(lambda: HTTP.get(f"{url}/readyz").status_code == 200)


@contextmanager
def running(
    *arguments: object,
    program: tuple[str, ...] = ("stillroom", "serve"),
    closing: str = "",
    stdout: int = subprocess.PIPE,
) -> Iterator[Running]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["bash", "-c", f'exec "$@" {closing}', "bash", sys.executable, "-m", *program, *map(str, arguments)]
    command += ["--threads", "1"] + (["--port", "0"] if "--port" not in command else [])
    command += [] if "--processes" in command else ["--processes", "1"]
    command += [] if "--linger-s" in command else ["--linger-s", "0"]
    with (
        tempfile.NamedTemporaryFile("a") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdout=stdout, stderr=log, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            yield Running(process, Path(log.name))
        finally:
            children = [] if process.poll() is not None else psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in children:
                child.kill()


def loaded(process: "subprocess.Popen[bytes]", library: str) -> bool:
    """Whether it has come as far as to load `library`, which it does long before it listens."""
    return any(library in each.path for each in psutil.Process(process.pid).memory_maps())


def ended(server: Running) -> int:
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(PATIENCE_S)


@pytest.mark.parametrize("kind", KINDS)
def test_sighup_before_it_listens_as_it_serves_and_as_it_stops_ends_nothing(kind: str, entities_bundle: Path) -> None:
    program = ("serve",) if kind == "two-processes" else ("stillroom", "serve")
    with running(entities_bundle, *KINDS[kind], "--linger-s", "1", program=program) as server:
        until(lambda: loaded(server.process, "msgspec"))
        url = server.line(while_waiting=signal.SIGHUP)
        assert url.startswith("http://"), server.log()
        server.until_ready(url)
        before = server.log().count("is now")
        os.killpg(server.process.pid, signal.SIGHUP)
        until(lambda: server.log().count("is now") >= before + (2 if kind == "two-processes" else 1))
        server.until_ready(url)
        assert HTTP.post(f"{url}/v1/entities", json={"text": "rome"}).status_code == 200
        for told in ("died", "starting another", "Traceback"):
            assert told not in server.log()
        server.process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + PATIENCE_S
        while server.process.poll() is None:
            assert time.monotonic() < deadline_s
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.002)
        assert server.process.returncode == 0


def test_a_process_that_was_stopped_is_woken_to_end(entities_bundle: Path) -> None:
    with running(entities_bundle, *KINDS["two-processes"], "--drain-s", "600") as server:
        server.until_ready(server.line())
        psutil.Process(server.process.pid).children()[0].suspend()
        assert ended(server) == 0


@pytest.mark.parametrize(
    ("program", "closing"),
    [(("stillroom", "serve"), ">&-"), (("serve",), "2>&-"), (("serve",), ">&- 2>&-")],
)
def test_it_serves_with_closed_streams(
    program: tuple[str, ...], closing: str, entities_bundle: Path, free_port: int
) -> None:
    with running(entities_bundle, "--port", free_port, program=program, closing=closing) as server:
        url = f"http://127.0.0.1:{free_port}"

        def ready() -> bool:
            assert server.process.poll() is None, server.log()
            try:
                return HTTP.get(f"{url}/readyz").status_code == 200
            except httpx.TransportError:
                return False

        until(ready)
        answer = HTTP.post(f"{url}/v1/entities", json={"text": "rome"})
        assert answer.json()["results"][0]["entities"]
        if closing == "2>&-":
            assert server.line() == url
        assert ended(server) == 0
        assert "Traceback" not in server.log()
        assert server.log().count("standard output is closed") == (closing == ">&-")


def test_a_server_whose_output_nobody_reads_says_so_once_and_serves(entities_bundle: Path) -> None:
    unread, written = os.pipe()
    os.close(unread)
    with running(entities_bundle, stdout=written) as server:
        os.close(written)
        until(lambda: "ready" in server.log())
        (told,) = [line for line in server.log().splitlines() if "cannot be printed" in line]
        url = re.search(r"http://127\.0\.0\.1:\d+", told)
        assert url
        server.until_ready(url[0])
        assert ended(server) == 0
        assert "Traceback" not in server.log()
        assert "Exception" not in server.log()


LIMITED = """
import logging, resource, sys
from serve.http.connections.sockets import openable_connections
logging.basicConfig(stream=sys.stdout, format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
print(openable_connections(int(sys.argv[2])), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_the_limit_of_open_files_is_raised_for_the_connections_as_far_as_it_may_be() -> None:
    def openable(hard: int, connections: int) -> list[str]:
        command = [sys.executable, "-c", LIMITED, str(hard), str(connections)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert openable(400, 100) == [f"100 {100 + OTHER_FILES}"]
    warning, found = openable(400, 1000)
    assert found == f"{400 - OTHER_FILES} 400"
    assert {"400", "1000", str(400 - OTHER_FILES)} <= set(re.findall(r"\d+", warning))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("192.0.2.1", False)],  # noqa: S104
)
def test_only_this_machine_reaches_a_loopback_address(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_without_such_a_limit_all_connections_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert openable_connections(1_000_000) == 1_000_000


@asynchronous
async def test_a_reload_that_fails_is_told_and_the_next_one_is_made(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[bool] = []

    async def reload() -> None:
        calls.append(True)
        if len(calls) == 1:
            raise ValueError("unforeseen")

    async with reloading_on_hangup(reload), asyncio.timeout(PATIENCE_S):
        for number in (1, 2):
            os.kill(os.getpid(), signal.SIGHUP)
            while len(calls) < number:
                await asyncio.sleep(0.001)
    assert "unforeseen" in caplog.text
