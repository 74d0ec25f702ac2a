"""Bundles served by Ray Serve, in a cluster of this machine alone, started and ended with `serve run`."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from benchmarks.serve.behind_haproxy import own_address

ROOT = Path(__file__).parents[2]
PORT = 8000
WAIT_S = 180.0


def ray_environment(host: str, folder: str) -> dict[str, str]:
    """The variables for Ray to answer HTTP on `host`, to write into `folder` alone, and to report nothing to anybody."""
    return {
        **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},  # of a cluster of somebody's
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_DEFAULT_HTTP_HOST": host,
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # otherwise Ray writes one into the home folder
        "RAY_TMPDIR": folder,
    }


@contextlib.contextmanager
def ray_serving(*arguments: str, prefix: str = "/", log: IO[str] | None = None) -> Iterator[tuple[str, psutil.Process]]:
    """`serve run stillroom.ray:application ARGUMENTS`: the URL, once every replica is ready, and the process. All end with it."""
    host = own_address()
    # Not in pytest's folder: the paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        program = shutil.which("serve", path=str(Path(sys.executable).parent)) or "serve"
        command = [program, "run", "--route-prefix", prefix, "stillroom.ray:application", *arguments]
        with subprocess.Popen(
            command, cwd=folder, env=ray_environment(host, folder), stdout=log, stderr=log
        ) as process:
            try:
                url = f"http://{host}:{PORT}{prefix.rstrip('/')}"
                _wait_until_ready(url, process)
                yield url, psutil.Process(process.pid)
            finally:
                end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends Ray with SIGTERM, and kills what is left of it after a while."""
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(WAIT_S / 3)
        _, left = psutil.wait_procs(below, timeout=20)
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise RuntimeError(f"`serve run` ended with {process.returncode}")
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            if urllib.request.urlopen(f"{url}/readyz", timeout=WAIT_S).status == 200:  # noqa: S310  # our own http URL
                return
        time.sleep(0.1)
    raise RuntimeError(f"{url} was not ready after {WAIT_S:g} s")
