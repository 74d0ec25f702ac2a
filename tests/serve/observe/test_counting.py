"""Our counters and histograms give what prometheus_client's own give for the same observations."""

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from serve.observe.metrics import Counter, Histogram

BUCKETS = (0.001, 0.5, 1.0, 30.0)
LABELS = st.tuples(st.sampled_from(["/v1/entities", "other"]), st.sampled_from(["200", 'a "b"\n']))


@given(st.lists(st.tuples(LABELS, st.sampled_from([0.0, 0.001, 0.4, 0.5, 0.7, 1.0, 31.0, 1e9]))))
def test_the_text_is_that_of_the_library(seen: list[tuple[tuple[str, str], float]]) -> None:
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    names = ["endpoint", "status"]
    count, spread = Counter("asked", "Requests", names, ours), Histogram("took", "Seconds", names, BUCKETS, ours)
    their_count = prometheus_client.Counter("asked", "Requests", names, registry=theirs)
    their_spread = prometheus_client.Histogram("took", "Seconds", names, buckets=BUCKETS, registry=theirs)
    for labels, value in seen:
        count.labels(*labels).inc(value)
        spread.labels(*labels).observe(value)
        their_count.labels(*labels).inc(value)
        their_spread.labels(*labels).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
