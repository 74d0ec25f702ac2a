"""Lets connections in, as many as there may be, and turns the others away at once."""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable

from serve.errors import Unavailable
from serve.http.connections.limits import Connection, Watch, raw_answer
from serve.observe.request_context import new_request_id

log = logging.getLogger("serve")

# Connections let in at one look, so that a flood of them leaves time for those that are there.
AT_ONCE = 64
# Pause when the system has no file or memory left for another one.
PAUSE_S = 0.2
# A connection whose other end is gone without a word ends after two minutes: when it is idle, it is asked after 60 s, every 15 s,
# 4 times; when something was sent that is not acknowledged, it is waited for. Of what is to be sent the system keeps no more
# than 128 KiB, so that it can be seen here whether the client takes it. Not every system has all of them.
OPTIONS = (
    ("TCP_NODELAY", 1),
    ("TCP_KEEPIDLE", 60),
    ("TCP_KEEPINTVL", 15),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 120_000),
    ("TCP_NOTSENT_LOWAT", 131_072),
)
# How long a TLS connection may take to say goodbye.
GOODBYE_S = 5.0

FULL = Unavailable("this server has as many connections as it may have; try again in a second")


class Acceptor:
    """Accepts from `listener` and gives each socket to a connection that `make` makes."""

    def __init__(
        self, listener: socket.socket, watch: Watch, make: Callable[[], Connection], context: ssl.SSLContext | None
    ) -> None:
        self._listener = listener
        self._watch = watch
        self._make = make
        self._context = context
        self._entering: set[asyncio.Task[None]] = set()
        self._open = False
        self._said_full_s = 0.0

    def open(self) -> None:
        """Lets connections in from now on."""
        self._open = True
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Lets those in that have knocked, and no more."""
        if self._open:
            self._accept()
            self._open = False
            asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be accepted (%s); trying again in %g s", error, PAUSE_S)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                loop.call_later(PAUSE_S, self._reopen)
                return
            if self._watch.has_room():
                self._watch.open += 1
                task = asyncio.get_running_loop().create_task(self._enter(client))
                self._entering.add(task)
                task.add_done_callback(self._entering.discard)
            else:
                self._turn_away(client)

    def _reopen(self) -> None:
        if self._open:
            self.open()

    async def _enter(self, client: socket.socket) -> None:
        connection = self._make()
        secured = self._context is not None
        try:
            prepare(client)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                client,
                ssl=self._context,
                ssl_handshake_timeout=self._watch.limits.head_s if secured else None,
                ssl_shutdown_timeout=GOODBYE_S if secured else None,
            )
        except (OSError, TimeoutError):
            client.close()
        finally:
            if not connection.made:  # it came to nothing, and nobody will say that it was lost
                self._watch.open -= 1
                if secured:
                    self._watch.cut("handshake")

    def _turn_away(self, client: socket.socket) -> None:
        self._watch.cut("full")
        if (now_s := time.monotonic()) - self._said_full_s > 10:
            self._said_full_s = now_s
            log.warning("all %d connections are in use; others are turned away", self._watch.limits.connections)
        with client, contextlib.suppress(OSError):
            client.setblocking(False)
            if self._context is None:
                client.send(raw_answer(FULL, new_request_id()))
                client.shutdown(socket.SHUT_WR)
                client.recv(65536)  # what is left unread would make the system take back the answer


def prepare(client: socket.socket) -> None:
    """Sends small answers at once, and finds out when the other end is gone."""
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in OPTIONS:
        if hasattr(socket, name):
            client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
