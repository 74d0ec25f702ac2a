"""What surrounds every answer: its request id, its headers, its count and time, and the form that errors take."""

import logging
import math
import re
import time
import uuid
from collections.abc import Mapping

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import InternalError, NotFound, Overloaded, StillroomError
from serve.metrics import Metrics
from serve.tracing import Traces
from serve.visit import visit_in

log = logging.getLogger("serve")

# What of a client's own request id is echoed: enough for any common form, nothing that could break a header or a log.
REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

# Counted when the client hung up before its answer; nobody hears it. The number is nginx's.
CLIENT_GONE = 499


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as JSON; UTF-8."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


class ErrorResponse(Response):
    """An answer that is an error: told to the client, and to the visit."""

    def __init__(self, described: dict[str, str], status: int, headers: Mapping[str, str] | None, *, path: str) -> None:
        super().__init__(msgspec.json.encode(in_form_of(path, described)), status, headers, "application/json")
        self.code = described["code"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note the error's code, and answer."""
        visit_in(scope).error_code = self.code
        await super().__call__(scope, receive, send)


def error_response(error: StillroomError, headers: Mapping[str, str] | None = None, *, path: str = "") -> Response:
    """`error` as `{"error": {"code", "message", "field"?}}` with its status; 429 comes with Retry-After.

    Where the `path` asked for is of the Open Inference Protocol, in that protocol's form: `{"error": message}`.
    """
    described = {"code": error.code, "message": error.message}
    if error.field is not None:
        described["field"] = error.field
    sent = dict(headers or {})
    if isinstance(error, Overloaded):
        sent["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return ErrorResponse(described, error.http_status, sent, path=path)


def in_form_of(path: str, described: dict[str, str]) -> dict[str, object]:
    """The body of an error at `path`."""
    return {"error": described["message"] if path == "/v2" or path.startswith("/v2/") else described}


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


class Edge:
    """ASGI middleware around everything: gives each request an id, counts and times it, and answers unknown errors."""

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, endpoints: frozenset[str], traces: Traces | None = None
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.endpoints = endpoints
        self.traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and see to its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        visit = visit_in(scope)
        sent_id = Headers(scope=scope).get("x-request-id", "")
        request_id = sent_id if REQUEST_ID.fullmatch(sent_id) else uuid.uuid4().hex
        # Paths of nobody's are counted together: a scanner must not fill the metrics.
        endpoint = scope["path"] if scope["path"] in self.endpoints else "other"
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                headers["X-Content-Type-Options"] = "nosniff"
                if visit.model is not None:
                    headers["Server-Timing"] = visit.server_timing()
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            status, visit.error_code = CLIENT_GONE, "client_gone"
        except Exception:
            log.exception("request %s to %s failed", request_id, scope["path"])
            if status:  # the answer has begun: all that is left is to break it off
                raise
            told = InternalError(f"the server failed; its log says why, under request {request_id}")
            await error_response(told, path=scope["path"])(scope, receive, send_with_id)
        finally:
            endpoint = scope.get("stillroom.endpoint", endpoint)
            self.metrics.requests.labels(endpoint, str(status)).inc()
            self.metrics.request_seconds.labels(endpoint).observe(time.perf_counter() - visit.begun_s)
            if visit.error_code is not None:
                self.metrics.errors.labels(endpoint, visit.error_code).inc()
            if self.traces:
                self.traces.add(scope, visit, endpoint, status, request_id)
