"""Graceful shutdown: the server reports that it is not ready, finishes the requests it has, and ends within a bounded time."""

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from starlette.applications import Starlette

from serve.http.connections.acceptor import Acceptor
from serve.http.connections.limits import Watch
from serve.http.connections.protocol import Connection
from serve.http.connections.tls import Tls

log = logging.getLogger("serve")

# How often a stopping server checks whether it has finished.
CHECK_S = 0.02
# How long requests may take to end once their clients are cut off.
CUT_OFF_S = 1.0
# How long the app may take to end, with the worker processes, once no request is left.
LEAVE_S = 10.0
# Thresholds of the garbage collector for generations 0, 1 and 2, see gc.set_threshold.
COLLECT_AFTER = (10_000, 20, 20)


def collect_seldom() -> None:
    """Makes garbage collections rare, and excludes the objects that exist now.

    A request makes some hundred objects and leaves no cycles. Under load a tenth of this process's time went into collections, and
    every other second one took 30 to 60 ms, in which no request was answered, for objects that stay anyhow.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


class Server:
    """Serves an app on one listening socket, with our limits, until a signal stops it.

    The first SIGTERM or SIGINT starts the shutdown. For `linger_s` the server still accepts requests; `watch.stopping` is true, so
    /readyz answers 503 and each connection is closed after its answer. Then the requests under way have `drain_s`, and the rest is
    cut off. A second signal ends the process at once. With `handed` another process hands connections on; only SIGTERM stops the
    server then, or the end of that process.
    """

    def __init__(
        self,
        app: Starlette,
        watch: Watch,
        *,
        tls: Tls,
        linger_s: float,
        drain_s: float,
        handed: bool = False,
    ) -> None:
        self._app = app
        self._watch = watch
        self._tls = tls
        self._linger_s = linger_s
        self._drain_s = drain_s
        self._handed = handed

    def run(self, listener: socket.socket, opened: Callable[[], None]) -> None:
        """Serves the connections of `listener` until stopped. `opened` is called once they are accepted."""
        with asyncio.Runner(loop_factory=_fast_loop()) as runner:
            runner.run(self._serve(listener, opened))

    async def _serve(self, listener: socket.socket, opened: Callable[[], None]) -> None:
        stopped = asyncio.Event()
        lifespan = self._app.router.lifespan_context(self._app)
        with self._on_signals(stopped):
            await lifespan.__aenter__()
            acceptor = Acceptor(
                listener, self._watch, lambda: Connection(self._app, self._watch), self._tls, handed=self._handed
            )
            acceptor.open()
            watching = [
                asyncio.ensure_future(each) for each in (self._watch.close_late(), self._watch.measure_loop_lag())
            ]
            collect_seldom()
            opened()
            ends = [asyncio.create_task(each.wait()) for each in (stopped, acceptor.ended)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            self._watch.stopping = True
            await asyncio.sleep(0 if acceptor.ended.is_set() else self._linger_s)
            await acceptor.close()
            await asyncio.sleep(0)  # lets the tasks of the last connections start
            await self._drain()
            for each in watching:
                each.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await lifespan.__aexit__(None, None, None)

    @contextmanager
    def _on_signals(self, stopped: asyncio.Event) -> Iterator[None]:
        """Within this context the first signal sets `stopped`, and the second ends the process. Only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def stop(number: int, frame: FrameType | None) -> None:
            if self._watch.stopping:
                if self._handed:  # the accepting process counts signals; one to the whole group comes from there too
                    return
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._watch.stopping = True
            loop.call_soon_threadsafe(stopped.set)

        numbers = (signal.SIGTERM,) if self._handed else (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _drain(self) -> None:
        """Closes each connection after its answers; after `drain_s` cuts off what is left."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._drain_s
        while self._watch.open or self._watch.tasks:
            for connection in list(self._watch.connections):
                connection.shutdown()
            if loop.time() > deadline_s:
                await self._cut_off()
                return
            await asyncio.sleep(CHECK_S)

    async def _cut_off(self) -> None:
        left = list(self._watch.connections)
        log.warning("connections that are cut off, since they were not done within %g s: %d", self._drain_s, len(left))
        for connection in left:
            connection.abort("stopping")
        # Their requests end when they see the disconnect; one that does not is cancelled.
        if tasks := set(self._watch.tasks):
            _, late = await asyncio.wait(tasks, timeout=CUT_OFF_S)
            for task in late:
                task.cancel()


def _fast_loop() -> Callable[[], Any] | None:
    """uvloop's event loop where it can be had."""
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop
