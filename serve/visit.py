"""What is known of one request while it is answered: for its limits, and for its line in the log."""

import itertools
import secrets
import time

from starlette.requests import Request

# Where a request's scope holds its visit.
VISIT = "stillroom.visit"

# A request id is drawn once for the process and counted from there: as unique as a random one each time, and cheaper.
_PROCESS = secrets.token_hex(8)
_numbers = itertools.count(secrets.randbits(48))


class Visit:
    """One request."""

    __slots__ = (
        "answer_bytes",
        "began_s",
        "body_bytes",
        "due_s",
        "key_name",
        "model",
        "request_id",
        "status",
        "texts",
        "texts_count",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.began_s = time.perf_counter()
        self.due_s: float | None = None
        """When its client wants its answer at the latest, in the loop's time."""
        self.key_name: str | None = None
        self.model: str | None = None
        self.texts_count: int | None = None
        self.texts: list[str] | None = None
        """The texts themselves, only where the log is to have them."""
        self.body_bytes = 0
        self.answer_bytes = 0
        self.status = 0


def visit_of(request: Request) -> Visit:
    """The visit that a request is."""
    visit: Visit = request.scope[VISIT]
    return visit


def new_request_id() -> str:
    """32 hexadecimal digits that no other request of any process has."""
    return f"{_PROCESS}{next(_numbers):016x}"
