"""Graceful shutdown: the server reports that it is not ready, finishes the requests it has, and ends within a bounded time."""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn

from serve.http.connections.acceptor import Acceptor
from serve.http.connections.limits import Connection, Watch
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


class DrainingServer(uvicorn.Server):
    """uvicorn's server with our acceptor, limits and shutdown.

    The first SIGTERM or SIGINT starts the shutdown. For `linger_s` the server still accepts requests; `watch.stopping` is true, so
    /readyz answers 503 and each connection is closed after its answer. Then the requests under way have `drain_s`, and the rest is
    cut off. A second signal ends the process at once. `opened` is called with the port once the server accepts connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        watch: Watch,
        *,
        tls: Tls,
        linger_s: float,
        drain_s: float,
        opened: Callable[[int], None],
    ) -> None:
        super().__init__(config)
        self._watch = watch
        self._tls = tls
        self._linger_s = linger_s
        self._drain_s = drain_s
        self._opened = opened
        self._acceptor: Acceptor
        self._watching: list[asyncio.Future[None]]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the app, then accepts connections from the one listening socket in `sockets`."""
        await super().startup(sockets=[])  # no sockets for uvicorn, since the acceptor accepts
        (listener,) = sockets or []
        self._acceptor = Acceptor(listener, self._watch, self._connection, self._tls)
        self._acceptor.open()
        self._watching = [asyncio.ensure_future(each) for each in (self._watch.keep(), self._watch.feel())]
        collect_seldom()
        self._opened(listener.getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lingers, drains and cuts off: see the class."""
        self._watch.stopping = True  # also if no signal stopped it
        await asyncio.sleep(self._linger_s)
        self._acceptor.close()
        await asyncio.sleep(0)  # lets the tasks of the last connections start
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._drain_s
        while self._watch.open or self.server_state.tasks:
            for connection in list(self._watch.connections):
                connection.shutdown()
            if loop.time() > deadline_s:
                await self._cut_off()
                break
            await asyncio.sleep(CHECK_S)
        for watching in self._watching:
            watching.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.lifespan.shutdown(), LEAVE_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the shutdown; the second ends the process."""
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            os.kill(os.getpid(), sig)
        self._watch.stopping = True
        self.should_exit = True

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state, self._watch)

    async def _cut_off(self) -> None:
        left = list(self._watch.connections)
        log.warning("connections that are cut off, since they were not done within %g s: %d", self._drain_s, len(left))
        for connection in left:
            connection.abort("stopping")
        # Their requests end when they see the disconnect; one that does not is cancelled.
        tasks = set(self.server_state.tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CUT_OFF_S)
            for task in late:
                task.cancel()
