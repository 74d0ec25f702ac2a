"""Every error, with its HTTP status, its exit code and its cause; and how long to wait before a request that failed is sent again.

StillroomError
├── InternalError       500  exit 1  a bug in this program
├── BadInput            422  exit 2  the caller's input cannot be used
│   ├── BadRequest      400          the body is not JSON, or not an object
│   ├── Unauthorized    401          no key, or a wrong one
│   ├── Forbidden       403          a web page of an origin, or a host, that is not allowed
│   ├── NotFound        404          no such model or path
│   ├── TooSlow         408          the request did not arrive in the time allowed
│   ├── TooLarge        413          over a stated limit
│   ├── UnsupportedMedia 415         not application/json
│   ├── HeadTooLarge    431          the headers are too many or too long
│   └── BundleError          exit 2  a bundle that is damaged, incomplete or too new
├── GateMissed               exit 3  a gate was not passed: the report is written, the bundle is not
└── Unavailable         503          the server cannot answer now, and may soon
    ├── Overloaded      429          the queue is full; carries retry_after_s
    │   └── RateLimited 429          one key is over its limits
    └── DeadlineExceeded 504         no answer in the time allowed

A message says what was given, what was needed and what to do. It reaches the caller, so it never holds a secret.
"""

import random
import re
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

Fault = Literal["ours", "caller", "passing"]


class StillroomError(Exception):
    """The base of all errors here. `code` is stable and machine-readable; the message is for a person."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    fault: ClassVar[Fault] = "ours"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InternalError(StillroomError):
    """A bug in this program. Details go to the log, not to the caller."""


class BadInput(StillroomError):
    """The input cannot be used. The message says what was given, what was needed and what to do."""

    code = "invalid_input"
    http_status = 422
    exit_code = 2
    fault = "caller"


class BadRequest(BadInput):
    """The request body is not the JSON object that the endpoint takes."""

    code = "bad_request"
    http_status = 400


class Unauthorized(BadInput):
    """No key, or a wrong one, where one is required."""

    code = "unauthorized"
    http_status = 401


class Forbidden(BadInput):
    """A browser asks on behalf of a page whose origin is not allowed, or for a host that is not this server's."""

    code = "forbidden"
    http_status = 403


class NotFound(BadInput):
    """No such model, or no such path."""

    code = "not_found"
    http_status = 404


class TooSlow(BadInput):
    """The request did not arrive completely in the time allowed, or its body came too slowly."""

    code = "request_timeout"
    http_status = 408


class TooLarge(BadInput):
    """Over a stated limit; the message gives the limit."""

    code = "too_large"
    http_status = 413


class UnsupportedMedia(BadInput):
    """The request is not `application/json`."""

    code = "unsupported_media_type"
    http_status = 415


class HeadTooLarge(BadInput):
    """The headers are more, or the request line and headers are longer, than the server reads."""

    code = "head_too_large"
    http_status = 431


class BundleError(BadInput):
    """The bundle is damaged, incomplete, or newer than this program reads."""

    code = "bundle"


class GateMissed(StillroomError):
    """A gate was not passed. The report is written, the bundle is not. `document` is what `--json` prints."""

    code = "gate_missed"
    exit_code = 3
    fault = "caller"

    def __init__(self, message: str, *, document: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.document = document


class Unavailable(StillroomError):
    """The server cannot answer now, and may soon."""

    code = "unavailable"
    http_status = 503
    fault = "passing"


class Overloaded(Unavailable):
    """The queue is full. `retry_after_s` is an estimate of when it has room again."""

    code = "overloaded"
    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """One key has more requests, in a time or at once, than its limits allow. Other keys are not affected."""

    code = "rate_limited"


class DeadlineExceeded(Unavailable):
    """No answer within the time that the server or the client allowed."""

    code = "deadline_exceeded"
    http_status = 504


def is_panic(error: BaseException) -> bool:
    """Whether `error` is a panic of a library in Rust. Each library has a class of its own for them, of one name."""
    return type(error).__name__ == "PanicException"


MESSAGE_ALONE = re.compile("/(v2(/.*)?|models/.*|embed|predict|rerank|info)?")


def in_form_of(path: str, described: dict[str, str], status: int) -> dict[str, object]:
    """The body of an error at `path`: the message alone where the protocol of the path has it so; elsewhere `described`, with OpenAI's
    `type` and `param`."""
    if MESSAGE_ALONE.fullmatch(path):
        return {"error": described["message"]}
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {**described, "type": kind, "param": described.get("field")}}


def drawn_pause_s(retry: int, first_s: float, longest_s: float) -> float:
    """Seconds before the retry of that number, from 0: drawn from 0 to a bound, which starts at `first_s` and doubles up to `longest_s`.

    They are drawn so that clients that failed together do not retry together ("Exponential Backoff and Jitter", AWS Architecture
    Blog, 2015: full jitter).
    """
    return random.uniform(0.0, min(longest_s, first_s * 2.0**retry))


def retry_after_s(header: str | None) -> float | None:
    """The seconds that the header `Retry-After` asks for, as a number or as a date (RFC 9110, section 10.2.3); None if it says none."""
    import email.utils  # it takes longer to load than the rest of this file

    said = (header or "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", said):  # the fraction is not in the RFC, and some endpoints send one
        return float(said)
    try:
        date = email.utils.parsedate_to_datetime(said)
    except (ValueError, OverflowError):  # of a number that no date has
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
