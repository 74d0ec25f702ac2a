"""Workers on a Ray cluster: an actor with the bundle's pipeline for each core, to which this process hands one part at a time.

Plain actors, and not Ray Data: a part is read, answered and put into the output by one actor, so no rows pass between processes, there
is nothing to shuffle, and an actor that has one part at a time is all the back-pressure that is needed. Ray Data would choose blocks,
batches and file names by the load and by what failed, and repeats a block by its own rules; here they are fixed by the input, which is
what makes a rerun find what is missing, and the bytes equal.

The bundle's files go through Ray's object store to nodes that do not have them.
"""

import os
import platform
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from serve.bundle.cpu import available_cores, settle_threads
from serve.bundle.fetched import kept
from serve.bundle.manifest import MANIFEST, Bundle
from serve.errors import BadInput, BundleError, StillroomError
from serve.tasks import open_bundle
from stillroom.verbs.annotate.annotator import Annotator, Ready, bundle_changed, versions
from stillroom.verbs.annotate.parts import Job

LOCAL = "local"
INSTALL_RAY = 'pip install "stillroom[ray]"'
CONNECT_S = 5.0
STORE_BYTES = 128 * 2**20  # of the object store of a local cluster, beside the bundle


def load_ray(address: str) -> Any:
    """The module `ray`, without its telemetry; for a local cluster such that all of it listens on loopback.

    Raises:
        BadInput: it is not installed.
    """
    # Both are read when Ray is loaded.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address == LOCAL:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError:
        raise BadInput(f"--ray needs Ray, which is not installed; {INSTALL_RAY}") from None
    return ray


@contextmanager
def ray_workers(address: str, job: Job, processes: int | None) -> Iterator[list["RayWorker"]]:
    """Workers on the cluster at `address`, or on one of this machine's cores that lasts as long as this context.

    Raises:
        BadInput: Ray is not installed, nothing answers at the address, its versions differ, or it has too few CPUs.
    """
    # Ray prints on stdout which of its processes died, where `--json` has its document.
    with redirect_stdout(sys.stderr):
        ray = _connected(address, job, processes)
        try:
            cpus = int(ray.cluster_resources().get("CPU", 0))
            count = processes or cpus // job.threads
            if count * job.threads > cpus or not count:
                raise BadInput(
                    f"--ray {address} has {cpus} CPUs, and {count or 1} x {job.threads} are asked for; give fewer --processes or "
                    "--threads, or a larger cluster"
                )
            files = ray.put(_files_of(job))
            yield [RayWorker(ray, job, files) for _ in range(count)]
        finally:
            ray.shutdown()


def check_node(ready: Ready) -> None:
    """BadInput if a node has other versions than this machine: its parts would have other bytes."""
    here = versions()
    other = [
        f"{name} {ready.versions.get(name) or 'none'} instead of {mine or 'none'}"
        for name, mine in here.items()
        if ready.versions.get(name) != mine
    ]
    if other:
        raise BadInput(f"node {ready.node} has {', '.join(other)}; install the same versions on all nodes")


def _connected(address: str, job: Job, processes: int | None) -> Any:
    ray = load_ray(address)
    if address == LOCAL:
        bundle_bytes = sum(file.bytes for file in open_bundle(job.bundle).manifest.files.values())
        ray.init(
            address=LOCAL,
            num_cpus=(processes or max(1, available_cores() // job.threads)) * job.threads,
            object_store_memory=STORE_BYTES + bundle_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
        )
        return ray
    _check_answers(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = " ".join(lines[:3])
        remedy = "install the cluster's versions here"
        if "ersion" not in what:
            remedy = "give the address of a running cluster, such as HOST:6379; if it asks for a token, set RAY_AUTH_MODE=token"
        raise BadInput(f"--ray {address} cannot be used ({what}); {remedy}") from None
    return ray


def _check_answers(address: str) -> None:
    """BadInput if nothing listens at `address`. Ray itself tries for eight minutes."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and host and port.isdecimal()):
        raise BadInput(
            f"--ray is {address!r}; give {LOCAL}, or the address of a cluster: HOST:6379, or ray://HOST:10001"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise BadInput(
            f"--ray {address}: nothing answers there ({getattr(error, 'strerror', None) or error}); give the address of a running cluster "
            f"(`ray start --head` prints it), or {LOCAL}"
        ) from None


def _files_of(job: Job) -> dict[str, bytes]:
    """The files of the bundle, by name. BadInput if it is not the one that was checked at the start."""
    manifest, folder = open_bundle(job.bundle).manifest, Path(job.bundle)
    if manifest.digest != job.digest:
        raise bundle_changed(job)
    return {name: (folder / name).read_bytes() for name in (MANIFEST, *manifest.files)}


class RayWorker:
    """An actor with an `Annotator`."""

    def __init__(self, ray: Any, job: Job, files: Any) -> None:
        self._ray, self._job, self._files = ray, job, files
        self._actor: Any = None

    def start(self) -> "Future[Any]":
        """Starts the actor, or another one after it died."""
        self.end()
        remote = self._ray.remote(_Actor).options(num_cpus=self._job.threads, max_restarts=0, max_task_retries=0)
        # In a list the files stay in the object store until an actor asks for them.
        self._actor = remote.remote(self._job, [self._files])
        return self.submit("ready", None)

    def submit(self, method: str, item: Any) -> "Future[Any]":
        """Calls a method of the actor's `Annotator`."""
        future: Future[Any] = self._actor.call.remote(method, item).future()
        return future

    def died(self, error: Exception) -> bool:
        """Whether it says that Ray ended the actor, could not start it, or lost what it needs; not that our own code failed in it."""
        if isinstance(error, self._ray.exceptions.RayTaskError):
            error = error.cause
        return isinstance(error, self._ray.exceptions.RayError)

    def end(self) -> None:
        """Ends the actor at once."""
        if self._actor is not None:
            self._ray.kill(self._actor)


class _Actor:
    """What Ray makes an actor of."""

    def __init__(self, job: Job, files: list[Any]) -> None:
        settle_threads(job.threads)
        self._annotator = Annotator(job, lambda: _bundle_here(job, files[0]).path)

    def call(self, method: str, item: Any) -> Any:
        """The result of a method of the `Annotator`, or the StillroomError that it raised, with the node's name."""
        result = self._annotator.call(method, item)
        if isinstance(result, StillroomError):
            return type(result)(f"node {platform.node()}: {result.message}")
        return result


def _bundle_here(job: Job, files: Any) -> Bundle:
    """The bundle on this node: where the driver has it, or in this node's cache, filled from Ray's object store."""
    try:
        bundle = open_bundle(job.bundle)
        if bundle.manifest.digest == job.digest:
            return bundle
    except (BundleError, OSError):
        pass

    def fetch(partial: Path) -> Bundle:
        import ray

        for name, content in ray.get(files).items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes(content)
        bundle = open_bundle(partial)
        if bundle.manifest.digest != job.digest:  # it would be kept under the name of the other one
            raise bundle_changed(job)
        return bundle

    return kept(job.digest, fetch, job.bundle, 0)
