"""The socket a server listens on, how it is encrypted, how many files it may open, and the signal to reload."""

import asyncio
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from serve.errors import BadInput
from serve.settings import ServeSettings

log = logging.getLogger("serve")

TLS_PASSWORD_VARIABLE = "STILLROOM_TLS_PASSWORD"  # noqa: S105 - the name of a variable
# Files that a server has open besides its connections: the models' pipes, its log, its bundles while they load.
OTHER_FILES = 128


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
        listener.setblocking(False)
        yield listener


@asynccontextmanager
async def reloading_on_hangup(reload: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Within it, SIGHUP calls `reload`, one call after another; one under way is cancelled at its end.

    Where there are no such signals, nothing does.
    """
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = asyncio.Event()

    async def when_asked() -> None:
        while True:
            await asked.wait()
            asked.clear()
            try:
                await reload()
            except Exception:
                log.exception("reloading failed; the server goes on as it was")

    loop = asyncio.get_running_loop()
    reloader = loop.create_task(when_asked())
    loop.add_signal_handler(signal.SIGHUP, asked.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        reloader.cancel()
        await asyncio.wait([reloader])


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """How to speak TLS (1.2 or later): None without a certificate. BadInput names the file that cannot be used."""
    if settings.tls_cert is None:
        if settings.tls_key or settings.tls_client_ca:
            raise BadInput("--tls-key and --tls-client-ca are of use only with --tls-cert; give the certificate, too")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: ServeSettings) -> None:
    """Has `context` use the files as they are now. BadInput names the one that cannot be used."""
    certificate, key, authority = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    assert certificate
    try:
        # Without a password OpenSSL would ask for one at the terminal, and wait.
        context.load_cert_chain(certificate, key, password=lambda: os.environ.get(TLS_PASSWORD_VARIABLE, ""))
    except (OSError, ValueError) as error:
        raise BadInput(
            f"the certificate {certificate} with the key {key or 'in it'} cannot be used ({error}); give a chain and its key "
            f"in PEM, and the key's password, if it has one, in {TLS_PASSWORD_VARIABLE}"
        ) from error
    if authority:
        try:
            context.load_verify_locations(authority)
        except (OSError, ValueError) as error:
            raise BadInput(f"the authority {authority} cannot be used ({error}); give certificates in PEM") from error
        context.verify_mode = ssl.CERT_REQUIRED


def openable_connections(connections: int) -> int:
    """How many of `connections` this process may have open, once its limit of open files is raised as far as it may be."""
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
            "this process may open %d files, so %d connections and not %d", hard, allowed - OTHER_FILES, connections
        )
    return max(1, allowed - OTHER_FILES)
