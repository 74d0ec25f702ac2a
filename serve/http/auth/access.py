"""Who may ask what, and how much of what they send is held."""

from collections.abc import Mapping

from serve.errors import Overloaded
from serve.http.auth.api_keys import Key, Keyring
from serve.http.auth.cors import Origins
from serve.observe.request_context import RequestContext

# Answered without a key: whether the server lives and is ready, how to ask it, and the page, whose own calls need a key.
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs"})


class Access:
    """The keys, the paths that are open without one, and the origins whose pages may ask: everybody and none unless given."""

    def __init__(
        self, keyring: Keyring | None = None, origins: Origins | None = None, *, open_metrics: bool = False
    ) -> None:
        self.keyring = keyring or Keyring()
        self.origins = origins or Origins()
        self.open_paths = OPEN_PATHS | ({"/metrics"} if open_metrics else set())

    def enter(self, path: str, headers: Mapping[bytes, bytes], context: RequestContext) -> Key | None:
        """The key that a request is let in with, which it leaves at its end. Unauthorized or RateLimited when it is not."""
        if not self.keyring.keys or path in self.open_paths:
            return None
        key = self.keyring.key_of(headers)
        context.key_name = key.name
        key.enter(context.begun_s)
        return key


class Bodies:
    """Bytes of request bodies that are held by all requests together, at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, context: RequestContext, size_bytes: int) -> None:
        """Holds some more of one request's. Overloaded when that is too much."""
        if self.held_bytes + size_bytes > self.limit_bytes:
            raise Overloaded(
                f"the bodies of all requests have {self.held_bytes:,} bytes and may have {self.limit_bytes:,}; try again in a second",
                retry_after_s=1.0,
            )
        self.held_bytes += size_bytes
        context.body_bytes += size_bytes

    def release(self, context: RequestContext) -> None:
        """Forgets what one request held."""
        self.held_bytes -= context.body_bytes
