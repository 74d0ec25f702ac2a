"""How long a client waits: its own deadline, and what becomes of work that nobody waits for."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, cast

import httpx
import pytest
import uvloop
from coroutines import asynchronous
from patience import PATIENCE_S
from server_process import Server, read_answer, request, until
from starlette.requests import ClientDisconnect, Request

from serve.errors import Overloaded
from serve.http.connections.exchange import GONE
from serve.http.deadlines import Deadlines
from serve.http.service import Service
from serve.observe.metrics import Metrics
from serve.settings import Limits
from serve.workers.model_threads import in_a_thread
from serve.workers.served_model import ServedModel

QUEUED = 'stillroom_queue_texts{model="cities"}'
COMPUTED = 'stillroom_batch_texts_sum{model="cities"}'


@pytest.fixture
def let_go(server: Server) -> Iterator[Callable[[], None]]:
    """Lets the model go on, which stands still."""
    with server.held() as let_go:
        yield let_go


def ask(server: Server, text: str, **headers: str) -> httpx.Response:
    return server.post("/v1/entities", json={"text": text}, headers=headers)


def held_up(server: Server, threads: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """Requests that a model which stands still was given, and a last one that waits for it."""
    asked = []
    before = arrived(server)
    while server.metric(QUEUED) < 1:
        asked.append(threads.submit(ask, server, "fly to rome"))
        until(lambda: arrived(server) == before + len(asked))
    return asked


def arrived(server: Server) -> float:
    """Texts that came one at a time: each was given to the model, or waits."""
    released = (
        f'stillroom_batches_released_total{{model="cities",reason="{why}"}}' for why in ("idle", "freed", "full")
    )
    return server.metric(QUEUED) + sum(server.metric(sample) for sample in released)


def test_work_whose_client_waits_no_longer_is_never_begun(server: Server, let_go: Callable[[], None]) -> None:
    before = server.metric(COMPUTED)
    with ThreadPoolExecutor(8) as threads:
        begun = held_up(server, threads)
        late = ask(server, "oslo", **{"X-Timeout-Ms": "200"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert server.metric(QUEUED) == 1
        let_go()
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
def test_a_client_that_hangs_up_leaves_no_work(
    server: Server, let_go: Callable[[], None], sent: bytes, then: bytes
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
        let_go()
        assert [answer.result().status_code for answer in begun] == [200] * len(begun)
    assert server.metric(COMPUTED) == computed + len(begun)
    assert not [line for line in server.log() if '"level": "error"' in line]


def test_a_deadline_that_is_no_number_of_milliseconds_is_refused(server: Server) -> None:
    for value in ("0", "-1", "1.5", "soon", "1e3", "", "1" * 30):
        refused = ask(server, "rome", **{"X-Timeout-Ms": value})
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, "X-Timeout-Ms"), value


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


class Holding:
    """A model that nobody stops."""

    def retain(self) -> None: ...

    def release(self) -> None: ...


@asynchronous
async def test_a_wait_ends_at_its_own_time_whatever_was_waited_for_before_it() -> None:
    loop = asyncio.get_running_loop()
    deadlines = Deadlines()
    ended_s: dict[float, float] = {}
    began_s = loop.time()

    async def wait(allowed_s: float, *, removed: bool = False) -> None:
        future: asyncio.Future[None] = loop.create_future()
        tick = deadlines.add(future, allowed_s)
        if removed:
            deadlines.remove(future, tick)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(future), None if not removed else 0.2)
        if not removed:
            ended_s[allowed_s] = loop.time() - began_s
        assert future.done() != removed

    # The timer is set for the first, again for an earlier one, and again for those that are left; two share a tick.
    allowed = (0.12, 0.03, 0.06, 0.0601, -1.0)
    await asyncio.gather(*map(wait, allowed), wait(0.01, removed=True))
    assert all(ended_s[each] - max(0.0, each) >= 0 for each in allowed)
    assert sorted((0.12, 0.03, 0.06, -1.0), key=ended_s.__getitem__) == [-1.0, 0.03, 0.06, 0.12]
    assert not deadlines._waits
    assert deadlines._timer is None


def test_a_timer_that_fires_a_little_early_is_not_set_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of uvloop has whole milliseconds, and divides badly by ticks of five."""
    fired = 0
    real = Deadlines._fire

    def counted(deadlines: Deadlines, loop: asyncio.AbstractEventLoop) -> None:
        nonlocal fired
        fired += 1
        real(deadlines, loop)

    async def scenario() -> None:
        deadlines = Deadlines()
        for number in range(60):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            deadlines.add(future, 0.001 + number % 7 / 1000)
            with pytest.raises(TimeoutError):
                await future

    monkeypatch.setattr(Deadlines, "_fire", counted)
    uvloop.run(scenario())
    assert fired == 60


def answering(model: Holding, gone_first: bool) -> tuple[asyncio.Task[list[Any]], asyncio.Future[None]]:
    """A client that has gone already, or goes when the future is done; and the answer to it, under way."""
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if gone_first:
        gone.set_result(None)
    asked = Request({"type": "http", "headers": [], GONE: gone})
    service = Service([], Limits(), Metrics(), {})
    return asyncio.create_task(service.answers(asked, cast(ServedModel, model), [])), gone


def unread_errors(scenario: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """What the loop says of errors that nobody reads."""
    said: list[str] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
        await scenario()
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(run())
    return said


@pytest.mark.parametrize("gone_first", [True, False])
def test_a_refusal_as_a_client_goes_leaves_no_error_that_nobody_reads(gone_first: bool) -> None:
    async def scenario() -> None:
        class Model(Holding):
            async def answers(self, works: object, context: object, wait: asyncio.Future[None]) -> list[bytes]:
                assert not gone_first, "a client that has gone costs no work"
                gone.set_result(None)
                raise Overloaded("full", retry_after_s=1)

        answer, gone = answering(Model(), gone_first)
        with pytest.raises(ClientDisconnect if gone_first else Overloaded):
            await answer

    assert unread_errors(scenario) == []


def test_an_answer_that_comes_as_its_client_goes_is_no_error() -> None:
    """In one turn of the loop: the answer is read, and then the end of the connection."""

    async def scenario() -> None:
        waits: list[asyncio.Future[None]] = []

        class Model(Holding):
            async def answers(self, works: object, context: object, wait: asyncio.Future[None]) -> list[bytes]:
                waits.append(wait)
                await wait
                return [b"{}"]

        answer, gone = answering(Model(), gone_first=False)
        await asyncio.sleep(0)
        waits[0].set_result(None)
        gone.set_result(None)
        assert await answer == [b"{}"]

    assert unread_errors(scenario) == []


def test_a_time_out_within_a_call_is_told_as_its_own_and_not_as_the_limit() -> None:
    def refused() -> None:
        raise TimeoutError(110, "Connection timed out")

    with pytest.raises(TimeoutError, match="Connection timed out"):
        asyncio.run(in_a_thread(refused, PATIENCE_S))
    ends = threading.Event()
    with pytest.raises(TimeoutError, match=r"it took longer than 0\.01 s"):
        asyncio.run(in_a_thread(partial(ends.wait, PATIENCE_S), 0.01))
    ends.set()
