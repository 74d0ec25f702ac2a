"""One request on its way through the server: where its time went and how it ended, for its answer, the log, the metrics and traces."""

import itertools
import math
import re
import secrets
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from starlette.types import Scope

from serve.errors import BadInput

# What of a client's own request id is echoed: enough for any common form, nothing that could break a header or a log.
REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

KEY = "stillroom.request_context"  # in the scope

TIMEOUT_HEADER = "X-Timeout-Ms"
MOST_TIMEOUT_MS = 999_999_999

# A request id is drawn once for the process and counted from there: as unique as a random one each time, and cheaper.
_PROCESS = secrets.token_hex(8)
_numbers = itertools.count(secrets.randbits(48))


def new_request_id() -> str:
    """32 hexadecimal digits that no other request of any process has."""
    return f"{_PROCESS}{next(_numbers):016x}"


class Stages(NamedTuple):
    """What a model's process had done of a batch when it gave an answer. Seconds; `begun_s` on the clock of `perf_counter`."""

    begun_s: float
    tokenise_s: float
    run_s: float
    decode_s: float

    def after(self, tokenise_s: float, run_s: float, decode_s: float) -> "Stages":
        """These, and one more run of the model."""
        return Stages(self.begun_s, self.tokenise_s + tokenise_s, self.run_s + run_s, self.decode_s + decode_s)


@dataclass(slots=True)
class RequestContext:
    """What is remembered of a request until it is answered. Times are seconds on the clock of `perf_counter`.

    `stages` are those of the text that was answered last, which is the one that the request waited for: its time is the
    time from `queued_s` to `stages.begun_s` in the queue, then what the process spent on its batch until it was answered.
    """

    begun_s: float = field(default_factory=perf_counter)
    queued_s: float = 0.0
    stages: Stages | None = None
    model: str | None = None
    variant: str | None = None
    texts: int = 0
    error_code: str | None = None
    request_id: str = ""
    key_name: str | None = None
    """Of the key that it came with."""
    logged_texts: list[str] | None = None
    """Its texts, only where the log is to have them."""
    body_bytes: int = 0
    answer_bytes: int = 0
    status: int = 0

    @property
    def queue_s(self) -> float:
        """How long the text answered last waited for a process; 0 before there is an answer."""
        return self.stages.begun_s - self.queued_s if self.stages else 0.0

    def stage_seconds(self) -> dict[str, float]:
        """The stages of the text answered last, in their order; none before there is an answer."""
        if self.stages is None:
            return {}
        _, tokenise_s, run_s, decode_s = self.stages
        return {"queue": self.queue_s, "tokenise": tokenise_s, "run": run_s, "decode": decode_s}

    def server_timing(self) -> str:
        """The value of the `Server-Timing` header: each stage and, up to now, the whole, in milliseconds."""
        parts = {**self.stage_seconds(), "total": perf_counter() - self.begun_s}
        return ", ".join(f"{name};dur={1000 * seconds:.2f}" for name, seconds in parts.items())


def context_of(scope: Scope) -> RequestContext:
    """The context of the request in `scope`; a new one where nobody began it."""
    context: RequestContext | None = scope.get(KEY)
    if context is None:
        context = scope[KEY] = RequestContext()
    return context


def client_timeout_s(given: str | None) -> float:
    """How long the client waits for its answer, which is what `given`, its `X-Timeout-Ms`, says; without it, for ever.

    BadInput when it is no whole number from 1.
    """
    if given is None:
        return math.inf
    if not (given.isascii() and given.isdigit() and len(given) <= len(str(MOST_TIMEOUT_MS)) and int(given) > 0):
        raise BadInput(
            f"{TIMEOUT_HEADER} is {given[:40]!r}; give a whole number of milliseconds from 1 to {MOST_TIMEOUT_MS}",
            field=TIMEOUT_HEADER,
        )
    return int(given) / 1000
