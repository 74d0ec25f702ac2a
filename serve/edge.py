"""What surrounds every answer: who may ask, its request id, its headers, its count, time and log, and the form that errors take."""

import asyncio
import logging
import math
import re
import time
from collections.abc import Mapping
from functools import cache

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.connections import FAULT
from serve.errors import BadInput, InternalError, NotFound, Overloaded, StillroomError, Unauthorized
from serve.keys import Key, Keyring
from serve.logs import access_log, note, shortened
from serve.metrics import Metrics
from serve.origins import Origins
from serve.visit import VISIT, Visit, new_request_id

log = logging.getLogger("serve")

# What of a client's own request id is echoed: enough for any common form, nothing that could break a header or a log.
REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

# Counted when the client hung up before its answer; nobody hears it. The number is nginx's.
CLIENT_GONE = 499

NOSNIFF = (b"x-content-type-options", b"nosniff")

# Answered without a key: whether the server lives and is ready, how to ask it, and the page, whose own calls need a key.
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs"})
# Asked again and again by machines; not logged when all is well.
PROBED = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics"})


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as JSON; UTF-8."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(error: StillroomError, headers: Mapping[str, str] | None = None) -> Response:
    """`error` as `{"error": {"code", "message", "field"?}}` with its status; 429 comes with Retry-After, 401 with WWW-Authenticate."""
    described = {"code": error.code, "message": error.message}
    if error.field is not None:
        described["field"] = error.field
    sent = dict(headers or {})
    if isinstance(error, Overloaded):
        sent["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        sent["WWW-Authenticate"] = 'Bearer realm="stillroom"'
    return json_response({"error": described}, error.http_status, sent)


async def on_stillroom_error(request: Request, error: Exception) -> Response:
    """The answer to an error that this project names. What is our own fault goes to the log, not to the client."""
    assert isinstance(error, StillroomError)
    if error.fault == "ours":
        raise error
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The answer to starlette's own errors: no such path (404), not that method (405)."""
    assert isinstance(error, HTTPException)
    if error.status_code == NotFound.http_status:
        return error_response(NotFound(f"there is nothing at {request.url.path}; see /openapi.json for the endpoints"))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        described = {
            "code": "method_not_allowed",
            "message": f"{request.method} {request.url.path} is not offered; use {allowed}",
        }
    else:
        described = {"code": "http_error", "message": str(error.detail)}
    return json_response({"error": described}, error.status_code, error.headers)


class Bodies:
    """Bytes of request bodies that are held by all requests together, at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, visit: Visit, size_bytes: int) -> None:
        """Holds some more of one request's. Overloaded when that is too much."""
        if self.held_bytes + size_bytes > self.limit_bytes:
            raise Overloaded(
                f"the bodies of all requests have {self.held_bytes:,} bytes and may have {self.limit_bytes:,}; try again in a second",
                retry_after_s=1.0,
            )
        self.held_bytes += size_bytes
        visit.body_bytes += size_bytes

    def release(self, visit: Visit) -> None:
        """Forgets what one request held."""
        self.held_bytes -= visit.body_bytes


class Access:
    """Who may ask what: the keys, the paths that are open without one, and the origins whose pages may ask."""

    def __init__(self, keyring: Keyring, origins: Origins, *, open_metrics: bool = False) -> None:
        self.keyring = keyring
        self.origins = origins
        self.open_paths = OPEN_PATHS | ({"/metrics"} if open_metrics else set())

    def enter(self, path: str, headers: Mapping[bytes, bytes], visit: Visit) -> Key | None:
        """The key that a request is let in with, which it leaves at its end. Unauthorized or RateLimited when it is not."""
        if not self.keyring.keys or path in self.open_paths:
            return None
        key = self.keyring.key_of(headers)
        visit.key_name = key.name
        key.enter(visit.began_s)
        return key


class Edge:
    """ASGI middleware around everything: gives each request an id, lets it in, counts, times and logs it, answers unknown errors."""

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, endpoints: frozenset[str], access: Access, bodies: Bodies
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.endpoints = endpoints
        self.access = access
        self.bodies = bodies
        # Finding a counter by its labels costs more than counting.
        self._answered = cache(metrics.requests.labels)
        self._timed = cache(metrics.request_seconds.labels)
        metrics.held_body_bytes.set_function(lambda: bodies.held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and see to its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id", b"").decode("latin-1")
        visit = Visit(sent_id if REQUEST_ID.fullmatch(sent_id) else new_request_id())
        scope[VISIT] = visit
        added = [(b"x-request-id", visit.request_id.encode()), NOSNIFF, *self.access.origins.headers(headers)]

        async def receive_held() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                if fault := scope.get(FAULT):
                    raise fault
                self.bodies.take(visit, len(message.get("body", b"")))
            return message

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                message["headers"] = [*message["headers"], *added]
            else:
                visit.answer_bytes += len(message.get("body", b""))
            await send(message)

        key = None
        try:
            answer = self.access.origins.preflight(scope["method"], headers)
            if answer is None:
                key = self.access.enter(scope["path"], headers, visit)
                set_deadline(visit, headers)
            await (answer or self.app)(scope, receive_held, send_marked)
        except ClientDisconnect:
            visit.status = CLIENT_GONE
        except Exception as error:
            await self._answer_error(error, scope, receive, send_marked)
        finally:
            self._leave(scope, visit, key)

    async def _answer_error(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers what the app did not: those who are not let in, and faults of ours, which go to the log."""
        visit: Visit = scope[VISIT]
        begun = visit.status != 0
        if isinstance(error, StillroomError) and error.fault != "ours" and not begun:
            told = error
        else:
            log.error("request %s to %s failed", visit.request_id, shortened(scope["path"]), exc_info=error)
            if begun:  # all that is left is to break it off
                raise error
            told = InternalError(f"the server failed; its log says why, under request {visit.request_id}")
        await error_response(told)(scope, receive, send)

    def _leave(self, scope: Scope, visit: Visit, key: Key | None) -> None:
        took_s = time.perf_counter() - visit.began_s
        self.bodies.release(visit)
        status = str(visit.status)
        if key is not None:
            key.leave(took_s)
        if visit.key_name is not None:
            self.metrics.key_requests.labels(visit.key_name, status).inc()
        # Paths of nobody's are counted together: a scanner must not fill the metrics.
        endpoint = scope["path"] if scope["path"] in self.endpoints else "other"
        self._answered(endpoint, status).inc()
        self._timed(endpoint).observe(took_s)
        if not (visit.status == 200 and scope["path"] in PROBED) and access_log.isEnabledFor(logging.INFO):
            note("request", access_fields(scope, visit, took_s))


def set_deadline(visit: Visit, headers: Mapping[bytes, bytes]) -> None:
    """Heeds `X-Timeout-Ms`: how long this client waits for an answer. BadInput when it is no whole number from 1."""
    given = headers.get(b"x-timeout-ms")
    if given is None:
        return
    if not (given.isdigit() and 0 < len(given) <= 9 and int(given) > 0):
        raise BadInput(
            f"X-Timeout-Ms is {shortened(given.decode('latin-1'))!r}; give a whole number of milliseconds from 1",
            field="X-Timeout-Ms",
        )
    visit.due_s = asyncio.get_running_loop().time() + int(given) / 1000


def access_fields(scope: Scope, visit: Visit, took_s: float) -> dict[str, object]:
    """What the log has of one request."""
    client = scope.get("client")
    fields: dict[str, object] = {
        "request_id": visit.request_id,
        "key": visit.key_name,
        "client": shortened(client[0]) if client else None,
        "method": scope["method"],
        "path": shortened(scope["path"]),
        "status": visit.status,
        "ms": round(took_s * 1000, 2),
        "model": visit.model,
        "texts_count": visit.texts_count,
        "body_bytes": visit.body_bytes,
        "answer_bytes": visit.answer_bytes,
    }
    if visit.texts is not None:
        fields["texts"] = visit.texts
    return fields
