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

log = logging.getLogger("serve")

# What of a client's own request id is echoed: enough for any common form, nothing that could break a header or a log.
REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

# Counted when the client hung up before its answer; nobody hears it. The number is nginx's.
CLIENT_GONE = 499


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as JSON; UTF-8."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


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
    return json_response(in_form_of(path, described), error.http_status, sent)


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
    return json_response(in_form_of(request.url.path, described), error.status_code, error.headers)


class Edge:
    """ASGI middleware around everything: gives each request an id, counts and times it, and answers unknown errors."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, endpoints: frozenset[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and see to its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_s = time.perf_counter()
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
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception:
            log.exception("request %s to %s failed", request_id, scope["path"])
            if status:  # the answer has begun: all that is left is to break it off
                raise
            told = InternalError(f"the server failed; its log says why, under request {request_id}")
            await error_response(told, path=scope["path"])(scope, receive, send_with_id)
        finally:
            endpoint = scope.get("stillroom.endpoint", endpoint)
            self.metrics.requests.labels(endpoint, str(status)).inc()
            self.metrics.request_seconds.labels(endpoint).observe(time.perf_counter() - began_s)
