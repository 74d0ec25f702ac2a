"""The result of one rate tried on a server, and of a `ramp`: figures, raw samples, doubts."""

from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np

from latency.measure.statistics import SAMPLES_FOR_P99

# If the generator's p99 lateness exceeds this share of the p99 latency, the client may be the limit.
LATE_SHARE = 0.1


class LoadTrial(TypedDict):
    """One rate tried. Times are in milliseconds from the moment when a query was due; percentiles are of ok queries."""

    rate_per_s: float
    queries: int  # sent; fewer than asked for when the trial missed its bound and was cut short
    seconds: float  # from the start to the last answer
    p50_ms: float | None  # None: no ok query
    p90_ms: float | None
    p99_ms: float | None
    held: NotRequired[bool]  # no query was refused, failed or timed out, and p99 stayed under the bound
    ok: int
    refused: int  # 429 and 503
    timeouts: int
    errors: dict[str, int]  # by status or kind
    answered_per_s: float  # ok queries per second
    late_p50_ms: float  # the generator's own lateness
    late_p99_ms: float
    client_core_share: float  # of one core, that the generator used
    connections: int  # opened
    waited: int  # queries that waited because all connections were in use and no more could be opened
    resent: int  # queries whose connection the server had closed as idle
    doubts: list[str]
    latencies_ms: list[float]  # of ok queries, in order of their due moments
    from_sent_ms: list[float]  # of the same queries, from when they were written: a closed loop would measure these
    refused_ms: list[float]
    late_ms: list[float]


class LoadedServer(TypedDict):
    """The result of `ramp`."""

    bound_ms: float
    rate_per_s: float  # the highest rate that held; 0: no tried rate held
    trials: list[LoadTrial]  # in order
    doubts: list[str]  # about the rate found


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

    def trial(self, bound_ms: float | None = None) -> LoadTrial:
        """Everything as a JSON document, with `held` where there is a bound."""
        p50_ms, p90_ms, p99_ms = (self.percentile_ms(percent) for percent in (50, 90, 99))
        document = LoadTrial(
            rate_per_s=self.rate_per_s,
            queries=self.queries,
            seconds=self.seconds,
            p50_ms=p50_ms,
            p90_ms=p90_ms,
            p99_ms=p99_ms,
            ok=len(self.latencies_ms),
            refused=len(self.refused_ms),
            timeouts=self.timeouts,
            errors=self.errors,
            answered_per_s=len(self.latencies_ms) / self.seconds,
            late_p50_ms=self.late_percentile_ms(50),
            late_p99_ms=self.late_percentile_ms(99),
            client_core_share=self.client_core_share,
            connections=self.connections,
            waited=self.waited,
            resent=self.resent,
            doubts=self.doubts(),
            latencies_ms=[round(ms, 4) for ms in self.latencies_ms],
            from_sent_ms=[round(ms, 4) for ms in self.from_sent_ms],
            refused_ms=[round(ms, 4) for ms in self.refused_ms],
            late_ms=[round(ms, 4) for ms in self.late_ms],
        )
        if bound_ms is not None:
            document["held"] = self.held(bound_ms)
        return document
