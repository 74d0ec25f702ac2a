"""The context of one request: its times and how it ended. The answer, the log, the metrics and the traces use it."""

import itertools
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from starlette.types import Scope

from serve.errors import BadInput

# Request ids of clients that are echoed: the common forms match, and nothing that could break a header or a log does.
REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

KEY = "stillroom.request_context"  # in the scope

TIMEOUT_HEADER = "X-Timeout-Ms"
TIMEOUT_NAME = TIMEOUT_HEADER.lower().encode()
MOST_TIMEOUT_MS = 999_999_999

# Request ids: a random prefix for the process and a counter. They are as unique as random ids, and cheaper.
_PROCESS = secrets.token_hex(8)
_numbers = itertools.count(secrets.randbits(48))


def _renew() -> None:
    global _PROCESS  # noqa: PLW0603 - a forked process must not give the ids of its parent
    _PROCESS = secrets.token_hex(8)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def new_request_id() -> str:
    """32 hexadecimal digits, unique across processes."""
    return f"{_PROCESS}{next(_numbers):016x}"


class Stages(NamedTuple):
    """Times of a batch at its model until one answer came, in seconds; `begun_s` is on the clock of `perf_counter`."""

    begun_s: float
    tokenise_s: float
    run_s: float
    decode_s: float

    def after(self, tokenise_s: float, run_s: float, decode_s: float) -> "Stages":
        """These times with those of one more run of the model added."""
        return Stages(self.begun_s, self.tokenise_s + tokenise_s, self.run_s + run_s, self.decode_s + decode_s)


@dataclass(slots=True)
class RequestContext:
    """The data of a request until it is answered. Times are seconds on the clock of `perf_counter`.

    `stages` are those of the text that was answered last, since the request waits for it. That text was in the queue from
    `queued_s` to `stages.begun_s`; then the model spent the other times on its batch until the answer.
    """

    begun_s: float = field(default_factory=perf_counter)
    queued_s: float = 0.0
    stages: Stages | None = None
    model: str | None = None
    variant: str | None = None
    texts: int = 0
    failed_texts: list[int] = field(default_factory=list)
    """The indices of those on which the model has failed by now."""
    error_code: str | None = None
    request_id: str = ""
    key_name: str | None = None
    """The name of the request's API key."""
    key_digest: bytes = b""
    """That key's SHA-256."""
    logged_texts: list[str] | None = None
    """The request's texts, only if texts are logged."""
    body_bytes: int = 0
    answer_bytes: int = 0
    status: int = 0
    headers: Mapping[bytes, bytes] | None = None
    """The request's headers, see `headers_of`."""
    when_abandoned: "set[Callable[[RequestContext], None]]" = field(default_factory=set)
    """What drops the work under way for a request, a function for each batch."""

    def abandon(self) -> None:
        """Called when nobody waits for the answer any longer: drops what is under way."""
        for drop in list(self.when_abandoned):
            drop(self)

    @property
    def queue_s(self) -> float:
        """Seconds that the text answered last waited for the model; 0 before there is an answer."""
        return self.stages.begun_s - self.queued_s if self.stages else 0.0

    def stage_seconds(self) -> dict[str, float]:
        """Seconds of each stage of the text answered last, in order; empty before there is an answer."""
        if self.stages is None:
            return {}
        _, tokenise_s, run_s, decode_s = self.stages
        return {"queue": self.queue_s, "tokenise": tokenise_s, "run": run_s, "decode": decode_s}

    def server_timing(self) -> str:
        """The value of the `Server-Timing` header: milliseconds of each stage, and of the whole request until now."""
        parts = {**self.stage_seconds(), "total": perf_counter() - self.begun_s}
        return ", ".join(f"{name};dur={1000 * seconds:.2f}" for name, seconds in parts.items())


def context_of(scope: Scope) -> RequestContext:
    """The context of the request in `scope`; a new one if it has none."""
    context: RequestContext | None = scope.get(KEY)
    if context is None:
        context = scope[KEY] = RequestContext()
    return context


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """The headers of the request in `scope` by their names in small letters; of several of one name, the last."""
    context = context_of(scope)
    if context.headers is None:
        context.headers = dict(scope["headers"])
    return context.headers


def client_timeout_s(given: bytes | None) -> float:
    """Seconds that the client waits for its answer, from `given`, its header `X-Timeout-Ms`; infinity without the header.

    BadInput when it is not a whole number from 1 to 999,999,999.
    """
    if given is None:
        return math.inf
    said = given.decode("latin-1")
    if not (said.isascii() and said.isdigit() and len(said) <= len(str(MOST_TIMEOUT_MS)) and int(said) > 0):
        raise BadInput(
            f"{TIMEOUT_HEADER} is {said[:40]!r}; give a whole number of milliseconds from 1 to {MOST_TIMEOUT_MS:,}",
            field=TIMEOUT_HEADER,
        )
    return int(said) / 1000
