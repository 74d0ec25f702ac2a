"""How long a client waits: its own deadline, and what becomes of work that nobody waits for."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
import psutil
import pytest
from patience import PATIENCE_S
from server_process import Server, read_answer, request, serving, until
from starlette.requests import ClientDisconnect, Request

from serve.http.connections.exchange import GONE
from serve.http.service import Service
from serve.observe.metrics import Metrics
from serve.settings import Limits
from serve.workers.supervisor import ServedModel

QUEUED = 'stillroom_queue_texts{model="cities"}'
COMPUTED = 'stillroom_batch_texts_sum{model="cities"}'


@pytest.fixture(scope="module")
def server(entities_bundle: Path) -> Iterator[Server]:
    with serving(entities_bundle) as server:
        yield server


@pytest.fixture
def stopped_worker(server: Server) -> Iterator[psutil.Process]:
    (worker,) = psutil.Process(server.process.pid).children()
    worker.suspend()
    yield worker
    worker.resume()


def ask(server: Server, text: str, **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/entities", json={"text": text}, headers=headers, timeout=PATIENCE_S)


def held_up(server: Server, threads: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """Requests that a stopped process was given, and a last one that waits for it."""
    asked = []
    before = arrived(server)
    while server.metric(QUEUED) < 1:
        asked.append(threads.submit(ask, server, "fly to rome"))
        until(lambda: arrived(server) == before + len(asked))
    return asked


def arrived(server: Server) -> float:
    """Texts that came one at a time: each was given to the process, or waits."""
    released = (
        f'stillroom_batches_released_total{{model="cities",reason="{why}"}}' for why in ("idle", "freed", "full")
    )
    return server.metric(QUEUED) + sum(server.metric(sample) for sample in released)


def test_work_whose_client_waits_no_longer_is_never_begun(server: Server, stopped_worker: psutil.Process) -> None:
    before = server.metric(COMPUTED)
    with ThreadPoolExecutor(8) as threads:
        begun = held_up(server, threads)
        late = ask(server, "oslo", **{"X-Timeout-Ms": "200"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert server.metric(QUEUED) == 1
        stopped_worker.resume()
        assert [answer.result().status_code for answer in begun] == [200] * len(begun)
    assert server.metric(COMPUTED) == before + len(begun)


@pytest.mark.parametrize(
    ("sent", "then"),
    [
        (request(b'{"text": "oslo"}'), b""),
        (request(b'{"text": "oslo"%s}' % (b" " * 90_000)), b""),
        (request(b'{"text": "oslo"}') * 3, b""),
        (request(b'{"text": "oslo"}'), request(b'{"text": "oslo"}') * 2),
        (request(b'{"text": "oslo"}'), request(b"", length=10)),
    ],
    ids=["small", "large", "with-others-ahead", "with-others-later", "with-a-head-later"],
)
def test_a_client_that_hangs_up_takes_its_work_out_of_the_queue(
    server: Server, stopped_worker: psutil.Process, sent: bytes, then: bytes
) -> None:
    gone = 'stillroom_requests_total{endpoint="/v1/entities",status="499"}'
    before, computed = server.metric(gone), server.metric(COMPUTED)
    with ThreadPoolExecutor(8) as threads:
        begun = held_up(server, threads)
        with server.connect() as client:
            client.sendall(sent)
            until(lambda: server.metric(QUEUED) == 2)
            client.sendall(then)
            time.sleep(0.2)
        until(lambda: server.metric(QUEUED) == 1)
        until(lambda: server.metric(gone) == before + 1)
        stopped_worker.resume()
        assert [answer.result().status_code for answer in begun] == [200] * len(begun)
    assert server.metric(COMPUTED) == computed + len(begun)
    assert not [line for line in server.log() if '"level": "error"' in line]


def test_a_client_s_deadline_counts_only_where_it_is_the_smaller(entities_bundle: Path) -> None:
    with serving(entities_bundle, "--answer-s", 0.3) as server:
        (worker,) = psutil.Process(server.process.pid).children()
        worker.suspend()
        try:
            late = ask(server, "rome", **{"X-Timeout-Ms": "600000"})
            assert late.status_code == 504
        finally:
            worker.resume()
    with serving(entities_bundle) as server:
        assert ask(server, "rome", **{"X-Timeout-Ms": "600000"}).status_code == 200


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "1e3", "", "1" * 30])
def test_a_deadline_that_is_no_number_of_milliseconds_is_refused(server: Server, value: str) -> None:
    refused = ask(server, "rome", **{"X-Timeout-Ms": value})
    assert refused.status_code == 422
    assert refused.json()["error"]["field"] == "X-Timeout-Ms"
    assert "whole number of milliseconds" in refused.json()["error"]["message"]


def test_a_request_whose_time_was_up_before_all_of_it_came_is_not_begun(server: Server) -> None:
    before = server.metric(COMPUTED)
    head, _, body = request(b'{"text": "oslo"}', "X-Timeout-Ms: 1").partition(b"\r\n\r\n")
    with server.connect() as client:
        client.sendall(head + b"\r\n\r\n")
        time.sleep(0.1)
        client.sendall(body)
        status, _, said = read_answer(client)
    assert (status, json.loads(said)["error"]["code"]) == (504, "deadline_exceeded")
    assert server.metric(COMPUTED) == before


def test_a_client_that_has_gone_already_costs_no_work() -> None:
    async def scenario() -> None:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone.set_result(None)

        class Model:
            @contextmanager
            def held(self) -> Iterator[None]:
                yield

            async def answers(self, works: object, context: object) -> list[bytes]:
                raise AssertionError("it is asked")

        service = Service([], Limits(), Metrics(), {})
        asked = Request({"type": "http", "headers": [], GONE: gone})
        with pytest.raises(ClientDisconnect):
            await service.answers(asked, cast(ServedModel, Model()), [])

    asyncio.run(scenario())


def test_an_answer_that_comes_as_its_client_goes_is_no_error() -> None:
    """In one turn of the loop: the answer is read, and then the end of the connection."""
    said: list[str] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: said.append(context["message"]))
        answered: asyncio.Future[list[bytes]] = loop.create_future()
        gone: asyncio.Future[None] = loop.create_future()

        class Model:
            @contextmanager
            def held(self) -> Iterator[None]:
                yield

            async def answers(self, works: object, context: object) -> list[bytes]:
                return await answered

        service = Service([], Limits(), Metrics(), {})
        request = Request({"type": "http", "headers": [], GONE: gone})
        answering = asyncio.create_task(service.answers(request, cast(ServedModel, Model()), []))
        await asyncio.sleep(0)
        answered.set_result([b"{}"])
        gone.set_result(None)
        assert await answering == [b"{}"]
        await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert said == []
