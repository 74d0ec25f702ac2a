"""What the app does when the model is slow, full or failing: the real session, held up for a while."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from tokenizers import Encoding

from serve.app import create_app
from serve.errors import BadInput
from serve.requests import Limits
from serve.session import Session


class Gate:
    """Holds up the model while shut; `reached` once somebody stands before it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.batches: list[int] = []

    def shut(self) -> None:
        self.reached.clear()
        self.open.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    run = Session.run

    def held(self: Session, encodings: Sequence[Encoding]) -> list[np.ndarray]:
        gate.reached.set()
        assert gate.open.wait(timeout=20)
        gate.batches.append(len(encodings))
        return run(self, encodings)

    monkeypatch.setattr(Session, "run", held)
    yield gate
    gate.open.set()


def asking(app: Starlette, scenario: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=20) as client:
            await scenario(client)

    asyncio.run(run())


def test_a_full_queue_answers_429_and_says_when_to_come_again(entities_bundle: Path, gate: Gate) -> None:
    app = create_app([entities_bundle], threads=1, limits=Limits(queued_texts=2))
    gate.shut()

    async def scenario(client: httpx.AsyncClient) -> None:
        running = asyncio.create_task(client.post("/v1/entities", json={"text": "rome"}))
        await asyncio.to_thread(gate.reached.wait, 10)
        waiting = asyncio.create_task(client.post("/v1/entities", json={"text": ["a", "b"]}))
        while 'stillroom_queue_texts{model="cities"} 2.0' not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        refused = await client.post("/v1/entities", json={"text": "oslo"})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        # It was refused before it cost anything: only the other two were tokenised.
        tokenised = 'stillroom_stage_seconds_count{model="cities",stage="tokenise"} 2.0'
        assert tokenised in (await client.get("/metrics")).text
        gate.open.set()
        assert (await running).status_code == (await waiting).status_code == 200

    asking(app, scenario)


def test_an_answer_that_takes_too_long_is_504(entities_bundle: Path, gate: Gate) -> None:
    app = create_app([entities_bundle], threads=1, limits=Limits(answer_s=0.05))
    gate.shut()

    async def scenario(client: httpx.AsyncClient) -> None:
        late = await client.post("/v1/entities", json={"text": "rome"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        gate.open.set()

    asking(app, scenario)


def test_a_client_that_hangs_up_takes_its_texts_with_it(entities_bundle: Path, gate: Gate) -> None:
    app = create_app([entities_bundle], threads=1)
    gate.shut()
    gate.batches.clear()

    async def hang_up_after_the_body(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/v1/entities", json={"text": "rome"}))
        await asyncio.to_thread(gate.reached.wait, 10)

        messages = iter([{"type": "http.request", "body": b'{"text": ["a", "b"]}', "more_body": False}])
        queued = asyncio.Event()

        async def receive() -> dict[str, object]:
            if message := next(messages, None):
                return message
            await queued.wait()
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            raise AssertionError("nobody is there to be answered")

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/entities",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        gone = asyncio.create_task(app(scope, receive, send))
        while 'stillroom_queue_texts{model="cities"} 2.0' not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        queued.set()
        await gone
        gate.open.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/entities", json={"text": "oslo"})).status_code == 200
        assert 'endpoint="/v1/entities",status="499"} 1.0' in (await client.get("/metrics")).text

    asking(app, hang_up_after_the_body)
    assert gate.batches == [1, 1]


def test_what_goes_wrong_inside_stays_inside(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Session.run

    def fail_at_four_tokens(self: Session, encodings: Sequence[Encoding]) -> list[np.ndarray]:
        if len(encodings[0]) == 4:
            raise RuntimeError("a secret path")
        return run(self, encodings)

    monkeypatch.setattr(Session, "run", fail_at_four_tokens)
    app = create_app([entities_bundle], threads=1)

    async def scenario(client: httpx.AsyncClient) -> None:
        failed = await client.post("/v1/entities", json={"text": "fly rome"}, headers={"X-Request-Id": "r-1"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal")
        assert "secret" not in failed.text
        assert "r-1" in failed.text

    asking(app, scenario)
    assert "a secret path" in caplog.text
    assert "r-1" in caplog.text


def test_the_server_is_ready_only_once_its_models_have_run(entities_bundle: Path, gate: Gate) -> None:
    app = create_app([entities_bundle], threads=1)
    gate.shut()

    async def scenario(client: httpx.AsyncClient) -> None:
        assert (await client.get("/readyz")).status_code == 503
        async with app.router.lifespan_context(app):
            await asyncio.to_thread(gate.reached.wait, 10)
            cold = await client.get("/readyz")
            assert (cold.status_code, cold.json()["error"]["code"]) == (503, "unavailable")
            assert (await client.get("/healthz")).status_code == 200
            gate.open.set()
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)

    asking(app, scenario)


def test_the_models_threads_end_with_the_server(entities_bundle: Path) -> None:
    app = create_app([entities_bundle], threads=1)
    before = set(threading.enumerate())

    def model_threads() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("model")]

    async def scenario(client: httpx.AsyncClient) -> None:
        async with app.router.lifespan_context(app):
            await client.post("/v1/entities", json={"text": "rome"})
            assert len(model_threads()) == 1
        assert model_threads() == []

    asking(app, scenario)


def test_long_and_many_texts_are_prepared_beside_the_loop_with_the_same_answers(entities_bundle: Path) -> None:
    app = create_app([entities_bundle], threads=1)
    texts = [f"{'please ' * (index % 9)}rome" for index in range(300)]

    async def scenario(client: httpx.AsyncClient) -> None:
        many = (await client.post("/v1/entities", json={"text": texts})).json()["results"]
        one = (await client.post("/v1/entities", json={"text": "rome"})).json()["results"]
        assert many[0] == one[0]
        assert [result["entities"][0]["text"] for result in many] == ["rome"] * 300

    asking(app, scenario)


def test_a_server_needs_at_least_one_bundle() -> None:
    with pytest.raises(BadInput, match="no bundle was given"):
        create_app([])
