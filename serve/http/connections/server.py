"""Accepts connections up to the limit, and shuts down gracefully: the server reports that it is not ready, finishes the requests it
has, and ends within a bounded time.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from starlette.applications import Starlette

from serve.errors import Unavailable
from serve.http.connections.exchange import raw_answer
from serve.http.connections.limits import Watch
from serve.http.connections.protocol import Connection
from serve.http.connections.sockets import BACKLOG
from serve.observe.request_context import new_request_id

log = logging.getLogger("serve")

# How often a stopping server checks whether it has finished.
CHECK_S = 0.02
# How long requests may take to end once their clients are cut off.
CUT_OFF_S = 1.0
# How long the app may take to end, with the threads of its models, once no request is left.
LEAVE_S = 10.0
# Connections accepted in one go, so that a flood of new ones leaves time for the open ones.
AT_ONCE = 64
# Pause if the system has no file descriptor or memory left for another connection.
PAUSE_S = 0.2
# A connection whose client vanished without closing it ends after two minutes: an idle one gets 4 probes, 15 s apart, after 60 s; for
# one with unacknowledged data TCP_USER_TIMEOUT counts. The system buffers at most 128 KiB of unsent data, so that this process sees
# whether the client reads. Some systems lack some of these options.
OPTIONS = (
    ("TCP_NODELAY", 1),
    ("TCP_KEEPIDLE", 60),
    ("TCP_KEEPINTVL", 15),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 120_000),
    ("TCP_NOTSENT_LOWAT", 131_072),
)
# How long the shutdown of a TLS connection may take.
TLS_SHUTDOWN_S = 5.0
# How long the process that hands connections on may take to hand on the last.
LAST_HANDED_S = 2.0

FULL = Unavailable("all connections of this server are in use; try again in a second")


class Server:
    """Serves an app on one listening socket, with our limits, until a signal stops it.

    The first SIGTERM or SIGINT starts the shutdown. For `linger_s` the server still accepts requests; `watch.stopping` is true, so
    /readyz answers 503 and each connection is closed after its answer. Then the requests under way have `drain_s`, and the rest is
    cut off. A second signal ends the process at once. With `handed` another process hands connections on; only SIGTERM stops the
    server then, or the end of that process.
    """

    def __init__(self, app: Starlette, watch: Watch, *, linger_s: float, drain_s: float, handed: bool = False) -> None:
        self._app = app
        self._watch = watch
        self._linger_s = linger_s
        self._drain_s = drain_s
        self._handed = handed
        self._all_handed = asyncio.Event()
        """Set once the process that hands connections on has closed the socket over which it does."""
        self._entering: set[asyncio.Task[None]] = set()
        self._open = False  # whether connections are accepted
        self._said_full_s = 0.0

    def run(self, listener: socket.socket, opened: Callable[[], None]) -> None:
        """Serves the connections of `listener` until stopped. `opened` is called once they are accepted."""
        self._listener = listener
        make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
        with suppress(ImportError):  # it is not on Windows
            import uvloop

            make_loop = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(self._serve(opened))

    async def _serve(self, opened: Callable[[], None]) -> None:
        stopped = asyncio.Event()
        lifespan = self._app.router.lifespan_context(self._app)
        with self._on_signals(stopped):
            await lifespan.__aenter__()
            self._open = True
            asyncio.get_running_loop().add_reader(self._listener, self._accept)
            watching = [
                asyncio.ensure_future(each) for each in (self._watch.close_late(), self._watch.measure_loop_lag())
            ]
            # Garbage collections become rare, and leave out the objects that exist now. A request makes some hundred objects and leaves no
            # cycles. Under load a tenth of this process's time went into collections, and every other second one took 30 to 60 ms, in
            # which no request was answered, for objects that stay anyhow.
            gc.collect()
            gc.freeze()
            gc.set_threshold(10_000, 20, 20)  # for generations 0, 1 and 2
            opened()
            ends = [asyncio.create_task(each.wait()) for each in (stopped, self._all_handed)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            self._watch.stopping = True
            await asyncio.sleep(0 if self._all_handed.is_set() else self._linger_s)
            await self._stop_accepting()
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
            left = list(self._watch.connections)
            for connection in left:
                connection.shutdown()
            if loop.time() <= deadline_s:
                await asyncio.sleep(CHECK_S)
                continue
            log.warning(
                "connections that are cut off, since they were not done within %g s: %d", self._drain_s, len(left)
            )
            for connection in left:
                connection.abort("stopping")
            # Their requests end when they see the disconnect; one that does not is cancelled.
            if tasks := set(self._watch.tasks):
                _, late = await asyncio.wait(tasks, timeout=CUT_OFF_S)
                for task in late:
                    task.cancel()
            return

    async def _stop_accepting(self) -> None:
        """Accepts the connections that are waiting, then stops and closes the listening socket."""
        if self._handed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_handed.wait(), LAST_HANDED_S)
        if self._open:
            for _ in range(BACKLOG // AT_ONCE + 1):  # bounded, for clients that connect faster than this accepts
                if not self._accept():
                    break
            self._open = False
            asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> bool:
        """Accepts the connections that wait, up to `AT_ONCE`; whether that many did."""
        loop = asyncio.get_running_loop()
        for _ in range(AT_ONCE):
            try:
                client = self._next() if self._handed else self._listener.accept()[0]
            except EOFError:
                self._open = False
                loop.remove_reader(self._listener)
                self._all_handed.set()
                return False
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                log.error("no connection can be accepted (%s); trying again in %g s", error, PAUSE_S)
                loop.remove_reader(self._listener)
                loop.call_later(PAUSE_S, lambda: self._open and loop.add_reader(self._listener, self._accept))
                return False
            if self._watch.has_room():
                self._watch.open += 1
                task = loop.create_task(self._enter(client))
                self._entering.add(task)
                task.add_done_callback(self._entering.discard)
            else:
                self._refuse(client)
        return True

    def _next(self) -> socket.socket:
        """The next connection that is handed on. BlockingIOError if none waits, EOFError if none will come."""
        byte, descriptors, _, _ = socket.recv_fds(self._listener, 1, 1)
        if not byte:
            raise EOFError
        if not descriptors:
            self._watch.on_closed()
            raise OSError("a connection was handed on, and this process has no file descriptor left for it")
        return socket.socket(fileno=descriptors[0])

    async def _enter(self, client: socket.socket) -> None:
        connection = Connection(self._app, self._watch)
        context = self._watch.tls
        secured = context is not None
        try:
            prepare(client)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                client,
                ssl=context,
                ssl_handshake_timeout=self._watch.limits.head_s if secured else None,
                ssl_shutdown_timeout=TLS_SHUTDOWN_S if secured else None,
            )
        except (OSError, TimeoutError):
            client.close()
        finally:
            if not connection.made:  # it failed, so connection_lost will not be called
                self._watch.closed()
                if secured:
                    self._watch.cut("handshake")

    def _refuse(self, client: socket.socket) -> None:
        self._watch.cut("full")
        self._watch.on_closed()
        if (now_s := time.monotonic()) - self._said_full_s > 10:
            self._said_full_s = now_s
            log.warning("all %d connections are in use; new ones are refused", self._watch.limits.connections)
        with client, suppress(OSError):
            client.setblocking(False)
            if self._watch.tls is None:
                client.send(raw_answer(FULL, new_request_id()))
                client.shutdown(socket.SHUT_WR)
                client.recv(
                    65536
                )  # closing a socket with unread data would reset it, and the client could lose the answer


def prepare(client: socket.socket) -> None:
    """Sets the socket's options: small answers are sent at once, and a vanished client is detected."""
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in OPTIONS:
        if hasattr(socket, name):
            client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
