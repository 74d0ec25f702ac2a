"""What the app does when the model is slow, full or failing."""

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from coroutines import asynchronous
from lookup_bundles import write_manifest
from patience import PATIENCE_S
from starlette.applications import Starlette

from serve.errors import BadInput
from serve.http.app import create_app
from serve.model.session import Session
from serve.settings import Limits, ServeSettings
from serve.workers import served_model
from serve.workers.batcher import _Caller


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """Within it no model gets on."""
    goes_on, run = threading.Event(), Session.run

    def run_later(session: Session, rows: Sequence[Any]) -> list[Any]:
        assert goes_on.wait(PATIENCE_S)
        return run(session, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "run", run_later)
        try:
            yield
        finally:
            goes_on.set()


@contextlib.asynccontextmanager
async def client_of(app: Starlette, *, ready: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=PATIENCE_S) as client:
            while ready and (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)
            yield client


def asking(app: Starlette, scenario: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with client_of(app) as client:
            await scenario(client)

    asyncio.run(run())


async def until(client: httpx.AsyncClient, line: str) -> None:
    """Waits until the metrics say so."""
    async with asyncio.timeout(PATIENCE_S):
        while line not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)


@asynchronous
async def test_a_second_long_text_is_told_when_to_come_again_and_a_short_one_is_answered(entities_bundle: Path) -> None:
    app = create_app([entities_bundle])
    with pytest.MonkeyPatch.context() as one_core:
        one_core.setattr(served_model, "MOST_AT_ONCE", 1)
        await _refused_behind_a_long_text(app)


async def _refused_behind_a_long_text(app: Starlette) -> None:
    async with client_of(app) as client:
        run = Session.run

        def slow_for_whole_rows(session: Session, rows: Sequence[Any]) -> list[Any]:
            if len(rows[0]) > 16:
                time.sleep(0.02)
            return run(session, rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "run", slow_for_whole_rows)
            long = asyncio.create_task(client.post("/v1/entities", json={"text": "rome " * 19_800}))
            await until(client, 'stillroom_batches_released_total{model="cities",reason="idle"} 1.0')
            assert (await client.post("/v1/entities", json={"text": "oslo"})).status_code == 200
            await asyncio.sleep(0.1)  # it is known to take longer than anybody waits
            refused = await client.post("/v1/entities", json={"text": "rome " * 19_800})
            assert refused.status_code == 429
            assert "busy with long texts" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
            assert not long.done()
        assert (await long).status_code == 200


@asynchronous
async def test_an_answer_that_takes_too_long_is_504_and_what_was_not_begun_is_dropped(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.workers.served_model.available_cores", lambda: 1)  # one batch at a time
    async with client_of(create_app([entities_bundle], ServeSettings(limits=Limits(answer_s=1.5)))) as client:
        with stopped():
            longer = {"X-Timeout-Ms": "600000"}  # a client's own time counts only where it is the shorter
            first = asyncio.create_task(client.post("/v1/entities", json={"text": "rome"}, headers=longer))
            await until(client, 'stillroom_batches_released_total{model="cities",reason="idle"} 1.0')
            queued = asyncio.create_task(client.post("/v1/entities", json={"text": ["a", "b", "rome"]}))
            for late in (await first, await queued):
                assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert (await client.post("/v1/entities", json={"text": "oslo"})).status_code == 200
        # The three that waited were never computed; the one that was given to the model before may have been.
        computed = 'stillroom_batch_texts_sum{model="cities"} '
        (texts,) = (line for line in (await client.get("/metrics")).text.splitlines() if line.startswith(computed))
        assert float(texts.removeprefix(computed)) in (1, 2)


@asynchronous
async def test_what_goes_wrong_inside_stays_inside(broken_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(create_app([broken_bundle])) as client:
        failed = await client.post("/v1/entities", json={"text": "refund"}, headers={"X-Request-Id": "r-1"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal")
        assert "finite" not in failed.text
        assert "r-1" in failed.text
        assert (await client.post("/v1/entities", json={"text": "rome"})).status_code == 200
    assert "not finite numbers" in caplog.text
    assert "r-1" in caplog.text


@asynchronous
async def test_the_server_is_ready_only_once_its_models_have_run(entities_bundle: Path) -> None:
    app = create_app([entities_bundle])
    async with client_of(app, ready=False) as client:
        cold = await client.get("/readyz")
        assert (cold.status_code, cold.json()["error"]["code"]) == (503, "unavailable")
        assert (await client.get("/healthz")).status_code == 200
        # What comes before waits for it.
        assert (await client.post("/v1/entities", json={"text": "rome"})).status_code == 200
        while (await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("broken_off", [False, True])
def test_the_models_threads_end_with_the_server_or_its_failure(entities_bundle: Path, broken_off: bool) -> None:
    def model_threads() -> int:
        return sum(thread.name == "model" for thread in threading.enumerate())

    async def scenario(client: httpx.AsyncClient) -> None:
        assert model_threads() >= 2  # of short texts, and of long ones
        if broken_off:
            raise KeyError("what it stands in")

    with pytest.raises(KeyError) if broken_off else contextlib.nullcontext():
        asking(create_app([entities_bundle]), scenario)
    assert model_threads() == 0


@asynchronous
async def test_a_model_that_cannot_be_started_is_not_ready_and_refuses_while_others_answer(
    intents_bundle: Path, bundle_copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app([bundle_copy, intents_bundle])
    (bundle_copy / "onnx" / "model.onnx").write_bytes(b"broken")  # after it was checked
    async with client_of(app, ready=False) as client, asyncio.timeout(PATIENCE_S):
        while (await client.get("/v2/models/intents/ready")).status_code != 200:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/classify", json={"text": "refund"})).status_code == 200
        refused = await client.post("/v1/entities", json={"text": "rome"})
        assert (refused.status_code, "'cities'" in refused.json()["error"]["message"]) == (503, True)
        for path in ("/readyz", "/v2/health/ready", "/v2/models/cities/ready"):
            assert (await client.get(path)).status_code == 503, path
    assert "'cities' cannot be served" in caplog.text
    assert "does not open" in caplog.text


def test_a_reload_serves_the_new_bundle_and_drops_no_request(bundle_copy: Path) -> None:
    app = create_app([bundle_copy])
    listed = json.loads((bundle_copy / "manifest.json").read_text())["files"]

    async def digest(client: httpx.AsyncClient) -> str:
        return str((await client.get("/v1/models")).json()["models"][0]["digest"])

    async def scenario(client: httpx.AsyncClient) -> None:
        threads = sum(thread.name == "model" for thread in threading.enumerate())
        replaced = weakref.ref(app.state.service.models["cities"])
        before = await digest(client)
        write_manifest(bundle_copy, max_length=31)
        statuses: list[int] = []

        async def keep_asking() -> None:
            while await digest(client) == before or len(statuses) < 100:
                statuses.append((await client.post("/v1/entities", json={"text": "rome"})).status_code)

        asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*asking)
        assert set(statuses) == {200}
        assert (await client.get("/v1/models")).json()["models"][0]["max_length"] == 31
        async with asyncio.timeout(PATIENCE_S):
            while sum(thread.name == "model" for thread in threading.enumerate()) > threads:  # the old one's are gone
                await asyncio.sleep(0.01)
            while replaced() is not None:  # and its memory
                await asyncio.sleep(0.01)

        # What is no bundle is not taken.
        write_manifest(bundle_copy, files={**listed, "a\0.json": {"sha256": "", "bytes": 0}})
        await reload_fails(client, 1)
        (bundle_copy / "onnx" / "model.onnx").write_bytes(b"broken")
        await reload_fails(client, 2)

    async def reload_fails(client: httpx.AsyncClient, times: int) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await until(client, f'stillroom_reloads_total{{model="cities",result="failed"}} {times}.0')
        answered = await client.post("/v1/entities", json={"text": "rome"})
        assert (answered.status_code, answered.json()["model"]) == (200, "cities")

    asking(app, scenario)


@asynchronous
async def test_a_model_answers_to_its_aliases_and_names_them(entities_bundle: Path) -> None:
    async with client_of(create_app([entities_bundle], ServeSettings(alias=("prod=cities", "live=cities")))) as client:
        answered = await client.post("/v1/entities", json={"text": "rome", "model": "prod"})
        assert answered.json()["model"] == "cities"
        unknown = await client.post("/v1/entities", json={"text": "rome", "model": "dev"})
        assert unknown.status_code == 404
        assert "'prod'" in unknown.json()["error"]["message"]
        assert (await client.get("/v2/models/prod")).json()["name"] == "cities"
        (described,) = (await client.get("/v1/models")).json()["models"]
        assert described["aliases"] == ["prod", "live"]
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
        assert schemas["EntitiesRequest"]["properties"]["model"]["examples"] == ["cities", "prod", "live"]
        assert schemas["ModelDescription"]["properties"]["aliases"] == {"type": "array", "items": {"type": "string"}}
        assert "aliases" in schemas["ModelDescription"]["required"]
    with pytest.raises(BadInput, match="alias 'prod' for 'towns': the bundles are 'cities'"):
        create_app([entities_bundle], ServeSettings(alias=("prod=towns",)))


@asynchronous
async def test_an_input_that_the_model_does_not_have_is_refused(bundle_copy: Path) -> None:
    write_manifest(bundle_copy, inputs=["input_ids", "attention_mask"])
    about = {"datatype": "INT64", "shape": [1, 2], "data": [[1, 1]]}
    async with client_of(create_app([bundle_copy])) as client:
        for inputs, status in (("input_ids",), 200), (("input_ids", "token_type_ids"), 422):
            asked = {"inputs": [{"name": name, **about} for name in inputs]}
            answered = await client.post("/v2/models/cities/infer", json=asked)
            assert answered.status_code == status, answered.text
        assert "token_type_ids" in answered.text


def test_a_server_needs_at_least_one_bundle() -> None:
    with pytest.raises(BadInput, match="no bundle was given"):
        create_app([])


def test_a_request_that_fails_in_the_model_leaves_nothing_behind(intents_bundle: Path) -> None:
    """Nothing that waits for the collector of cycles, that is: until it comes, nobody counts what is held."""
    app = create_app([intents_bundle])

    async def scenario(client: httpx.AsyncClient) -> None:
        # There is no threshold for the first: it is the process that refuses it.
        for status, body in ((422, {"text": "hi", "abstain": True}), (200, {"text": "hi"})):
            gc.collect()
            for _ in range(10):
                answer = await client.post("/v1/classify", json=body)
                assert answer.status_code == status
                assert answer.headers["server-timing"]  # it came as far as the model
            assert sum(type(each) is _Caller for each in gc.get_objects()) <= 1, body

    gc.disable()
    try:
        asking(app, scenario)
    finally:
        gc.enable()


def test_what_is_answered_past_the_routes_is_answered_as_by_them(entities_bundle: Path, intents_bundle: Path) -> None:
    """Status, headers, body and counts of good and bad requests; an app that has only its routes is the reference."""
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/v1/entities", {"json": {"text": ["fly to rome", "x"]}}),
        ("POST", "/v1/entities?a=b", {"json": {"text": "rome", "model": "cities"}}),
        ("POST", "/v1/entities/", {"json": {"text": "rome"}}),
        ("POST", "/v1/%65ntities", {"json": {"text": "rome"}}),
        ("POST", "/v1/classify", {"json": {"text": "refund please", "top_k": 1}}),
        ("POST", "/v1/classify", {"json": {"text": "refund", "abstain": True}}),
        ("POST", "/v1/classify", {"json": {"text": "refund", "model": "cities"}}),
        ("POST", "/v1/relations", {"json": {"text": "a b", "head": {"start": 0, "end": 1}, "tail": {"start": 2, "end": 3}}}),
        ("POST", "/v1/entities", {"json": {"text": ["a"] * 9}}),
        ("POST", "/v1/entities", {"json": {"text": 1}}),
        ("POST", "/v1/entities", {"json": {"text": "", "model": "nobody"}}),
        ("POST", "/v1/entities", {"content": b"{", "headers": {"content-type": "application/json"}}),
        ("POST", "/v1/entities", {"content": b"{}"}),
        ("POST", "/v1/entities", {"json": {"text": "rome"}, "headers": {"content-encoding": "gzip"}}),
        ("POST", "/v1/entities", {"json": {"text": "rome"}, "headers": {"x-timeout-ms": "no"}}),
        ("POST", "/v1/entities", {"json": {"text": "rome"}, "headers": {"x-request-id": "mine"}}),
        ("POST", "/v1/entities", {"json": {"text": "x" * 2_000_000}}),
        ("GET", "/v1/entities", {}),
        ("HEAD", "/v1/entities", {}),
        ("OPTIONS", "/v1/entities", {}),
        ("PUT", "/v1/entities", {"json": {"text": "rome"}}),
        ("POST", "/v1/nothing", {"json": {"text": "rome"}}),
    ]  # fmt: skip

    def told(*, past_the_routes: bool) -> tuple[list[object], list[str]]:
        app = create_app([entities_bundle, intents_bundle], ServeSettings(limits=Limits(texts=8)))
        (middleware,) = app.user_middleware
        assert middleware.kwargs["direct"]
        if not past_the_routes:
            middleware.kwargs["direct"] = {}
        answers: list[object] = []
        counts: list[str] = []

        async def scenario(client: httpx.AsyncClient) -> None:
            for method, path, what in asked:
                answer = await client.request(method, path, **what)
                headers = {
                    name: [part.split(";")[0] for part in value.split(", ")] if name == "server-timing" else value
                    for name, value in answer.headers.items()
                    if name != "x-request-id" or value == "mine"
                }
                answers.append((method, path, answer.status_code, headers, answer.content))
            counted = re.compile(r"stillroom_(requests|errors)_total.*/v1/|stillroom_request_seconds_count.*/v1/")
            counts.extend(filter(counted.match, (await client.get("/metrics")).text.splitlines()))

        asking(app, scenario)
        return answers, sorted(counts)

    direct, routed = told(past_the_routes=True), told(past_the_routes=False)
    assert direct[0] == routed[0]
    assert direct[1] == routed[1]
    assert {status for _, _, status, *_ in direct[0]} >= {200, 400, 404, 405, 413, 415, 422}  # type: ignore[misc]


def test_an_answer_over_the_limit_is_refused_before_the_work_with_what_makes_it_smaller(
    intents_bundle: Path, vectors_bundle: Path, entities_bundle: Path
) -> None:
    settings = ServeSettings(limits=Limits(answer_bytes=600))
    app = create_app([intents_bundle, vectors_bundle, entities_bundle], settings)
    tokens = {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 16], "data": [2] * 16}]}
    cases = (
        ("/v1/classify", {"text": ["fly"] * 5}, {"top_k": 1}, "top_k"),
        ("/v1/embeddings", {"input": ["fly"] * 6}, {"dimensions": 2}, "dimensions"),
        (
            "/v2/models/cities/infer",
            tokens,
            {"inputs": [tokens["inputs"][0] | {"shape": [1, 6], "data": [2] * 6}]},
            None,
        ),
        ("/v2/models/cities/infer", tokens, {"parameters": {"binary_data_output": True}}, None),
        ("/v1/entities", {"text": "rome " * 20}, {"text": "rome"}, None),
    )

    async def scenario(client: httpx.AsyncClient) -> None:
        for path, body, smaller, field in cases:
            refused = await client.post(path, json=body)
            assert refused.status_code == 422, path
            error = refused.json().get("error")
            message = error if isinstance(error, str) else error["message"]
            assert "this server answers with 600 at most" in message
            assert (f"give a smaller {field}" in message) is (field is not None)
            assert (await client.post(path, json=body | smaller)).status_code == 200, path

    asking(app, scenario)
