"""A server that stops in good order: it says so, takes what is on its way, finishes what it has, and never waits for ever."""

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn

from serve.http.connections.acceptor import Acceptor
from serve.http.connections.limits import Connection, Watch

log = logging.getLogger("serve")

# How often a server that stops looks whether it has finished.
LOOK_S = 0.02
# How long requests may take to end by themselves once their clients are cut off.
CUT_OFF_S = 1.0
# How long the models' processes may take for what they compute, once nobody waits for it.
LEAVE_S = 10.0
# After how many new objects the youngest are looked through; after how many such looks those of middle age, and of these the old.
COLLECT_AFTER = (10_000, 20, 20)


def collect_seldom() -> None:
    """Has this process look for cycles of garbage seldom, from now on, and not among what is there now.

    A request leaves no cycles, but some hundred objects while it is answered: under load a tenth of this process's time went into
    looking through them, and every other second 30 to 60 ms at once, in which nobody was answered, for what will stay anyhow.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


class DrainingServer(uvicorn.Server):
    """uvicorn's server with an acceptor, limits and an end of its own.

    The first SIGTERM or SIGINT begins to drain: for `linger_s` it still takes requests (and `watch.stopping` is true, so that
    it says it is not ready and that each connection is closed after its answer), then it gives those under way `drain_s` and
    cuts off what is left. A second signal ends the process at once. `opened` is called with its port when it takes
    connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        watch: Watch,
        *,
        context: ssl.SSLContext | None,
        linger_s: float,
        drain_s: float,
        opened: Callable[[int], None],
    ) -> None:
        super().__init__(config)
        self._watch = watch
        self._context = context
        self._linger_s = linger_s
        self._drain_s = drain_s
        self._opened = opened
        self._acceptor: Acceptor
        self._watching: list[asyncio.Future[None]]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the app, then accepts connections from the one socket, which listens."""
        await super().startup(sockets=[])  # uvicorn accepts from none; the acceptor does
        (listener,) = sockets or []
        self._acceptor = Acceptor(listener, self._watch, self._connection, self._context)
        self._acceptor.open()
        self._watching = [asyncio.ensure_future(each) for each in (self._watch.keep(), self._watch.feel())]
        collect_seldom()
        self._opened(listener.getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains: see the class."""
        self._watch.stopping = True  # also when it was not a signal that stopped it
        await asyncio.sleep(self._linger_s)
        self._acceptor.close()
        await asyncio.sleep(0)  # those let in last begin
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._drain_s
        while self._watch.open or self.server_state.tasks:
            for connection in list(self._watch.connections):
                connection.shutdown()
            if loop.time() > deadline_s:
                await self._cut_off()
                break
            await asyncio.sleep(LOOK_S)
        for watching in self._watching:
            watching.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.lifespan.shutdown(), LEAVE_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to drain; the second ends the process."""
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            os.kill(os.getpid(), sig)
        self._watch.stopping = True
        self.should_exit = True

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state, self._watch)

    async def _cut_off(self) -> None:
        left = list(self._watch.connections)
        log.warning("%d connections were not done within %g s and are cut off", len(left), self._drain_s)
        for connection in left:
            connection.abort("stopping")
        # Their requests hear of it and end by themselves; one that does not is cancelled.
        tasks = set(self.server_state.tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CUT_OFF_S)
            for task in late:
                task.cancel()
