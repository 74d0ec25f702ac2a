"""Which requests are let in: by their key, their host and the origin of their web page; and how many bytes of bodies are held.

A browser decides by the CORS headers (Fetch standard) whether a web page of another origin may call this server. The answers that are
given below the app, such as 429 and 431, have them too: without them a page could not read why it was refused. A middleware such as
starlette's marks only those of the app.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence

from starlette.responses import Response

from serve.errors import BadInput, Forbidden, Overloaded
from serve.http.api_keys import Key, Keyring
from serve.observe.logs import shortened
from serve.observe.request_context import RequestContext

# Paths that need no key: health checks, the description of the endpoints, and the page, whose own calls need a key.
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs"})

ALLOWED_HEADERS = "authorization, content-type, x-api-key, x-request-id, x-timeout-ms, user-agent"
# What OpenAI's client for JavaScript sends with each request; some browsers ask for user-agent too.
OF_OPENAI = re.compile(r"\b(?:x-stainless|openai)-[a-z-]+", re.ASCII)

RawHeaders = list[tuple[bytes, bytes]]


class Origins:
    """The allowed origins; `*` allows all. BadInput when one is not an origin."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        for origin in allowed:
            scheme, apart, host = origin.partition("://")
            if origin != "*" and not (scheme in ("http", "https") and apart and host and "/" not in host):
                raise BadInput(
                    f"--allow-origin is {origin!r}; give http or https, a host and perhaps a port, such as https://app.example, or *"
                )
        self.allowed = frozenset(origin.lower().encode("latin-1", "replace") for origin in allowed)

    def headers(self, asked: Mapping[bytes, bytes]) -> RawHeaders:
        """The CORS headers of every answer to a request with the headers `asked`."""
        if not self.allowed:
            return []
        origin = asked.get(b"origin")
        # A cache must not give an answer for one origin to another.
        headers = [] if b"*" in self.allowed else [(b"vary", b"origin")]
        if origin is not None and self._allow(origin):
            allowed = b"*" if b"*" in self.allowed else origin
            headers += [
                (b"access-control-allow-origin", allowed),
                (b"access-control-expose-headers", b"retry-after, x-request-id"),
            ]
        return headers

    def _allow(self, origin: bytes) -> bool:
        return b"*" in self.allowed or origin.lower() in self.allowed

    def preflight(self, method: str, asked: Mapping[bytes, bytes]) -> Response | None:
        """The answer to a CORS preflight; None if the request is no preflight. Forbidden for origins that are not allowed."""
        if method != "OPTIONS" or not self.allowed or b"access-control-request-method" not in asked:
            return None
        origin = asked.get(b"origin")
        if origin is None:
            return None
        if not self._allow(origin):
            raise Forbidden("pages of this origin may not call this server; start it with --allow-origin to allow them")
        of_openai = OF_OPENAI.findall(asked.get(b"access-control-request-headers", b"").decode("latin-1"))
        return Response(
            status_code=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": ", ".join([ALLOWED_HEADERS, *of_openai]),
                "Access-Control-Max-Age": "600",  # seconds that a browser may cache this answer
            },
        )


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
        if name in self.hosts or not name or name == "localhost" or name.endswith(".localhost"):
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise Forbidden(
                f"the request is for {shortened(name)}, and this server answers for localhost, addresses and the names of "
                f"--allow-host; call it by one of them, or start it with --allow-host {shortened(name)}"
            ) from None

    def enter(self, method: str, path: str, headers: Mapping[bytes, bytes], context: RequestContext) -> Key | None:
        """The key of a request, which counts the request until its `leave`; None if none is needed. Unauthorized or RateLimited."""
        if not self.keyring.keys or (path in self.open_paths and method != "POST"):  # a model answers a POST to /
            return None
        key = self.keyring.key_of(headers)
        context.key_name, context.key_digest = key.name, key.digest
        key.enter(context.begun_s)
        return key


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
