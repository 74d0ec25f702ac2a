"""The socket a server listens on, how it is encrypted, and how many files it may open."""

import logging
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from serve.errors import BadInput

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


def tls_context(
    certificate: Path | None,
    key: Path | None,
    client_authority: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> ssl.SSLContext | None:
    """How to speak TLS (1.2 or later): None without a certificate. BadInput names the file that cannot be used."""
    if certificate is None:
        if key or client_authority:
            raise BadInput("--tls-key and --tls-client-ca are of use only with --tls-cert; give the certificate, too")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password OpenSSL would ask for one at the terminal, and wait.
        context.load_cert_chain(certificate, key, password=lambda: environment.get(TLS_PASSWORD_VARIABLE, ""))
    except (OSError, ValueError) as error:
        raise BadInput(
            f"the certificate {certificate} with the key {key or 'in it'} cannot be used ({error}); give a chain and its key in PEM, "
            f"and the key's password, if it has one, in {TLS_PASSWORD_VARIABLE}"
        ) from error
    if client_authority:
        try:
            context.load_verify_locations(client_authority)
        except (OSError, ValueError) as error:
            raise BadInput(
                f"the authority {client_authority} cannot be used ({error}); give certificates in PEM"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


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
