"""What a server tells of its own work: the times in its answers and the series at /metrics."""

import re

import httpx
import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from repository import ROOT
from server_process import value_of

from serve.observe.metrics import Counter, Histogram

BUCKETS = (0.001, 0.5, 1.0, 30.0)
LABELS = st.tuples(st.sampled_from(["/v1/entities", "other"]), st.sampled_from(["200", 'a "b"\n']))


def value(client: httpx.Client, sample: str) -> float:
    return value_of(sample, client.get("/metrics").text)


def parts_ms(response: httpx.Response) -> dict[str, float]:
    parts = (part.split(";dur=") for part in response.headers["Server-Timing"].split(", "))
    return {name: float(duration) for name, duration in parts}


def test_an_answer_tells_where_its_time_went(client: httpx.Client) -> None:
    for path, text in (("/v1/entities", "fly to rome"), ("/v1/classify", ["refund please"] * 100)):
        told = parts_ms(client.post(path, json={"text": text}))
        assert list(told) == ["queue", "tokenise", "run", "decode", "total"]
        assert told["tokenise"] > 0
        assert told["run"] > 0
        # The parts are of one text's way, one after the other, so they fit the whole; each is rounded to 0.01 ms.
        assert sum(duration for name, duration in told.items() if name != "total") <= told["total"] + 0.05


def test_what_asks_no_model_tells_no_times(client: httpx.Client) -> None:
    assert "Server-Timing" not in client.get("/v1/models").headers
    assert "Server-Timing" not in client.post("/v1/entities", json={"text": 1}).headers


def test_errors_are_counted_by_their_code(client: httpx.Client) -> None:
    for method, path, asked, endpoint, code in (
        ("POST", "/v1/entities", {"text": 1}, "/v1/entities", "invalid_input"),
        ("POST", "/v1/classify", {"text": "", "model": "x"}, "/v1/classify", "not_found"),
        ("GET", "/wp-login.php", None, "other", "not_found"),
        ("DELETE", "/v1/models", None, "/v1/models", "method_not_allowed"),
    ):
        sample = f'stillroom_errors_total{{code="{code}",endpoint="{endpoint}"}}'
        before = value(client, sample)
        assert client.request(method, path, json=asked).status_code >= 400
        assert value(client, sample) == before + 1, path
    assert "wp-login" not in client.get("/metrics").text


def test_answers_and_refusals_are_counted_by_their_status(client: httpx.Client) -> None:
    def counts() -> list[float]:
        asked = 'stillroom_requests_total{{endpoint="/v1/classify",status="{}"}}'
        samples = [asked.format(200), asked.format(422), 'stillroom_batch_texts_sum{model="intents"}']
        return [value(client, sample) for sample in samples]

    before = counts()
    client.post("/v1/classify", json={"text": ["a", "b", "rome"]})
    client.post("/v1/classify", json={"text": []})
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 1, 3]


def test_a_batch_is_counted_once_in_each_stage(client: httpx.Client) -> None:
    def counts() -> list[float]:
        stages = [
            f'stillroom_stage_seconds_count{{model="cities",stage="{each}"}}' for each in ("tokenise", "run", "decode")
        ]
        return [value(client, sample) for sample in [*stages, 'stillroom_batch_texts_count{model="cities"}']]

    before = counts()
    client.post("/v1/entities", json={"text": ["fly to rome", "oslo"]}).raise_for_status()
    assert counts() == [count + 1 for count in before]


def test_processes_and_waiting_are_shown_for_each_model(client: httpx.Client) -> None:
    assert "stillroom_drift_expected{" not in client.get("/metrics").text  # of models without scores of validation
    for model in ("cities", "intents"):
        assert value(client, f'stillroom_processes{{model="{model}"}}') >= 1
    assert value(client, 'stillroom_queue_texts{model="cities"}') == 0
    before = value(client, 'stillroom_queue_seconds_count{model="cities"}')
    client.post("/v1/entities", json={"text": ["rome", "oslo"]})
    assert value(client, 'stillroom_queue_seconds_count{model="cities"}') == before + 1  # a request, not a text


def test_names_of_metrics_keep_the_conventions_and_are_all_in_the_docs(client: httpx.Client) -> None:
    documented = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    families = list(text_string_to_metric_families(client.get("/metrics").text))
    ours = [family for family in families if family.name.startswith("stillroom_")]
    assert len(ours) >= 12
    for family in ours:
        samples = {sample.name for sample in family.samples}
        assert not any(name.endswith("_created") for name in samples)
        assert re.fullmatch(r"stillroom(_[a-z]+)+", family.name)
        assert not re.search(r"_(total|count|sum|bucket)$", family.name)
        assert family.documentation
        assert not re.search(r"milliseconds|_ms\b|minutes", family.name)
        exposed = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{exposed}`" in documented, exposed
    assert set(re.findall(r"`(stillroom_[a-z_]+)`", documented)) == {
        f"{family.name}_total" if family.type == "counter" else family.name for family in ours
    }


@given(st.lists(st.tuples(LABELS, st.sampled_from([0.0, 0.001, 0.4, 0.5, 0.7, 1.0, 31.0, 1e9]))))
def test_counters_and_histograms_give_what_the_library_gives(seen: list[tuple[tuple[str, str], float]]) -> None:
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
