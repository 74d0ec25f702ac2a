"""The exact memo: the same bytes as without it, apart for each key, within its bytes, and only where answers have no company."""

import json
import logging
import random
import re
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lookup_bundles import city_table, write_bundle, write_graph, write_manifest
from server_process import read_answer, request, serving, value_of
from starlette.testclient import TestClient

from latency.load.driver import drive
from latency.load.http_client import target_of
from serve.bundle.runtimes import Device, Runtime
from serve.http.access import Access
from serve.http.api_keys import Keyring, keyring_of
from serve.http.app import create_app
from serve.observe import metrics as server_metrics
from serve.settings import ServeSettings
from serve.tasks import open_bundle
from serve.text.answers import AnswerOptions, TextFacts
from serve.text.inputs import TextWork
from serve.workers.memo import Memo, reason_to_forget

FACTS = TextFacts(1, 4, 0.5)


@contextmanager
def asking(*bundles: Path, keys: Keyring | None = None, memo_mib: float = 1.0) -> Iterator[TestClient]:
    """A client of the app in this process, with a memo."""
    app = create_app(bundles, ServeSettings(memo_mib=memo_mib), Access(keys, open_metrics=True))
    with TestClient(app) as client:
        client.portal.call(app.state.service.warm)
        yield client


def lookups(client: TestClient) -> tuple[float, float]:
    """Texts of `cities` found in the memo, and those computed."""
    text = client.get("/metrics").text
    return (
        value_of('stillroom_memo_hits_total{model="cities"}', text),
        value_of('stillroom_memo_misses_total{model="cities"}', text),
    )


def drawn_requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies: every kind of model by `/v1` and `/v2`, few texts and options, so that most come again; and refused ones."""
    chance = random.Random(0)
    texts = ["fly to rome", "i love it", "please refund", "", "new york 🙏", "oslo " * 90, "a b", "refund oslo"]

    def some() -> Any:
        return chance.choice(texts) if chance.random() < 0.5 else chance.choices(texts, k=chance.randint(1, 8))

    def relation() -> dict[str, Any]:
        head, tail = chance.choice([((4, 8), (12, 16)), ((12, 16), (4, 8))])
        parts = {
            "head": dict(zip(("start", "end"), head, strict=True)),
            "tail": dict(zip(("start", "end"), tail, strict=True)),
        }
        return {"items": [{"text": chance.choice(["fly rome to oslo", "fly oslo to rome"]), **parts}]}

    def options(**of: list[Any]) -> dict[str, Any]:
        return {name: chance.choice(values) for name, values in of.items() if chance.random() < 0.3}

    def tensors() -> tuple[str, dict[str, Any]]:
        data = chance.choices(texts, k=chance.randint(1, 4))
        model = chance.choice(["cities", "intents", "stars", "vectors"])
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(data)], "data": data}
        return f"/v2/models/{model}/infer", {"inputs": [tensor]}

    def ids() -> tuple[str, dict[str, Any]]:
        tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [2, chance.randint(4, 12), 3]}
        return "/v2/models/cities/infer", {"inputs": [tensor]}

    made = [
        lambda: ("/v1/entities", {"model": "cities", "text": some(), **options(offsets=["utf16"], min_score=[0.9], truncate=[True])}),
        lambda: ("/v1/entities", {"model": "broken", "text": some()}),  # it fails on `refund`
        lambda: ("/v1/classify", {"text": some(), **options(top_k=[1, 2], abstain=[True])}),  # which has no threshold
        lambda: ("/v1/relations", relation()),
        lambda: ("/v1/score", {"text": some()}),
        lambda: ("/v1/answer", {"question": "to", "context": chance.choice(texts)}),
        lambda: ("/v1/embeddings", {"input": some(), **options(dimensions=[2, 9], encoding_format=["base64"])}),  # it has 4
        lambda: ("/v1/entities", {"text": 1}),
        tensors,
        ids,
    ]  # fmt: skip
    return [chance.choice(made)() for _ in range(count)]


def test_ten_thousand_requests_are_answered_the_same_bytes_with_and_without_it(
    bundle_of_each_kind: list[Path], broken_bundle: Path
) -> None:
    asked = drawn_requests(10_000)
    became, metrics = [], ""
    for options in ([], ["--memo-mib", "0.02"]):  # of about 45 answers, so that some must go
        with serving(*bundle_of_each_kind, broken_bundle, "--queue-s", "60", *options) as server:
            requests = [
                target_of(f"{server.url}{path}", {"X-Request-Id": str(number)}).request(json.dumps(body).encode())
                for number, (path, body) in enumerate(asked)
            ]
            driven = drive(target_of(server.url), requests, connections=4, keep_bodies=True)
            became.append(list(zip(driven.became, driven.bodies, strict=True)))
            metrics = server.get("/metrics").text
    assert became[0] == became[1]
    assert {status for status, _ in became[0]} == {200, 422, 500}
    for model in ("cities", "intents", "relations", "stars", "places", "vectors", "broken"):
        assert value_of(f'stillroom_memo_hits_total{{model="{model}"}}', metrics) > 20, model
        assert value_of(f'stillroom_memo_misses_total{{model="{model}"}}', metrics) > 20, model
    assert 0 < value_of("stillroom_memo_bytes", metrics) <= 0.02 * 2**20


def test_only_new_texts_are_computed(entities_bundle: Path) -> None:
    with asking(entities_bundle) as client:

        def computed(*texts: str, **options: Any) -> float:
            before = value_of('stillroom_batch_texts_sum{model="cities"}', client.get("/metrics").text)
            response = client.post("/v1/entities", json={"text": list(texts), **options})
            assert [each["entities"][0]["text"] for each in response.json()["results"]] == list(texts)
            return value_of('stillroom_batch_texts_sum{model="cities"}', client.get("/metrics").text) - before

        assert computed("rome", "oslo") == 2
        assert computed("oslo", "paris", "rome", "oslo") == 1
        assert computed("paris") == 0
        assert computed("paris", offsets="utf8") == 1
        assert lookups(client) == (4, 4)


def test_each_api_key_has_answers_of_its_own_and_its_limits_count_them(entities_bundle: Path) -> None:
    alice, bob = ({"X-Api-Key": f"key-of-{name}-0123456789"} for name in ("alice", "bob"))
    keys = keyring_of([("keys", f"alice:{alice['X-Api-Key']}\nbob:{bob['X-Api-Key']} rate=1/h")])
    with asking(entities_bundle, keys=keys) as client:
        for headers, status, found in (
            (alice, 200, (0, 1)),
            (alice, 200, (1, 1)),
            (bob, 200, (1, 2)),
            (bob, 429, (1, 2)),
        ):
            assert client.post("/v1/entities", json={"text": "rome"}, headers=headers).status_code == status
            assert lookups(client) == found


def test_drift_is_the_same_with_and_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "WINDOW_TEXTS", 10)
    scores = {"texts": 500, "mean": 0.95, "deviation": 0.05, "tokens_mean": 3.1, "tokens_deviation": 0.4}
    variant = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime", "validation_scores": scores}
    bundle = write_bundle(tmp_path / "cities", city_table(), variants={"fp32": variant})
    drift = []
    for memo_mib in (0, 1):
        with asking(bundle, memo_mib=memo_mib) as client:
            for text in ("rome", "", "oslo " * 90, "i love it", "rome", "rome", "", "oslo " * 90) * 10:
                assert client.post("/v1/entities", json={"text": text}).status_code == 200
            drift.append(re.findall(r"(?m)^stillroom_drift.*", client.get("/metrics").text))
            assert lookups(client) == ((76, 4) if memo_mib else (0, 0))
    assert drift[0] == drift[1]
    assert 'stillroom_drift_mean{model="cities",of="tokens"} 14.6' in drift[0]  # of rows: a long text has several
    assert len(drift[0]) == 7  # mean, expected and deviations of both, and the alarm of one


def test_a_reload_drops_the_answers_of_the_old_bundle(bundle_copy: Path) -> None:
    with asking(bundle_copy) as client:

        def cities() -> int:
            return len(client.post("/v1/entities", json={"text": "rome"}).json()["results"][0]["entities"])

        assert [cities(), cities()] == [1, 1]
        write_graph(bundle_copy / "onnx" / "model.onnx", 0 * city_table(), per_text=False)  # every tag is as likely
        write_manifest(bundle_copy)
        client.portal.call(client.app.state.service.reload)
        assert "stillroom_memo_bytes 0.0" in client.get("/metrics").text
        assert [cities(), cities()] == [0, 0]
        assert lookups(client) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "runtime", "device", "said"),
    [
        ({}, "onnxruntime", "cpu", ""),
        ({"max_length": 48}, "openvino", "cpu", ""),
        ({"max_length": 40}, "openvino", "cpu", "OpenVINO"),
        ({}, "onnxruntime", "cuda", "cuda"),
        ({"scheme": "dynamic"}, "onnxruntime", "cpu", "dynamic"),
        ({"parity": {}}, "onnxruntime", "cpu", "no parity of 'fp32'"),
        ({"parity": {"fp32": {"company_differences": 3}}}, "onnxruntime", "cpu", "no parity of 'fp32'"),
        ({"parity": {"fp32": {"company_differences": 0}}}, "openvino", "cpu", "no parity of 'fp32 openvino'"),
    ],
)
def test_nothing_is_kept_where_an_answer_may_depend_on_its_company(
    entities_bundle: Path, changes: dict[str, Any], runtime: Runtime, device: Device, said: str
) -> None:
    manifest = open_bundle(entities_bundle).manifest
    exact = {"company_differences": 0}
    variant = msgspec.structs.replace(manifest.variants["fp32"], scheme=changes.pop("scheme", "fp32"))
    changes = {"parity": {"fp32": exact, "fp32 openvino": exact}, "variants": {"fp32": variant}, **changes}
    reason = reason_to_forget(msgspec.structs.replace(manifest, **changes), "fp32", runtime, device)
    assert said in reason
    assert bool(said) == bool(reason)


def test_a_server_says_so_where_the_setting_has_no_effect(bundle_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_manifest(bundle_copy, parity={})
    with caplog.at_level(logging.WARNING, "serve"), asking(bundle_copy) as client:
        for _ in range(2):
            assert client.post("/v1/entities", json={"text": "rome"}).status_code == 200
        assert lookups(client) == (0, 0)
    assert [each.message for each in caplog.records if "--memo-mib has no effect on model 'cities'" in each.message]


def test_all_that_it_costs_stays_within_its_bytes_and_what_was_used_last_stays() -> None:
    memo = Memo(2**20)
    tracemalloc.start()
    try:
        key = memo.key(b"model", b"", TextWork("asked again and again"))
        memo.put(key, b"answer", FACTS)
        for number in range(20_000):
            answer = b"x" * (number % 400)
            memo.put(
                memo.key(b"model", b"", TextWork(str(number))), answer + b"y", TextFacts(1, 300 + number, number / 7)
            )
            assert memo.get(key) == (b"answer", FACTS)
            assert memo.held_bytes <= 2**20
            if number % 100 == 0:
                assert tracemalloc.get_traced_memory()[0] <= 2**20
        assert tracemalloc.get_traced_memory()[0] > 0.6 * 2**20
    finally:
        tracemalloc.stop()
    assert memo.get(memo.key(b"model", b"", TextWork("0"))) is None
    memo.put(b"large", b"x" * 2**20, FACTS)
    assert memo.get(b"large") is None
    assert memo.get(key)


def test_each_process_has_its_part_of_the_bytes(entities_bundle: Path) -> None:
    bodies = [request(json.dumps({"text": text}).encode()) for text in ("rome", "rome", "oslo", "paris")]
    with serving(entities_bundle, "--processes", "2", "--memo-mib", "0.002") as server, ExitStack() as stack:
        for connection in [stack.enter_context(server.connect()) for _ in range(2)]:
            for body in bodies:
                connection.sendall(body)
                assert read_answer(connection)[0] == 200
        held = [server.metric(f'stillroom_memo_bytes{{process="{process}"}}') for process in (0, 1)]
        assert [0 < each <= 0.001 * 2**20 for each in held] == [True, True]
        hits = [server.metric(f'stillroom_memo_hits_total{{process="{process}",model="cities"}}') for process in (0, 1)]
        assert hits == [1, 1]


def test_a_key_tells_apart_texts_options_models_clients_and_processes() -> None:
    works = [TextWork("a"), TextWork("a", ""), TextWork("", "a"), TextWork("a", None, AnswerOptions(min_score=0.5))]
    memo = Memo(2**20)
    keys = [memo.key(model, client, work) for model in (b"a", b"b") for client in (b"", b"a") for work in works]
    assert len(set(keys)) == 16
    assert keys[0] == memo.key(b"a", b"", TextWork("a"))
    assert keys[0] != Memo(2**20).key(b"a", b"", TextWork("a"))
