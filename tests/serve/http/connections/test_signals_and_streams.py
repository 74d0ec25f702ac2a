"""`stillroom serve` as a service manager, a terminal and a pipe treat it: SIGHUP at any time, streams that are closed."""

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
from patience import PATIENCE_S
from repository import ROOT
from server_process import until

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")

KINDS = {"one-front": (), "two-fronts": ("--fronts", "2", "--processes", "2")}


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
        """The first line that it prints; meanwhile it gets that signal again and again."""
        assert self.process.stdout
        deadline_s = time.monotonic() + PATIENCE_S
        while not select.select([self.process.stdout], [], [], 0.02)[0]:
            assert time.monotonic() < deadline_s
            if while_waiting:
                self.process.send_signal(while_waiting)
        return self.process.stdout.readline().decode().strip()

    def metrics(self, url: str) -> str:
        return httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text

    def until_ready(self, url: str) -> None:
        until(lambda: httpx.get(f"{url}/readyz", timeout=PATIENCE_S).status_code == 200)


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


@pytest.mark.parametrize(
    ("program", "fronts"),
    [
        pytest.param(("stillroom", "serve"), KINDS["one-front"], id="stillroom"),
        pytest.param(("serve",), KINDS["two-fronts"], id="serve-with-two-fronts"),
    ],
)
def test_a_hangup_before_it_listens_ends_nothing(
    program: tuple[str, ...], fronts: tuple[str, ...], entities_bundle: Path
) -> None:
    with running(entities_bundle, *fronts, program=program) as server:
        until(lambda: loaded(server.process, "msgspec"))
        url = server.line(while_waiting=signal.SIGHUP)
        assert url.startswith("http://"), server.log()
        if not fronts:  # what was asked for before it could be done is done now
            until(lambda: 'reloads_total{model="cities",result="done"}' in server.metrics(url))
        server.until_ready(url)
        assert ended(server) == 0
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("fronts", KINDS.values(), ids=KINDS)
def test_a_hangup_of_the_whole_group_reloads_and_kills_no_process(
    fronts: tuple[str, ...], entities_bundle: Path
) -> None:
    with running(entities_bundle, *fronts) as server:
        url = server.line()
        server.until_ready(url)
        os.killpg(server.process.pid, signal.SIGHUP)
        until(lambda: server.log().count("is now") >= max(1, len(fronts) // 2))
        server.until_ready(url)
        assert httpx.post(f"{url}/v1/entities", json={"text": "rome"}, timeout=PATIENCE_S).status_code == 200
        assert ended(server) == 0
        assert "died" not in server.log()
        assert "starting another" not in server.log()


@pytest.mark.parametrize("fronts", KINDS.values(), ids=KINDS)
def test_a_hangup_during_a_stop_does_not_change_the_exit_code(fronts: tuple[str, ...], entities_bundle: Path) -> None:
    with running(entities_bundle, *fronts, "--linger-s", "1") as server:
        server.until_ready(server.line())
        server.process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + PATIENCE_S
        while server.process.poll() is None:
            assert time.monotonic() < deadline_s
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.002)
        assert server.process.returncode == 0


def test_a_front_that_was_stopped_is_woken_to_end(entities_bundle: Path) -> None:
    with running(entities_bundle, *KINDS["two-fronts"], "--drain-s", "600") as server:
        server.until_ready(server.line())
        psutil.Process(server.process.pid).children()[0].suspend()
        assert ended(server) == 0


def test_the_address_is_written_into_a_pipe_at_once(entities_bundle: Path) -> None:
    with running(entities_bundle) as server:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", server.line())


@pytest.mark.parametrize(
    ("program", "closing"),
    [
        (("stillroom", "serve"), ">&-"),
        (("stillroom", "serve"), "2>&-"),
        (("serve",), ">&- 2>&-"),
    ],
)
def test_a_server_with_closed_streams_serves(
    program: tuple[str, ...], closing: str, entities_bundle: Path, free_port: int
) -> None:
    with running(entities_bundle, "--port", free_port, program=program, closing=closing) as server:
        url = f"http://127.0.0.1:{free_port}"

        def ready() -> bool:
            assert server.process.poll() is None, server.log()
            try:
                return httpx.get(f"{url}/readyz", timeout=PATIENCE_S).status_code == 200
            except httpx.TransportError:
                return False

        until(ready)
        answer = httpx.post(f"{url}/v1/entities", json={"text": "rome"}, timeout=PATIENCE_S)
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
