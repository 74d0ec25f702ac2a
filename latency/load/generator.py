"""Open-loop load on an HTTP server: a request is sent when it is due, whether or not earlier ones are answered.

A closed loop sends the next request after the last answer, so it sends nothing while a server stalls, and counts the stall
once. Here latency counts from the moment when a request was due, even if it was sent late.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from latency.load.driver import OK, TIMEOUT, UNSENT, Driven, drive, highest_rate, poisson_s
from latency.load.http_client import target_of
from latency.measure.interleave import Progress
from latency.measure.statistics import SAMPLES_FOR_P99
from serve.errors import BadInput

TEXT = "TEXT"  # placeholder for a text in a template
OUR_TEMPLATE = '{"text": "TEXT"}'
REFUSALS = (429, 503)
KNOWN = {*OK, *REFUSALS, TIMEOUT}  # every other outcome is an error
MOST_QUERIES = 1_000_000  # of a trial: this generator needs a minute for them
LEAST_QUERIES = 20  # of a trial of a ramp, at any rate
FIRST_QUERIES = 20  # one after another; their latency gives a ramp's first rate
MOST_DOUBLED = 4096  # a ramp's highest rate, as a multiple of its first
# If the generator's p99 lateness exceeds this share of the p99 latency, the client may be the limit.
LATE_SHARE = 0.1


@dataclass(frozen=True)
class Load:
    """The outcome of the queries of one trial; times are in milliseconds."""

    rate_per_s: float  # at which queries were due
    queries: int  # sent
    seconds: float  # from the start to the last answer
    latencies_ms: tuple[float, ...]  # of ok (2xx) queries, from their due moments to the last byte, in order
    from_sent_ms: tuple[float, ...]  # of the same queries, from when they were written
    refused_ms: tuple[float, ...]  # of those answered 429 or 503, from their due moments
    late_ms: tuple[float, ...]  # from its due moment until the generator handled each query
    timeouts: int
    errors: dict[str, int]  # by status or kind
    connections: int  # opened
    waited: int  # queries that waited because all connections were in use and no more could be opened
    resent: int  # queries whose connection the server had closed as idle
    client_core_share: float  # of one core, that the generator used
    cut_short: bool = False  # the given bound was missed

    def percentile_ms(self, percent: float) -> float | None:
        """A percentile of the latencies of ok queries; None without any."""
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else None

    def late_percentile_ms(self, percent: float) -> float:
        """A percentile of the generator's own lateness."""
        return float(np.percentile(self.late_ms, percent))

    def held(self, bound_ms: float) -> bool:
        """Whether no query was refused, failed or timed out, and the p99 stayed under `bound_ms`."""
        p99_ms = self.percentile_ms(99)
        failed = len(self.refused_ms) + self.timeouts + sum(self.errors.values())
        return not self.cut_short and not failed and p99_ms is not None and p99_ms < bound_ms

    def doubts(self) -> list[str]:
        """Reasons not to rely on the p99, one sentence each; empty without any."""
        found = []
        if 0 < len(self.latencies_ms) < SAMPLES_FOR_P99:
            found.append(f"p99 rests on {len(self.latencies_ms)} of the {SAMPLES_FOR_P99} answers that it needs")
        if self.resent:
            found.append(
                f"{self.resent} of {self.queries} queries had to be sent again: the server closed their idle connections unanswered"
            )
        return found + self.client_doubts()

    def client_doubts(self) -> list[str]:
        """Signs that the client was the limit, and not the server."""
        found = []
        late_ms, p99_ms = self.late_percentile_ms(99), self.percentile_ms(99)
        if p99_ms is not None and late_ms > LATE_SHARE * p99_ms:
            found.append(
                f"the generator itself was late by {late_ms:.3g} ms or more for 1 % of queries, and p99 is {p99_ms:.3g} ms; "
                "the client may be the limit: give it its own cores"
            )
        if self.waited:
            found.append(
                f"{self.waited} of {self.queries} queries had to wait for a connection, since all were in use; the wait counts. "
                "Allow more connections if real clients open more"
            )
        return found

    def trial(self, bound_ms: float | None = None) -> dict[str, Any]:
        """Everything as a JSON document, with `held` where there is a bound. Percentiles are of ok queries."""
        p50_ms, p90_ms, p99_ms = (self.percentile_ms(percent) for percent in (50, 90, 99))
        return {
            "rate_per_s": self.rate_per_s,
            "queries": self.queries,  # fewer than asked for when the trial missed its bound and was cut short
            "seconds": self.seconds,
            "p50_ms": p50_ms,
            "p90_ms": p90_ms,
            "p99_ms": p99_ms,
            "ok": len(self.latencies_ms),
            "refused": len(self.refused_ms),
            "timeouts": self.timeouts,
            "errors": self.errors,
            "answered_per_s": len(self.latencies_ms) / self.seconds,
            "late_p50_ms": self.late_percentile_ms(50),
            "late_p99_ms": self.late_percentile_ms(99),
            "client_core_share": self.client_core_share,
            "connections": self.connections,
            "waited": self.waited,
            "resent": self.resent,
            "doubts": self.doubts(),
            **{
                name: [round(ms, 4) for ms in getattr(self, name)]
                for name in ("latencies_ms", "from_sent_ms", "refused_ms", "late_ms")
            },
            **({} if bound_ms is None else {"held": self.held(bound_ms)}),
        }


def request_bodies(template: str, texts: Sequence[str]) -> list[bytes]:
    """A JSON body for each text: `template` with the text in place of every string "TEXT".

    Raises BadInput when `template` is not JSON or has no such string, or a text is not valid Unicode.
    """
    try:
        parsed = json.loads(template)
    except ValueError as error:
        raise BadInput(f"the template is not JSON ({error}); give one such as {OUR_TEMPLATE}") from error
    if _filled(parsed, "") == parsed:
        raise BadInput(
            f'the template {template} has no string "{TEXT}", which each text replaces; give one such as {OUR_TEMPLATE}'
        )
    try:
        return [json.dumps(_filled(parsed, text), ensure_ascii=False).encode("utf-8") for text in texts]
    except UnicodeEncodeError as error:
        raise BadInput(f"the template or a text has half a surrogate pair ({error}); remove it") from error


def _filled(part: Any, text: str) -> Any:
    if isinstance(part, dict):
        return {key: _filled(value, text) for key, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, text) for value in part]
    return text if part == TEXT else part


def load(
    url: str,
    requests: Sequence[bytes],
    *,
    rate_per_s: float,
    queries: int,
    connections: int = 256,
    timeout_s: float = 10.0,
    headers: Mapping[str, str] | None = None,
    seed: int = 0,
    bound_ms: float | None = None,
    progress: Progress | None = None,
) -> Load:
    """Posts `queries` bodies to `url` at the moments of `poisson_s(rate_per_s, queries, seed)`.

    The bodies are `requests` in an order drawn from `seed`; each is sent once before any is repeated. Connections, timeouts
    and `bound_ms` are those of `latency.load.driver.drive`.

    The generator's lateness for each query is kept too. Poisson arrivals sample time evenly, so this is also about how
    late it reads answers.

    Raises BadInput when an argument is not above 0, or what `target_of` and `drive` raise.
    """
    due_s = poisson_s(rate_per_s, queries, seed)
    if not requests or connections < 1 or not timeout_s > 0:
        raise BadInput(
            f"{len(requests)} requests, {connections} connections and a timeout of {timeout_s:g} s were given; "
            "each must be above 0"
        )
    target = target_of(url, headers)
    whole = [target.request(body) for body in requests]

    def tell(done: int, count: int) -> None:
        if progress:
            progress(done, count, f"{rate_per_s:.4g}/s")

    began_s = time.monotonic()
    driven = drive(
        target,
        [whole[i] for i in _drawn(len(requests), queries, seed)],
        due_s=due_s,
        connections=connections,
        timeout_s=timeout_s,
        bound_ms=bound_ms,
        tell=tell,
    )
    return _load_of(driven, rate_per_s, driven.core_s / (time.monotonic() - began_s))


def _load_of(driven: Driven, rate_per_s: float, core_share: float) -> Load:
    became = driven.became
    sent = [query for query, each in enumerate(became) if each != UNSENT]
    ok = [query for query in sent if became[query] in OK]
    refused = [query for query in sent if became[query] in REFUSALS]
    latency_ms, from_sent_ms = (1000 * (driven.ended_s - began_s) for began_s in (driven.due_s, driven.sent_s))
    return Load(
        rate_per_s=rate_per_s,
        queries=len(sent),
        seconds=driven.seconds,
        latencies_ms=tuple(latency_ms[ok].tolist()),
        from_sent_ms=tuple(from_sent_ms[ok].tolist()),
        refused_ms=tuple(latency_ms[refused].tolist()),
        late_ms=tuple((1000 * driven.late_s[sent]).tolist()),
        timeouts=driven.having(TIMEOUT),
        errors=dict(Counter(str(became[query]) for query in sent if became[query] not in KNOWN)),
        connections=driven.connections,
        waited=driven.waited,
        resent=driven.resent,
        client_core_share=core_share,
        cut_short=driven.cut_short,
    )


def ramp(
    url: str,
    requests: Sequence[bytes],
    *,
    bound_ms: float,
    seconds: float = 10.0,
    queries: int | None = None,
    connections: int = 256,
    timeout_s: float = 10.0,
    headers: Mapping[str, str] | None = None,
    seed: int = 0,
    tolerance: float = 0.05,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The highest rate whose p99 stays under `bound_ms` while no query is refused, fails or times out.

    A trial is a `load` with `seconds` of arrivals, or with `queries`; it ends early when it cannot keep the bound. The search
    is `highest_rate`, to within `tolerance`. It starts at a quarter of the rate at which the server answers queries one
    after another, and tries lower rates, down to a 64th, only if that fails. Raises what `load` raises, and BadInput for
    numbers that are not above 0.
    """
    if not (bound_ms > 0 and seconds > 0 and (queries is None or queries > 0)):
        raise BadInput(
            f"a bound of {bound_ms:g} ms, {seconds:g} s and {'no number of' if queries is None else queries} queries were given; "
            "each must be above 0"
        )
    send = partial(load, url, requests, timeout_s=timeout_s, headers=headers)
    loads: list[Load] = []
    settled = 0

    def tell(done: int, count: int, note: str) -> None:
        if progress:
            progress(settled + done, settled + count, f"trial {len(loads) + 1}, {note}")

    def try_rate(rate_per_s: float) -> bool:
        nonlocal settled
        tried = send(
            rate_per_s=rate_per_s,
            queries=queries or min(MOST_QUERIES, max(LEAST_QUERIES, round(rate_per_s * seconds))),
            connections=connections,
            seed=seed + len(loads),  # so that another trial of the same rate has other bursts
            bound_ms=bound_ms,
            progress=tell,
        )
        settled += tried.queries
        loads.append(tried)
        return tried.held(bound_ms)

    target = target_of(url, headers)
    first = [target.request(requests[i]) for i in _drawn(len(requests), FIRST_QUERIES, seed)]
    one_by_one_ms = drive(target, first, connections=1, timeout_s=timeout_s).latencies_ms
    begin = 250 / (float(np.median(one_by_one_ms)) if len(one_by_one_ms) else timeout_s * 1000)
    found = highest_rate(try_rate, begin, MOST_DOUBLED * begin, tolerance)
    found = found or highest_rate(try_rate, begin / 16, begin, tolerance)
    # Doubts about the rate found: those of its own trial, and client limits in the trial of the next higher rate.
    own = [tried for tried in loads if tried.rate_per_s == found and tried.held(bound_ms)]
    doubts = own[-1].doubts() if own else []
    if above := [tried for tried in loads if tried.rate_per_s > found]:
        lowest = min(above, key=lambda tried: tried.rate_per_s)
        doubts += [f"at {lowest.rate_per_s:.4g}/s, which did not hold: {doubt}" for doubt in lowest.client_doubts()]
    else:
        doubts.append(f"every rate that was tried held, up to {found:.4g}/s; the server may sustain more")
    trials = [tried.trial(bound_ms) for tried in loads]  # in order
    return {"bound_ms": bound_ms, "rate_per_s": found, "trials": trials, "doubts": doubts}


def _drawn(requests: int, queries: int, seed: int) -> list[int]:
    rounds = np.tile(np.arange(requests), (-(-queries // requests), 1))  # (rounds, requests)
    order: list[int] = np.random.default_rng([seed, 1]).permuted(rounds, axis=1).ravel()[:queries].tolist()
    return order
