"""Web pages of other origins: the headers by which a browser decides whether they may call this server (CORS, Fetch standard).

The answers that are given below the app, such as 429 and 431, have them too: without them a page could not read why it was refused. A
middleware such as starlette's marks only those of the app.
"""

from collections.abc import Mapping, Sequence

from starlette.responses import Response

from serve.errors import BadInput, Forbidden

METHODS = "GET, POST"
REQUEST_HEADERS = "authorization, content-type, x-api-key, x-request-id, x-timeout-ms"
ANSWER_HEADERS = "retry-after, x-request-id"
# How long a browser may cache the answer to a preflight.
REMEMBERED_S = 600

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
        if origin is not None and self.allow(origin):
            allowed = b"*" if b"*" in self.allowed else origin
            headers += [
                (b"access-control-allow-origin", allowed),
                (b"access-control-expose-headers", ANSWER_HEADERS.encode()),
            ]
        return headers

    def allow(self, origin: bytes) -> bool:
        """Whether pages of `origin` may call this server."""
        return b"*" in self.allowed or origin.lower() in self.allowed

    def preflight(self, method: str, asked: Mapping[bytes, bytes]) -> Response | None:
        """The answer to a CORS preflight; None if the request is no preflight. Forbidden for origins that are not allowed."""
        if method != "OPTIONS" or not self.allowed or b"access-control-request-method" not in asked:
            return None
        origin = asked.get(b"origin")
        if origin is None:
            return None
        if not self.allow(origin):
            raise Forbidden("pages of this origin may not call this server; start it with --allow-origin to allow them")
        return Response(
            status_code=204,
            headers={
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Allow-Headers": REQUEST_HEADERS,
                "Access-Control-Max-Age": str(REMEMBERED_S),
            },
        )
