"""The listening socket, the TLS context of its connections, the limit of open files, and the signal to reload."""

import asyncio
import ipaddress
import logging
import os
import re
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from serve.errors import BadInput
from serve.options import rule_faults
from serve.settings import ServeSettings

log = logging.getLogger("serve")

# Connections that the system holds until they are accepted.
BACKLOG = 1024
# Files that a server has open besides its connections: its log, and bundles while they load.
OTHER_FILES = 128
TLS_PASSWORD_VARIABLE = "STILLROOM_TLS_PASSWORD"  # noqa: S105 - the name of a variable


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
    with suppress(OSError):  # no such name: `listening` says so
        host = host if ":" in host else socket.gethostbyname(host)
    with suppress(ValueError):
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


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """The context for TLS 1.2 or later; None without a certificate. BadInput names the file that cannot be used."""
    if settings.tls_cert is None:
        if faults := rule_faults(settings):
            raise BadInput(" ".join(faults))
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    certificate, key, authority = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    try:
        # Without this function OpenSSL would ask for the password at the terminal, and wait.
        context.load_cert_chain(certificate, key, password=lambda: os.environ.get(TLS_PASSWORD_VARIABLE, ""))
    except (OSError, ValueError) as error:
        raise BadInput(
            f"the certificate {certificate} with the key {key or 'in it'} cannot be used ({error}); give the chain and its key "
            f"in PEM, and the password of an encrypted key in {TLS_PASSWORD_VARIABLE}"
        ) from error
    if authority:
        try:
            context.load_verify_locations(authority)
        except (OSError, ValueError) as error:
            raise BadInput(f"--tls-client-ca {authority} cannot be used ({error}); give certificates in PEM") from error
        context.verify_mode = ssl.CERT_REQUIRED
    for file in filter(None, (certificate, authority)):
        warn_of_dates(file)
    return context


def warn_of_dates(file: Path) -> None:
    """Logs a warning for each certificate in `file`, which OpenSSL has read, that is not valid now."""
    text = ""
    with suppress(OSError):  # it was replaced meanwhile
        text = file.read_text("latin-1") if file.is_file() else ""  # a pipe has been read to its end
    now = datetime.now(UTC)
    for block in re.findall(f"{ssl.PEM_HEADER}.+?{ssl.PEM_FOOTER}", text, re.DOTALL):
        try:
            # The ssl module says so only of the peer's certificates, and of authorities'.
            _, signed = next(_values(next(_values(ssl.PEM_cert_to_DER_cert(block)))[1]))
            # The fields of TBSCertificate, RFC 5280, 4.1: an optional version with tag 0xA0, the serial number, algorithm and issuer
            # before the validity.
            fields = [value for tag, value in _values(signed) if tag != 0xA0]
            begin, end = (_time(tag, digits) for tag, digits in _values(fields[3]))
        except (ValueError, IndexError, StopIteration):  # OpenSSL is more lenient
            continue
        if not begin <= now <= end:
            log.warning(
                "%s: a certificate in it is valid from %s to %s only, and clients refuse it now; renew it and send SIGHUP",
                file,
                f"{begin:%Y-%m-%d %H:%M} UTC",
                f"{end:%Y-%m-%d %H:%M} UTC",
            )


def _time(tag: int, digits: bytes) -> datetime:
    # UTCTime has two digits of the year, of which 50 and later are of the last century; GeneralizedTime (0x18) has four.
    century = b"" if tag == 0x18 else b"19" if digits >= b"5" else b"20"
    return datetime.strptime((century + digits).decode(), "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _values(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The tag and content of each value in `der`: a byte of tag, the length in one byte, or the count of its bytes and these (X.690)."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length >= 0x80:
            size = length - 0x80
            length, at = int.from_bytes(der[at : at + size], "big"), at + size
        yield tag, der[at : at + length]
        at += length
