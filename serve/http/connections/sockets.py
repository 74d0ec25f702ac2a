"""The listening socket, the limit of open files, and the signal to reload."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

from serve.errors import BadInput

log = logging.getLogger("serve")

# Connections that the system holds until they are accepted.
BACKLOG = 1024
# Files that a server has open besides its connections: pipes to worker processes, its log, and bundles while they load.
OTHER_FILES = 128


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens on `host` and `port`. BadInput if that is not possible."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            raise BadInput(f"cannot listen on {host}, port {port} ({error}); give another --host or --port") from error
        listener.setblocking(False)
        yield listener


def is_loopback(host: str) -> bool:
    """Whether a server at `host` listens on a loopback address, which only this machine can reach."""
    with contextlib.suppress(OSError):  # no such name: `listening` says so
        host = host if ":" in host else socket.gethostbyname(host)
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False


class NotedHangup:
    """A handler of SIGHUP that takes note of it. The default one would end the process."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Takes note."""
        self.came = True


@contextmanager
def surviving_hangup() -> Iterator[None]:
    """Within this context SIGHUP does not end this process. One that comes before `reloading_on_hangup` is heeded there."""
    if not _hears_hangup():
        yield
        return
    before = signal.signal(signal.SIGHUP, NotedHangup())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@asynccontextmanager
async def reloading_on_hangup(*reloads: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Within this context, SIGHUP calls each of `reloads`, one call of each at a time. None waits for another.

    At the end calls under way are cancelled. On systems without SIGHUP, and outside the main thread, it does nothing.
    """
    if not _hears_hangup():
        yield
        return
    loop = asyncio.get_running_loop()
    asked = [asyncio.Event() for _ in reloads]

    async def when_asked(event: asyncio.Event, reload: Callable[[], Awaitable[None]]) -> None:
        while True:
            await event.wait()
            event.clear()
            try:
                await reload()
            except Exception:
                log.exception("reloading failed; the server goes on as it was")

    def ask(number: int, frame: FrameType | None) -> None:
        for event in asked:
            loop.call_soon_threadsafe(event.set)

    reloaders = [loop.create_task(when_asked(*each)) for each in zip(asked, reloads, strict=True)]
    before = signal.signal(signal.SIGHUP, ask)
    if isinstance(before, NotedHangup) and before.came:
        ask(signal.SIGHUP, None)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
        for reloader in reloaders:
            reloader.cancel()
        await asyncio.wait(reloaders)


def _hears_hangup() -> bool:
    return hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread()


def openable_connections(connections: int) -> int:
    """Raises this process's limit of open files for `connections`; returns how many connections the limit then allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning(
            "the limit of %d open files allows %d connections, not %d", hard, max(1, allowed - OTHER_FILES), connections
        )
    return max(1, allowed - OTHER_FILES)
