"""Which requests are let in, and how many bytes of their bodies are held."""

from collections.abc import Mapping

from serve.errors import Overloaded
from serve.http.auth.api_keys import Key, Keyring
from serve.http.auth.cors import Origins
from serve.observe.request_context import RequestContext

# Paths that need no key: health checks, the description of the endpoints, and the page, whose own calls need a key.
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs"})


class Access:
    """The keys, the paths that need none, and the allowed origins. Without keys every client may ask."""

    def __init__(
        self, keyring: Keyring | None = None, origins: Origins | None = None, *, open_metrics: bool = False
    ) -> None:
        self.keyring = keyring or Keyring()
        self.origins = origins or Origins()
        self.open_paths = OPEN_PATHS | ({"/metrics"} if open_metrics else set())

    def enter(self, path: str, headers: Mapping[bytes, bytes], context: RequestContext) -> Key | None:
        """The key of a request, which counts the request until its `leave`; None if none is needed. Unauthorized or RateLimited."""
        if not self.keyring.keys or path in self.open_paths:
            return None
        key = self.keyring.key_of(headers)
        context.key_name = key.name
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
