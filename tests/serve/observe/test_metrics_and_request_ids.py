"""What a server tells of its own work: the times in its answers and the series at /metrics."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S
from prometheus_client.parser import text_string_to_metric_families
from repository import ROOT
from server_process import running, wait_until_ready


@pytest.fixture(scope="module")
def client(entities_bundle: Path, intents_bundle: Path) -> Iterator[httpx.Client]:
    with running(entities_bundle, intents_bundle) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        wait_until_ready(client)
        yield client


def value(client: httpx.Client, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


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
    cases = {
        'endpoint="/v1/entities",code="invalid_input"': lambda: client.post("/v1/entities", json={"text": 1}),
        'endpoint="/v1/classify",code="not_found"': lambda: client.post(
            "/v1/classify", json={"text": "", "model": "x"}
        ),
        'endpoint="other",code="not_found"': lambda: client.get("/wp-login.php"),
        'endpoint="/v1/models",code="method_not_allowed"': lambda: client.delete("/v1/models"),
    }
    for labels, ask in cases.items():
        code = labels.partition('code="')[2].rstrip('"')
        endpoint = labels.partition('endpoint="')[2].partition('"')[0]
        sample = f'stillroom_errors_total{{code="{code}",endpoint="{endpoint}"}}'
        before = value(client, sample)
        assert ask().status_code >= 400
        assert value(client, sample) == before + 1, labels


def test_a_batch_is_counted_once_in_each_stage(client: httpx.Client) -> None:
    def counts() -> list[float]:
        stages = [f'stillroom_stage_seconds_count{{model="cities",stage="{each}"}}' for each in ("tokenise", "run")]
        return [value(client, sample) for sample in [*stages, 'stillroom_batch_texts_count{model="cities"}']]

    before = counts()
    client.post("/v1/entities", json={"text": ["fly to rome", "oslo"]}).raise_for_status()
    assert counts() == [count + 1 for count in before]


def test_processes_and_waiting_are_shown_for_each_model(client: httpx.Client) -> None:
    for model in ("cities", "intents"):
        assert value(client, f'stillroom_processes{{model="{model}"}}') >= 1
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
    of_fronts = {"stillroom_front_restarts_total"}  # where there are several
    assert set(re.findall(r"`(stillroom_[a-z_]+)`", documented)) - of_fronts == {
        f"{family.name}_total" if family.type == "counter" else family.name for family in ours
    }
