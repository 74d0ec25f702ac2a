"""The socket a server listens on, and the signals that stop it."""

import asyncio
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from serve.errors import BadInput


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens on `host` and `port`. BadInput when that is not possible."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1024)
        except (OSError, OverflowError) as error:
            raise BadInput(f"cannot listen on {host}, port {port} ({error}); give another --host or --port") from error
        yield listener


@contextmanager
def reloading_on_hangup(reload: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Within it, SIGHUP calls `reload`, one call after another. Where there are no such signals, nothing does."""
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = asyncio.Event()

    async def when_asked() -> None:
        while True:
            await asked.wait()
            asked.clear()
            await reload()

    loop = asyncio.get_running_loop()
    reloader = loop.create_task(when_asked())
    loop.add_signal_handler(signal.SIGHUP, asked.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        reloader.cancel()


@contextmanager
def signals_kept_from_killing() -> Iterator[None]:
    """Within it, SIGTERM and SIGINT do nothing by themselves.

    uvicorn handles both while it runs, and sends them again once it has drained; by default the process would then
    die of them instead of returning.
    """
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
