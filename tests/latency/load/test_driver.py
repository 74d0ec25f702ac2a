"""Whole requests in an open and in a closed loop, with their answers, on real servers over loopback."""

import asyncio
import socket
import sys
from typing import Any

import numpy as np
import pytest
from loopback import PAUSE, Asked, Handler, answer, serving

from latency.load import http_client
from latency.load.driver import TIMEOUT, Driven, drive
from latency.load.http_client import target_of
from serve.errors import BadInput


def driven(handler: Handler, count: int, connections: int, timeout_s: float = 10.0) -> tuple[Driven, int]:
    """What became of `count` numbered requests in a closed loop, and how many connections were open at the most."""
    with serving(handler) as server:
        target = target_of(server.url)
        requests = [target.request(b"%d" % number) for number in range(count)]
        found = drive(target, requests, connections=connections, timeout_s=timeout_s, keep_bodies=True)
        return found, server.most_connections


def sent(handler: Handler, count: int, **how: Any) -> Driven:
    """What became of `count` equal requests."""
    with serving(handler) as server:
        target = target_of(server.url)
        return drive(target, [target.request(b"1")] * count, **how)


async def echo(asked: Asked) -> bytes:
    return answer(200 if int(asked.body) % 3 else 404, b"you sent " + asked.body)


def test_every_answer_is_kept_with_the_request_that_it_is_of() -> None:
    found, most = driven(echo, 50, connections=4)
    assert found.bodies == [b"you sent %d" % number for number in range(50)]
    assert found.became == [200 if number % 3 else 404 for number in range(50)]
    assert found.having(200) == len(found.latencies_ms) == 33
    assert 1 <= most <= 4


def test_in_a_closed_loop_a_connection_sends_the_next_request_when_it_has_its_answer() -> None:
    under_way = most_under_way = 0

    async def handler(asked: Asked) -> bytes:
        nonlocal under_way, most_under_way
        under_way += 1
        most_under_way = max(under_way, most_under_way)
        await asyncio.sleep(0.002)
        under_way -= 1
        return answer()

    found, most = driven(handler, 60, connections=3)
    assert (most, most_under_way) == (3, 3)
    assert found.connections == 3
    assert found.waited == 0
    np.testing.assert_allclose(found.due_s, found.sent_s, atol=1e-3)
    alone, _ = driven(handler, 10, connections=1)
    assert (alone.sent_s[1:] >= alone.ended_s[:-1]).all()


def test_in_a_closed_loop_what_is_lost_or_late_is_told_and_the_rest_goes_on() -> None:
    async def handler(asked: Asked) -> bytes | None:
        if asked.body == b"5":
            return None
        if asked.body == b"11":
            await asyncio.sleep(600)
        return answer()

    found, _ = driven(handler, 30, connections=2, timeout_s=2.0)  # the others may come late on a busy machine
    assert found.became[11] == TIMEOUT
    assert found.became[5] == "closed without an answer"
    assert found.having(200) == 28


def test_moments_of_an_open_loop_count_from_the_start_and_bodies_are_not_kept_unasked() -> None:
    due_s = np.array([0.0, 0.01, 0.02])
    found = sent(echo, 3, connections=3, due_s=due_s)
    assert found.bodies == []
    np.testing.assert_allclose(found.due_s, due_s, atol=1e-6)
    assert (found.sent_s >= found.due_s).all()
    assert (found.ended_s > found.sent_s).all()
    assert found.seconds == found.ended_s.max()


def test_a_server_that_is_not_there_is_bad_input_in_a_closed_loop_too() -> None:
    with serving(echo) as server:
        target = target_of(server.url)
    with pytest.raises(BadInput, match="no connection to localhost"):
        drive(target, [target.request(b"1")], connections=2)


def test_a_server_that_takes_no_other_connection_fails_what_waits_for_one() -> None:
    async def once(asked: Asked) -> bytes:
        server.listener.close()
        return answer(200, b"{}", "Connection: close")

    with serving(once) as server:
        target = target_of(server.url)
        found = drive(target, [target.request(b"1")] * 3, connections=1)
    assert found.became[0] == 200
    assert all(str(became).startswith("no connection: ") for became in found.became[1:])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue of connections is no silence")
def test_connections_that_are_not_accepted_in_time_are_timeouts() -> None:
    # The system takes one, and leaves the others waiting.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        target = target_of(f"http://127.0.0.1:{full.getsockname()[1]}/")
        found = drive(target, [target.request(b"1")] * 3, connections=3, timeout_s=0.3)
    assert found.became == [TIMEOUT] * 3


def test_a_request_that_timed_out_while_it_waited_for_a_connection_is_not_sent() -> None:
    async def never_the_first(asked: Asked) -> bytes:
        if asked.body == b"0":
            await asyncio.sleep(60)
        return answer()

    with serving(never_the_first) as server:
        target = target_of(server.url)
        requests = [target.request(b"%d" % number) for number in range(3)]
        found = drive(target, requests, connections=1, timeout_s=1.5, due_s=np.array([0.0, 0.0, 1.7]))
        assert [asked.body for asked in server.asked] == [b"0", b"2"]
    assert found.became == [TIMEOUT, TIMEOUT, 200]


def test_an_unasked_answer_costs_its_connection_and_no_query() -> None:
    async def twice(asked: Asked) -> bytes:
        return answer() + PAUSE + answer(500)

    with serving(twice) as server:
        target = target_of(server.url)
        found = drive(target, [target.request(b"1")] * 2, connections=1, due_s=np.array([0.0, 1.0]))
        assert [asked.on_connection for asked in server.asked] == [0, 0]
    assert found.became == [200, 200]


def test_load_is_sent_where_there_is_no_epoll(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(echo) as server, monkeypatch.context() as elsewhere:
        target = target_of(server.url)
        elsewhere.setattr(http_client.sys, "platform", "darwin")
        elsewhere.delattr(http_client.selectors, "EpollSelector", raising=False)
        found = drive(target, [target.request(b"1")], connections=1, keep_bodies=True)
    assert found.bodies == [b"you sent 1"]
