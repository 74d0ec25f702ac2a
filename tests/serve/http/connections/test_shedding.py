"""What a server does with more than it can: it refuses as requests arrive, and goes on answering what it has."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import httpx
import pytest
from patience import PATIENCE_S
from server_process import Server, closed, read_answer, request, serving, until

from serve.http.connections import limits
from serve.http.connections.limits import BEHIND_S, Watch
from serve.http.connections.protocol import Connection
from serve.observe.metrics import Metrics
from serve.settings import ConnectionLimits
from serve.workers.served_model import MOST_AT_ONCE

ENTITIES = "/v1/entities"
PAGES = "https://app.example"


@pytest.fixture(scope="module")
def full(entities_bundle: Path) -> Iterator[Server]:
    """A server whose one text waits behind a model that does not get on, and has room for no other. It has again at the end."""
    given, waiting = (
        'stillroom_batches_released_total{model="cities",reason="idle"}',
        'stillroom_queue_texts{model="cities"}',
    )
    with (
        serving(entities_bundle, "--queued-texts", 1, "--allow-origin", PAGES) as server,
        ThreadPoolExecutor(MOST_AT_ONCE + 1) as threads,
    ):
        with server.held():
            held = [threads.submit(server.post, ENTITIES, json={"text": "rome"})]
            until(lambda: server.metric(given) == 1)
            while server.metric(waiting) == 0:  # one is given for each core
                held.append(threads.submit(server.post, ENTITIES, json={"text": "oslo"}))
                until(lambda: server.metric(given) + server.metric(waiting) == len(held))
            yield server
            assert server.post(ENTITIES, json={"text": "paris"}).status_code == 429
        # What was accepted is answered, and there is room again.
        assert {each.result().status_code for each in held} == {200}
        until(lambda: server.post(ENTITIES, json={"text": "paris"}).status_code == 200)


def test_a_full_server_refuses_unread_and_still_says_how_it_is(full: Server) -> None:
    shed = 'stillroom_shed_requests_total{reason="full"}'
    before = full.metric(shed)
    with httpx.Client(base_url=full.url, timeout=PATIENCE_S) as client:
        for number in range(3):
            refused = client.post(ENTITIES, json={"text": "paris"}, headers={"X-Request-Id": f"mine-{number}"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["x-request-id"] == f"mine-{number}"
        assert "connection" not in refused.headers
        assert full.metric(shed) == before + 3
        # In the form of the protocol that was asked.
        assert isinstance(client.post("/v2/models/cities/infer", json={}).json()["error"], str)
        assert client.get("/readyz").status_code == client.get("/v1/models").status_code == 200


def test_a_client_that_wants_the_connection_closed_has_it_closed(full: Server) -> None:
    with full.connect() as client:
        client.sendall(request(b'{"text": "paris"}', "Connection: close"))
        status, headers, _ = read_answer(client)
        assert (status, headers["connection"]) == (429, "close")
        assert closed(client)


def test_a_client_that_asks_first_is_told_without_its_body(full: Server) -> None:
    with full.connect() as client:
        client.sendall(request(b"", "Expect: 100-continue", length=17))
        assert read_answer(client)[0] == 429
        assert closed(client)


def test_a_refused_body_that_turns_out_to_be_none_is_refused_all_the_same(full: Server) -> None:
    with full.connect() as client:
        client.sendall(b"POST /v1/entities HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.sendall(b"no size\r\n")
        status, _, body = read_answer(client)
        assert (status, json.loads(body)["error"]["code"]) == (429, "overloaded")
        assert closed(client)


def test_a_page_that_may_ask_is_told_that_it_is_refused(full: Server) -> None:
    refused, other = (
        full.post(ENTITIES, json={"text": "paris"}, headers={"Origin": origin})
        for origin in (PAGES, "https://evil.example")
    )
    assert refused.status_code == other.status_code == 429
    assert refused.headers["access-control-allow-origin"] == PAGES
    assert "retry-after" in refused.headers["access-control-expose-headers"]
    assert refused.headers["vary"] == other.headers["vary"] == "origin"
    assert "access-control-allow-origin" not in other.headers


def test_a_process_that_comes_late_refuses_work_until_it_is_in_time_again() -> None:
    async def scenario() -> None:
        metrics = Metrics()
        watch = Watch(ConnectionLimits(), metrics)
        feeling = asyncio.create_task(watch.measure_loop_lag())
        await asyncio.sleep(0)  # it begins
        time.sleep(2 * BEHIND_S)  # one delay: a pause of the machine, say
        for _ in range(3):
            assert watch.refusal() is None
            await asyncio.sleep(0.001)
        while (refusal := watch.refusal()) is None:
            time.sleep(2 * BEHIND_S)  # what a process does that has more to read than time
            await asyncio.sleep(0)
        assert refusal.retry_after_s == 1.0
        assert metrics.registry.get_sample_value("stillroom_shed_requests_total", {"reason": "behind"}) == 1
        while watch.refusal() is not None:
            await asyncio.sleep(0.001)
        feeling.cancel()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_server_that_is_behind_refuses_work_unread_and_still_says_how_it_is(entities_bundle: Path) -> None:
    with serving(
        entities_bundle, constants={"serve.http.connections.limits.BEHIND_S": -1.0}
    ) as server:  # later than that it always is
        for _ in range(2):
            refused = server.post(ENTITIES, json={"text": "paris"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert refused.headers["retry-after"] == "1"
        assert server.metric('stillroom_shed_requests_total{reason="behind"}') == 2
        assert server.metric('stillroom_shed_requests_total{reason="full"}') == 0
        assert server.get("/readyz").status_code == server.get("/v1/models").status_code == 200


class Reading:
    """A connection whose client keeps up, with this many unsent bytes."""

    def __init__(self, unsent_bytes: int) -> None:
        self.unsent_bytes, self.cut = unsent_bytes, False

    def check_timeouts(self, now_s: float) -> None:
        pass

    def keeps_up(self, now_s: float) -> bool:
        return True

    def abort(self, reason: str) -> None:
        self.cut, self.unsent_bytes = True, 0


def watched(*unsent_bytes: int) -> tuple[Watch, list[Reading]]:
    """A watch with the limit of 100 unsent bytes, after it has checked such connections once."""
    watch, readers = Watch(ConnectionLimits(unsent_bytes=100), Metrics()), [Reading(each) for each in unsent_bytes]
    watch.connections.update(cast(list[Connection], readers))

    async def scenario() -> None:
        checking = asyncio.create_task(watch.close_late())
        for _ in range(3):
            await asyncio.sleep(0)
        checking.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "CHECK_S", 0)
        asyncio.run(scenario())
    return watch, readers


def test_only_a_connection_that_holds_much_is_refused_for_unread_answers_and_only_as_long_as_they_are_unread() -> None:
    watch, readers = watched(80, 30, 0)
    large, small, new = cast(list[Connection], readers)
    assert watch.refusal(small) is watch.refusal(new) is None
    assert watch.refusal(large) is not None
    readers[0].unsent_bytes = 70  # since the last check
    assert watch.refusal(large) is None


@pytest.mark.parametrize(
    ("unsent_bytes", "cut"),
    [((100, 90), []), ((80, 70, 60), [80]), ((300,), []), ((300, 1), [300])],
    ids=["within twice the limit", "most", "alone", "not alone"],
)
def test_clients_that_keep_up_are_cut_off_above_twice_the_limit(unsent_bytes: tuple[int, ...], cut: list[int]) -> None:
    readers = watched(*unsent_bytes)[1]
    assert [size for size, each in zip(unsent_bytes, readers, strict=True) if each.cut] == cut


def test_the_watch_outlives_an_error_of_a_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[float] = []

    class Failing:
        unsent_bytes = 0

        def check_timeouts(self, now_s: float) -> None:
            looks.append(now_s)
            raise ValueError("unforeseen")

    async def scenario() -> None:
        watch = Watch(ConnectionLimits(), Metrics())
        watch.connections.add(cast(Connection, Failing()))
        watching = asyncio.create_task(watch.close_late())
        async with asyncio.timeout(PATIENCE_S):
            while len(looks) < 3:
                await asyncio.sleep(0.001)
        watching.cancel()

    monkeypatch.setattr(limits, "CHECK_S", 0.001)
    asyncio.run(scenario())
    assert "unforeseen" in caplog.text
