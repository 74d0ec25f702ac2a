"""Accepts connections up to the limit, and refuses others at once."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable

from serve.errors import Unavailable
from serve.http.connections.limits import Watch
from serve.http.connections.protocol import Connection, raw_answer
from serve.http.connections.sockets import BACKLOG
from serve.http.connections.tls import Tls
from serve.observe.request_context import new_request_id

log = logging.getLogger("serve")

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


class Acceptor:
    """Accepts connections from `listener`; `make` makes the protocol of each.

    With `handed` the listener is a socket over which another process hands connections on, until it closes it; `ended` is set then.
    """

    def __init__(
        self, listener: socket.socket, watch: Watch, make: Callable[[], Connection], tls: Tls, *, handed: bool = False
    ) -> None:
        self._listener = listener
        self._handed = handed
        self.ended = asyncio.Event()
        self._watch = watch
        self._make = make
        self._tls = tls
        self._entering: set[asyncio.Task[None]] = set()
        self._open = False
        self._said_full_s = 0.0

    def open(self) -> None:
        """Starts to accept connections."""
        self._open = True
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def close(self) -> None:
        """Accepts the connections that are waiting, then stops and closes the listening socket."""
        if self._handed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), LAST_HANDED_S)
        if self._open:
            for _ in range(BACKLOG // AT_ONCE + 1):  # bounded, for clients that connect faster than this accepts
                if not self._accept():
                    break
            self._open = False
            asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> bool:
        """Accepts the connections that wait, up to `AT_ONCE`; whether that many did."""
        for _ in range(AT_ONCE):
            try:
                client = self._next()
            except EOFError:
                self._open = False
                asyncio.get_running_loop().remove_reader(self._listener)
                self.ended.set()
                return False
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                log.error("no connection can be accepted (%s); trying again in %g s", error, PAUSE_S)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                loop.call_later(PAUSE_S, self._reopen)
                return False
            if self._watch.has_room():
                self._watch.open += 1
                task = asyncio.get_running_loop().create_task(self._enter(client))
                self._entering.add(task)
                task.add_done_callback(self._entering.discard)
            else:
                self._refuse(client)
        return True

    def _next(self) -> socket.socket:
        """The next connection. BlockingIOError if none waits, EOFError if none will come."""
        if not self._handed:
            return self._listener.accept()[0]
        byte, descriptors, _, _ = socket.recv_fds(self._listener, 1, 1)
        if not byte:
            raise EOFError
        if not descriptors:
            self._watch.on_closed()
            raise OSError("a connection was handed on, and this process has no file descriptor left for it")
        return socket.socket(fileno=descriptors[0])

    def _reopen(self) -> None:
        if self._open:
            self.open()

    async def _enter(self, client: socket.socket) -> None:
        connection = self._make()
        context = self._tls.context
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
        with client, contextlib.suppress(OSError):
            client.setblocking(False)
            if self._tls.context is None:
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
