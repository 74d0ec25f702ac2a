"""Runs stillroom's server in its own process: requests to it, and the memory and CPU time of its processes."""

import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil

from latency.load import driver
from latency.load.driver import Driven
from latency.load.http_client import target_of
from serve.tasks import open_bundle, task_of

START_S = 180.0
STOP_S = 60.0


class Place(NamedTuple):
    """The address of a server."""

    host: str
    port: int


def post(place: Place, path: str, body: bytes, content_type: str = "application/json") -> bytes:
    """A whole POST, ready to be written."""
    return target_of(f"http://{place.host}:{place.port}{path}", {"Content-Type": content_type}).request(body)


def drive(
    place: Place,
    requests: Sequence[bytes],
    *,
    connections: int,
    due_s: npt.NDArray[np.float64] | None = None,
    timeout_s: float = 60.0,
) -> Driven:
    """Sends whole requests with the generator of `stillroom load`; keeps the body of every answer."""
    target = target_of(f"http://{place.host}:{place.port}")
    return driver.drive(target, requests, connections=connections, due_s=due_s, timeout_s=timeout_s, keep_bodies=True)


@dataclass(frozen=True)
class Server:
    """A running server."""

    place: Place
    process: psutil.Process

    def tree(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        return [self.process, *self.process.children(recursive=True)]

    def rss_bytes(self) -> int:
        """Resident memory of the tree; pages shared by processes count in each."""
        return sum(_of(each, lambda it: it.memory_info().rss) for each in self.tree())

    def core_s(self) -> tuple[float, float]:
        """Core-seconds of the process, and of its descendants."""
        own, *below = [_of(each, lambda it: sum(it.cpu_times()[:2])) for each in self.tree()]
        return own, sum(below)


def _of(process: psutil.Process, read: Any) -> Any:
    try:
        return read(process)
    except psutil.NoSuchProcess:
        return 0


@contextlib.contextmanager
def serving(
    bundles: Sequence[Path], *options: str, log: Path | None = None, python: str = sys.executable
) -> Iterator[Server]:
    """Starts stillroom's server with `bundles` and yields it once ready; ends with SIGTERM. RuntimeError if it does not start.

    `python` may be that of another checkout's environment.
    """
    command = [python, "-P", "-m", "serve", *map(str, bundles), "--port", "0", *options]
    with contextlib.ExitStack() as files:
        stderr = files.enter_context(log.open("ab")) if log else None
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
            try:
                assert process.stdout is not None
                if not (url := process.stdout.readline().strip()):
                    raise RuntimeError(f"the server ended with {process.wait()} before it listened")
                host, _, port = url.removeprefix("http://").rpartition(":")
                place = Place(host, int(port))
                wait_until_ready(place, "/readyz", process)
                yield Server(place, psutil.Process(process.pid))
            finally:
                stop(process)


def wait_until_ready(place: Place, path: str, process: subprocess.Popen[Any], statuses: Sequence[int] = (200,)) -> None:
    """Waits until GET `path` gives one of `statuses`. RuntimeError if the process ends, or after START_S."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < START_S:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it was ready")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if get(place, path)[0] in statuses:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {START_S:g} s")


def get(place: Place, path: str) -> tuple[int, bytes]:
    """A GET on a new connection: the status and the body."""
    with contextlib.closing(http.client.HTTPConnection(*place, timeout=10)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def stop(process: subprocess.Popen[Any]) -> None:
    """Ends a server with SIGTERM; kills what remains of it and its descendants after STOP_S."""
    if process.poll() is None:
        below = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        for each in [*below, process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def endpoint(bundle: Path) -> str:
    """The path of the endpoint for the bundle's task."""
    return task_of(open_bundle(bundle).manifest).endpoint.path


def text_body(texts: str | list[str], **more: Any) -> bytes:
    """The JSON of a request."""
    return json.dumps({"text": texts, **more}, ensure_ascii=False).encode("utf-8")


def results_of(body: bytes) -> Any:
    """The `results` of an answer; None of anything else."""
    with contextlib.suppress(ValueError):
        answer = json.loads(body)
        if isinstance(answer, dict):
            return answer.get("results")
    return None
