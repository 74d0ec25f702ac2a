"""The middleware around every request: access, request id, headers, metrics, log, and the form of errors."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import InternalError, NotFound, Overloaded, StillroomError, Unauthorized, in_form_of
from serve.http.access import Access, Bodies
from serve.http.api_keys import Key
from serve.observe.logs import access_log, note, shortened
from serve.observe.metrics import Metrics
from serve.observe.request_context import REQUEST_ID, RequestContext, context_of, headers_of, new_request_id
from serve.observe.tracing import Traces

log = logging.getLogger("serve")

# The status in metrics and log if the client disconnects before its answer; it is never sent. nginx uses the same number.
CLIENT_GONE = 499

SHOWN_TEXTS = 10  # in a message

NOSNIFF = (b"x-content-type-options", b"nosniff")

# Paths that monitoring asks all the time; their answers with 200 are not logged.
PROBED = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics"})


class JsonResponse(Response):
    """`content` as JSON, with status 200. It does less than starlette's response, which serves any kind of content, and takes less time."""

    def __init__(self, content: object) -> None:
        self.body = msgspec.json.encode(content)
        self.status_code = 200
        self.background = None
        self.raw_headers = [(b"content-length", b"%d" % len(self.body)), (b"content-type", b"application/json")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})


def _described_response(
    scope: Scope, described: dict[str, str], status: int, headers: Mapping[str, str] | None
) -> Response:
    """A response that describes an error, whose code is also stored in the request's context.

    It has the form of errors that the protocol of the path has.
    """
    context_of(scope).error_code = described["code"]
    return Response(
        msgspec.json.encode(in_form_of(scope["path"], described, status)),
        status,
        headers,
        media_type="application/json",
    )


def error_response(error: StillroomError, scope: Scope) -> Response:
    """`error` as `{"error": {"code", "message", "field"?}}` with its status; 429 has Retry-After, 401 has WWW-Authenticate."""
    described = {"code": error.code, "message": error.message}
    if error.field is not None:
        described["field"] = error.field
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = 'Bearer realm="stillroom"'
    return _described_response(scope, described, error.http_status, headers)


async def on_stillroom_error(request: Request, error: Exception) -> Response:
    """The response to a `StillroomError`. A bug in this program is raised again, so that its details go to the log only."""
    assert isinstance(error, StillroomError)
    if error.fault == "ours":
        raise error
    return error_response(error, request.scope)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The response to starlette's own errors: no such path (404), another method (405)."""
    assert isinstance(error, HTTPException)
    if error.status_code == NotFound.http_status:
        nothing = NotFound(f"there is nothing at {request.url.path}; see /openapi.json for the endpoints")
        return error_response(nothing, request.scope)
    described = {"code": "http_error", "message": str(error.detail)}
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        described = {
            "code": "method_not_allowed",
            "message": f"{request.method} {request.url.path} is not offered; use {allowed}",
        }
    return _described_response(request.scope, described, error.status_code, error.headers)


class RequestMiddleware:
    """ASGI middleware: gives each request an id, checks its access, counts, times and logs it, and answers unknown errors.

    A POST to a path in `direct` is answered here. This skips starlette's routes and its wrappers around each of them.
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
        metrics.held_body_bytes.set_function(lambda: bodies.held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, and sends its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = context_of(scope)
        headers = headers_of(scope)
        sent_id = headers.get(b"x-request-id", b"").decode("latin-1")
        context.request_id = sent_id if REQUEST_ID.fullmatch(sent_id) else new_request_id()
        added = [(b"x-request-id", context.request_id.encode()), NOSNIFF, *self.access.origins.headers(headers)]

        async def receive_held() -> Message:
            message = await receive()
            if message["type"] == "http.request":
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
            self.access.check_host(headers)
            answer = self.access.origins.preflight(scope["method"], headers)
            if answer is None:
                key = self.access.enter(scope["method"], scope["path"], headers, context)
                if scope["method"] == "POST" and (endpoint := self.direct.get(scope["path"])):
                    answer = await endpoint(Request(scope, receive_held))
            await (answer or self.app)(scope, receive_held, send_marked)
        except ClientDisconnect:
            context.status, context.error_code = CLIENT_GONE, "client_gone"
        except Exception as error:
            await self._answer_error(error, scope, receive, send_marked)
            # The traceback refers to frames, these to the request's data, and this, through the failed future, to the error. The cycle
            # would keep all of it in memory, uncounted, until the next garbage collection.
            error.__traceback__ = None
        finally:
            self._leave(scope, context, key)

    async def _answer_error(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the errors that the app did not: requests that are not let in, and bugs, whose details go to the log."""
        context = context_of(scope)
        begun = context.status != 0
        if isinstance(error, StillroomError) and error.fault != "ours" and not begun:
            answer = error
        else:
            log.error("request %s to %s failed", context.request_id, shortened(scope["path"]), exc_info=error)
            if begun:  # the answer has begun, so it can only be broken off
                raise error
            answer = InternalError(f"the server failed; its log has the reason, under request {context.request_id}")
            if context.texts > 1 and context.failed_texts:  # it failed on some of several texts
                named = [str(place + 1) for place in sorted(context.failed_texts)]
                which, them = ("text", "it") if len(named) == 1 else ("texts", "them")
                more = f" and {len(named) - SHOWN_TEXTS} more" if len(named) > SHOWN_TEXTS else ""
                answer = InternalError(
                    f"the model failed on {which} {', '.join(named[:SHOWN_TEXTS])}{more} of {context.texts}; send the others without "
                    f"{them}. The server's log has the reason, under request {context.request_id}"
                )
        await error_response(answer, scope)(scope, receive, send)

    def _leave(self, scope: Scope, context: RequestContext, key: Key | None) -> None:
        took_s = time.perf_counter() - context.begun_s
        self.bodies.release(context)
        status = str(context.status)
        if key is not None:
            key.leave(took_s)
        if context.key_name is not None:
            self.metrics.key_requests.labels(context.key_name, status).inc()
        # Unknown paths are counted together, so that a scanner does not fill the metrics.
        endpoint = scope.get("stillroom.endpoint") or (scope["path"] if scope["path"] in self.endpoints else "other")
        self.metrics.requests.labels(endpoint, status).inc()
        self.metrics.request_seconds.labels(endpoint).observe(took_s)
        if context.error_code is not None:
            self.metrics.errors.labels(endpoint, context.error_code).inc()
        if self.traces:
            self.traces.add(scope, context, endpoint)
        if not (context.status == 200 and scope["path"] in PROBED) and access_log.isEnabledFor(logging.INFO):
            note("request", access_fields(scope, context, took_s))


def access_fields(scope: Scope, context: RequestContext, took_s: float) -> dict[str, object]:
    """The fields of a request in the log."""
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
