"""What surrounds every answer: who may ask, its request id, its headers, its count, time and log, and the form that errors take."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import InternalError, NotFound, Overloaded, StillroomError, Unauthorized, in_form_of
from serve.http.auth.access import Access, Bodies
from serve.http.auth.api_keys import Key
from serve.http.connections.limits import FAULT
from serve.observe.logs import access_log, note, shortened
from serve.observe.metrics import Metrics
from serve.observe.request_context import REQUEST_ID, RequestContext, context_of, new_request_id
from serve.observe.tracing import Traces

log = logging.getLogger("serve")

# Counted when the client hung up before its answer; nobody hears it. The number is nginx's.
CLIENT_GONE = 499

NOSNIFF = (b"x-content-type-options", b"nosniff")

# Asked again and again by machines; not logged when all is well.
PROBED = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics"})


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as JSON; UTF-8."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


class ErrorResponse(Response):
    """An answer that is an error: told to the client, and noted in the request's context."""

    def __init__(self, described: dict[str, str], status: int, headers: Mapping[str, str] | None, *, path: str) -> None:
        super().__init__(msgspec.json.encode(in_form_of(path, described)), status, headers, "application/json")
        self.code = described["code"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note the error's code, and answer."""
        context_of(scope).error_code = self.code
        await super().__call__(scope, receive, send)


def error_response(error: StillroomError, headers: Mapping[str, str] | None = None, *, path: str = "") -> Response:
    """`error` as `{"error": {"code", "message", "field"?}}` with its status; 429 comes with Retry-After, 401 with WWW-Authenticate.

    Where the `path` asked for is of the Open Inference Protocol, in that protocol's form: `{"error": message}`.
    """
    described = {"code": error.code, "message": error.message}
    if error.field is not None:
        described["field"] = error.field
    sent = dict(headers or {})
    if isinstance(error, Overloaded):
        sent["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        sent["WWW-Authenticate"] = 'Bearer realm="stillroom"'
    return ErrorResponse(described, error.http_status, sent, path=path)


async def on_stillroom_error(request: Request, error: Exception) -> Response:
    """The answer to an error that this project names. What is our own fault goes to the log, not to the client."""
    assert isinstance(error, StillroomError)
    if error.fault == "ours":
        raise error
    return error_response(error, path=request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The answer to starlette's own errors: no such path (404), not that method (405)."""
    assert isinstance(error, HTTPException)
    if error.status_code == NotFound.http_status:
        nothing = NotFound(f"there is nothing at {request.url.path}; see /openapi.json for the endpoints")
        return error_response(nothing, path=request.url.path)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        described = {
            "code": "method_not_allowed",
            "message": f"{request.method} {request.url.path} is not offered; use {allowed}",
        }
    else:
        described = {"code": "http_error", "message": str(error.detail)}
    return ErrorResponse(described, error.status_code, error.headers, path=request.url.path)


class RequestMiddleware:
    """ASGI middleware around everything: gives each request an id, lets it in, counts, times and logs it, answers unknown errors.

    What is posted to a path in `direct` is answered here, past the routes and what the toolkit wraps around each of them.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        endpoints: frozenset[str],
        direct: Mapping[str, Callable[[Request], Awaitable[Response]]],
        access: Access,
        bodies: Bodies,
        traces: Traces | None = None,
    ) -> None:
        self.app = app
        self.direct = direct
        self.metrics = metrics
        self.endpoints = endpoints
        self.access = access
        self.bodies = bodies
        self.traces = traces
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
        context = context_of(scope)
        sent_id = headers.get(b"x-request-id", b"").decode("latin-1")
        context.request_id = sent_id if REQUEST_ID.fullmatch(sent_id) else new_request_id()
        added = [(b"x-request-id", context.request_id.encode()), NOSNIFF, *self.access.origins.headers(headers)]

        async def receive_held() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                if fault := scope.get(FAULT):
                    raise fault
                self.bodies.take(context, len(message.get("body", b"")))
            return message

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                timing = [] if context.model is None else [(b"server-timing", context.server_timing().encode())]
                message["headers"] = [*message["headers"], *added, *timing]
            else:
                context.answer_bytes += len(message.get("body", b""))
            await send(message)

        key = None
        try:
            answer = self.access.origins.preflight(scope["method"], headers)
            if answer is None:
                key = self.access.enter(scope["path"], headers, context)
                if scope["method"] == "POST" and (endpoint := self.direct.get(scope["path"])):
                    answer = await endpoint(Request(scope, receive_held))
            await (answer or self.app)(scope, receive_held, send_marked)
        except ClientDisconnect:
            context.status, context.error_code = CLIENT_GONE, "client_gone"
        except Exception as error:
            await self._answer_error(error, scope, receive, send_marked)
            # It leads through frames to what the request held, and from there, by the future that failed, back to itself: without a cut
            # all of that would lie there until the next collection, counted by nobody.
            error.__traceback__ = None
        finally:
            self._leave(scope, context, key)

    async def _answer_error(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers what the app did not: those who are not let in, and faults of ours, which go to the log."""
        context = context_of(scope)
        begun = context.status != 0
        if isinstance(error, StillroomError) and error.fault != "ours" and not begun:
            answer = error
        else:
            log.error("request %s to %s failed", context.request_id, shortened(scope["path"]), exc_info=error)
            if begun:  # all that is left is to break it off
                raise error
            answer = InternalError(f"the server failed; its log says why, under request {context.request_id}")
        await error_response(answer, path=scope["path"])(scope, receive, send)

    def _leave(self, scope: Scope, context: RequestContext, key: Key | None) -> None:
        took_s = time.perf_counter() - context.begun_s
        self.bodies.release(context)
        status = str(context.status)
        if key is not None:
            key.leave(took_s)
        if context.key_name is not None:
            self.metrics.key_requests.labels(context.key_name, status).inc()
        # Paths of nobody's are counted together: a scanner must not fill the metrics.
        endpoint = scope.get("stillroom.endpoint") or (scope["path"] if scope["path"] in self.endpoints else "other")
        self._answered(endpoint, status).inc()
        self._timed(endpoint).observe(took_s)
        if context.error_code is not None:
            self.metrics.errors.labels(endpoint, context.error_code).inc()
        if self.traces:
            self.traces.add(scope, context, endpoint, context.status, context.request_id)
        if not (context.status == 200 and scope["path"] in PROBED) and access_log.isEnabledFor(logging.INFO):
            note("request", access_fields(scope, context, took_s))


def access_fields(scope: Scope, context: RequestContext, took_s: float) -> dict[str, object]:
    """What the log has of one request."""
    client = scope.get("client")
    fields: dict[str, object] = {
        "request_id": context.request_id,
        "key": context.key_name,
        "client": shortened(client[0]) if client else None,
        "method": scope["method"],
        "path": shortened(scope["path"]),
        "status": context.status,
        "error": context.error_code,
        "ms": round(took_s * 1000, 2),
        "model": context.model,
        "texts_count": context.texts if context.model else None,
        "body_bytes": context.body_bytes,
        "answer_bytes": context.answer_bytes,
    }
    if context.logged_texts is not None:
        fields["texts"] = context.logged_texts
    return fields
