"""Which requests are let in, and how many bytes of their bodies are held."""

import ipaddress
from collections.abc import Collection, Mapping

from serve.errors import Forbidden, Overloaded
from serve.http.auth.api_keys import Key, Keyring
from serve.http.auth.cors import Origins
from serve.observe.logs import shortened
from serve.observe.request_context import RequestContext

# Paths that need no key: health checks, the description of the endpoints, and the page, whose own calls need a key.
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs"})


class Access:
    """The keys, the paths that need none, and the allowed origins and hosts. Without keys every client may ask, without hosts at any."""

    def __init__(
        self,
        keyring: Keyring | None = None,
        origins: Origins | None = None,
        *,
        open_metrics: bool = False,
        hosts: Collection[str] = (),
    ) -> None:
        self.keyring = keyring or Keyring()
        self.origins = origins or Origins()
        self.hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self.open_paths = OPEN_PATHS | ({"/metrics"} if open_metrics else set())

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Forbidden if the request is for the name of another server.

        A web page may have its own name resolve to this machine, and then call this server as if it were its own (DNS rebinding). It
        cannot do so with an address, nor with localhost and the names below it, which are the loopback (RFC 6761, section 6.3).
        """
        if not self.hosts:
            return
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0].rstrip(".")
        if name in self.hosts or not name or name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return
        raise Forbidden(
            f"the request is for {shortened(name)}, and this server answers for localhost, addresses and the names of --allow-host; "
            f"call it by one of them, or start it with --allow-host {shortened(name)}"
        )

    def enter(self, path: str, headers: Mapping[bytes, bytes], context: RequestContext) -> Key | None:
        """The key of a request, which counts the request until its `leave`; None if none is needed. Unauthorized or RateLimited."""
        if not self.keyring.keys or path in self.open_paths:
            return None
        key = self.keyring.key_of(headers)
        context.key_name = key.name
        key.enter(context.begun_s)
        return key


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Bodies:
    """Bytes of the bodies of all requests together, at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, context: RequestContext, size_bytes: int) -> None:
        """Adds bytes of one request's body. Overloaded if there is no room."""
        if self.held_bytes + size_bytes > self.limit_bytes:
            raise Overloaded(
                f"the bodies of all requests have {self.held_bytes:,} of at most {self.limit_bytes:,} bytes; try again in a second",
                retry_after_s=1.0,
            )
        self.held_bytes += size_bytes
        context.body_bytes += size_bytes

    def release(self, context: RequestContext) -> None:
        """Subtracts the bytes of one request."""
        self.held_bytes -= context.body_bytes
