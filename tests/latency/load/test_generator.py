"""Load on real servers over loopback, each with a fault or a pace of its own."""

import asyncio
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loopback import PAUSE, Asked, Handler, answer, self_signed, serving
from repository import ROOT

from latency.load import driver, generator
from latency.load.driver import poisson_s
from latency.load.generator import Load, load, ramp, request_bodies
from latency.load.http_client import probe, target_of
from serve.errors import BadInput

QUICK: dict[str, Any] = {"rate_per_s": 500.0, "queries": 40}


async def at_once(asked: Asked) -> bytes:
    return answer()


def one_at_a_time(seconds: float, stalls: dict[int, float] | None = None) -> Handler:
    """A server of known capacity, 1 / `seconds`; at the requests in `stalls` it takes so many seconds longer."""
    turn = asyncio.Lock()

    async def handler(asked: Asked) -> bytes:
        async with turn:
            await asyncio.sleep(seconds + (stalls or {}).get(asked.number, 0.0))
        return answer()

    return handler


def loaded(handler: Handler, bodies: tuple[bytes, ...] = (b"{}",), **given: Any) -> Load:
    with serving(handler) as server:
        return load(server.url, bodies, **(QUICK | given))


def test_a_stall_is_seen_by_every_query_that_was_due_in_it() -> None:
    found = loaded(one_at_a_time(0.0, {20: 0.3}), rate_per_s=200.0, queries=160, connections=1)

    # Some 60 queries are due in 300 ms; those of the first 200 ms wait for 100 or more.
    slow = sum(ms > 100 for ms in found.latencies_ms)
    assert slow >= 25
    # From the moment of sending, as a closed loop has it, the same run has next to nothing to tell.
    assert 1 <= sum(ms > 100 for ms in found.from_sent_ms) <= slow // 5
    assert found.percentile_ms(90) > 100  # type: ignore[operator]
    assert len(found.latencies_ms) == 160


def test_queries_leave_when_they_are_due_though_none_is_answered_yet() -> None:
    async def once_all_are_there(asked: Asked) -> bytes:
        arrived.append(asked.number)
        while len(arrived) < 30:
            await asyncio.sleep(0.001)
        return answer()

    arrived: list[int] = []
    found = loaded(once_all_are_there, queries=30)
    assert len(found.latencies_ms) == 30
    assert found.connections == 30
    assert found.seconds >= poisson_s(500.0, 30, seed=0)[-1]


def test_refusals_are_counted_apart_and_are_no_latencies() -> None:
    async def handler(asked: Asked) -> bytes:
        return answer({b"a": 200, b"b": 429, b"c": 503}[asked.body])

    found = loaded(handler, (b"a", b"b", b"c"), queries=30)
    assert (len(found.latencies_ms), len(found.refused_ms)) == (10, 20)
    assert (found.errors, found.timeouts) == ({}, 0)
    assert not found.held(bound_ms=1e9)


def writes(said: bytes | None) -> Handler:
    async def handler(asked: Asked) -> bytes | None:
        return said

    return handler


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        pytest.param(None, "closed without an answer", id="closes"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\nhalf", "closed in mid-answer", id="half"),
        pytest.param(b"\x00\x01 garbage\r\n\r\n", "not HTTP", id="garbage"),
        pytest.param(answer(500), "500", id="fault"),
        pytest.param(answer(307, b"", "Location: /elsewhere"), "307", id="redirect"),
    ],
)  # fmt: skip
def test_failures_are_counted_by_their_kind(said: bytes | None, kind: str) -> None:
    found = loaded(writes(said))

    assert found.errors == {kind: 40}
    assert found.latencies_ms == ()
    assert found.percentile_ms(99) is None
    assert json.loads(json.dumps(found.trial(10.0)))["held"] is False


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(answer(200, b"{}", "Connection: close"), id="close"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\nuntil the end", id="no-length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", id="chunked"),
        pytest.param(b"HTTP/1.1 103 Early Hints\r\n\r\n" + PAUSE + answer(), id="announced"),
        pytest.param(answer(204, b""), id="nothing-to-say"),
    ],
)
def test_answers_of_every_form_of_http_count(said: bytes) -> None:
    found = loaded(writes(said))
    assert (len(found.latencies_ms), found.errors, found.resent) == (40, {}, 0)


def test_queries_that_are_never_answered_time_out_and_keep_no_connection_from_others() -> None:
    async def handler(asked: Asked) -> bytes:
        if asked.body == b"b":
            await asyncio.sleep(60)
        return answer()

    found = loaded(handler, (b"a", b"b", b"c", b"d"), rate_per_s=100.0, connections=6, timeout_s=0.4)
    assert found.timeouts >= 10
    assert len(found.latencies_ms) + found.timeouts == 40
    assert found.latencies_ms
    assert max(found.latencies_ms) <= 1000
    assert found.errors == {}


def test_no_more_connections_are_open_than_allowed_and_waiting_for_one_counts() -> None:
    async def handler(asked: Asked) -> bytes:
        await asyncio.sleep(0.03)
        return answer()

    with serving(handler) as server:
        found = load(server.url, [b"{}"], rate_per_s=400.0, queries=60, connections=3)
        assert server.most_connections == 3
    assert found.waited >= 20
    assert found.percentile_ms(50) > 3 * sorted(found.from_sent_ms)[30]  # type: ignore[operator]
    assert any("queries had to wait for a connection" in doubt for doubt in found.client_doubts())


def test_a_query_whose_idle_connection_was_just_closed_is_sent_again() -> None:
    async def handler(asked: Asked) -> bytes | None:
        return answer() if asked.on_connection < 4 else None

    found = loaded(handler, connections=1)
    assert (len(found.latencies_ms), found.errors) == (40, {})
    assert found.resent == 9
    assert any("9 of 40 queries had to be sent again" in doubt for doubt in found.doubts())


def test_every_text_is_sent_as_often_in_an_order_of_the_seed_on_one_connection_after_another() -> None:
    bodies = tuple(b"%d" % i for i in range(10))

    def order(seed: int) -> list[bytes]:
        with serving(at_once) as server:
            load(server.url, bodies, connections=1, seed=seed, **QUICK)
            assert [asked.on_connection for asked in server.asked] == list(range(40))
            return [asked.body for asked in server.asked]

    first = order(1)
    assert first == order(1) != order(2)
    assert set(Counter(first).values()) == {4}
    assert len(set(first[:10])) == 10


def test_a_request_has_its_path_headers_and_length() -> None:
    with serving(at_once) as server:
        load(server.url, ["ü".encode()], headers={"Authorization": "Bearer k", "content-type": "text/x"}, **QUICK)
        line, *headers = server.asked[0].head.strip().split("\r\n")
        assert server.asked[0].body == "ü".encode()
    assert line == "POST /v1/ask?key=1 HTTP/1.1"
    given = ["Authorization: Bearer k", "content-type: text/x"]
    assert headers == [f"Host: localhost:{server.port}", *given, "Content-Length: 2"]


def test_a_generator_that_is_late_says_so_and_its_lateness_is_in_the_latency() -> None:
    def hold_up(done: int, count: int, note: str) -> None:
        time.sleep(0.2)

    found = loaded(at_once, rate_per_s=200.0, queries=200, progress=hold_up)
    assert sum(ms > 50 for ms in found.late_ms) >= 15
    assert all(latency >= sent for latency, sent in zip(found.latencies_ms, found.from_sent_ms, strict=True))
    assert found.percentile_ms(99) > 100  # type: ignore[operator]
    assert any("the generator itself was late" in doubt for doubt in found.doubts())
    assert found.trial()["doubts"] == found.doubts()


def test_few_answers_make_the_p99_doubtful() -> None:
    few, enough = (loaded(at_once, queries=queries).doubts() for queries in (40, 100))
    assert "p99 rests on 40 of the 100 answers" in few[0]
    assert not any("rests on" in doubt for doubt in enough)


def test_a_trial_that_has_missed_its_bound_sends_no_more() -> None:
    async def slow(asked: Asked) -> bytes:
        await asyncio.sleep(0.05)
        return answer()

    async def refusing(asked: Asked) -> bytes:
        return answer(429 if asked.number == 9 else 200)

    for handler in (slow, refusing):
        found = loaded(handler, rate_per_s=200.0, queries=2000, bound_ms=20.0)
        assert 10 <= found.queries < 200
        assert found.cut_short
        assert not found.held(20.0)
        assert len(found.latencies_ms) + len(found.refused_ms) == found.queries
    assert not loaded(at_once, bound_ms=10_000.0).cut_short


def test_the_ramp_looks_lower_when_its_first_rate_is_refused() -> None:
    answered: list[float] = []

    async def limited(asked: Asked) -> bytes:
        """Refuses what comes when it has answered 5 within 40 ms, but for the first 20."""
        await asyncio.sleep(0.0005)
        now_s = time.monotonic()
        if asked.number >= 20 and sum(then_s > now_s - 0.04 for then_s in answered) >= 5:
            return answer(429)
        answered.append(now_s)
        return answer()

    texts = [b"%d" % i for i in range(1000)]
    with serving(limited) as server:
        found = ramp(server.url, texts, bound_ms=5000.0, queries=20, tolerance=0.5)
        sent = [asked.body for asked in server.asked[20:]]
    assert found["rate_per_s"] > 0
    assert found["trials"][0]["refused"]
    assert not any(trial["held"] for trial in found["trials"] if trial["refused"])
    # Another trial sends others, at other moments.
    assert len(set(sent)) > 0.8 * len(sent)


def test_the_ramp_says_when_no_rate_or_every_rate_held() -> None:
    async def handler(asked: Asked) -> bytes:
        await asyncio.sleep(0.02)
        return answer()

    told: list[tuple[int, int, str]] = []
    with serving(handler) as server, pytest.MonkeyPatch.context() as low:
        low.setattr(generator, "MOST_DOUBLED", 4)
        low.setattr(driver, "TELL_S", 0.01)
        none = ramp(server.url, [b"{}"], bound_ms=2.0, queries=20)
        every = ramp(
            server.url, [b"{}"], bound_ms=60_000.0, queries=5, progress=lambda *each: told.append(each), tolerance=0.5
        )
    assert none["rate_per_s"] == 0.0
    assert not any(trial["held"] for trial in none["trials"])
    assert all(trial["held"] for trial in every["trials"])
    assert every["rate_per_s"] == max(trial["rate_per_s"] for trial in every["trials"])
    assert any("every rate that was tried held" in doubt for doubt in every["doubts"])
    assert {note.partition(",")[0] for _, _, note in told} == {f"trial {i + 1}" for i in range(len(every["trials"]))}
    assert all(0 <= done <= count for done, count, _ in told)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_a_template_takes_any_text_in_place_of_its_string() -> None:
    texts = ['say "hi" \\ \n', "😀 ü \u2028", "TEXT"]
    template = '{"model": "m", "n": 1.5, "TEXT": ["TEXT", "a TEXT", {"deep": "TEXT"}], "none": null}'

    for text, body in zip(texts, request_bodies(template, texts), strict=True):
        assert json.loads(body) == {"model": "m", "n": 1.5, "TEXT": [text, "a TEXT", {"deep": text}], "none": None}
    assert request_bodies('"TEXT"', ["ü"]) == ['"ü"'.encode()]


def test_the_templates_in_the_docs_take_a_text() -> None:
    page = (ROOT / "docs" / "load-testing.md").read_text(encoding="utf-8")
    templates = re.findall(r"[`'](\{.*\})[`']", page)
    assert len(templates) >= 5
    assert all(b"a lamp" in request_bodies(template, ["a lamp"])[0] for template in templates)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{text: TEXT}", "is not JSON"),
        ('{"text": "text", "TEXT": 1}', 'no string "TEXT"'),
        ('{"a": "\\ud83d", "b": "TEXT"}', "half a surrogate pair"),
    ],
    ids=["no JSON", "no place", "half a pair"],
)
def test_templates_that_hold_no_text_are_refused(template: str, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        request_bodies(template, ["a"])


@pytest.mark.parametrize(
    ("url", "headers", "named"),
    [
        ("127.0.0.1:8000/v1", {}, "http or https URL"),
        ("ftp://here/x", {}, "http or https URL"),
        ("http://", {}, "http or https URL"),
        ("http://here:port/", {}, "is not a URL"),
        ("http://me:secret@here/", {}, "Authorization header"),
        ("http://here/", {"A b": "c"}, "cannot be sent"),
        ("http://here/", {"A": "b\r\nC: d"}, "cannot be sent"),
        ("http://here/", {"A": "€"}, "cannot be sent"),
        ("http://here/", {"Content-Length": "3"}, "cannot be sent"),
    ],
)
def test_addresses_and_headers_that_cannot_be_used_are_refused(url: str, headers: dict[str, str], named: str) -> None:
    with pytest.raises(BadInput, match=named) as refused:
        target_of(url, headers)
    assert "secret" not in str(refused.value)


def test_addresses_are_written_as_a_request_needs_them() -> None:
    target = target_of("http://[::1]:8000/a b/ü?q=ä b#part")
    assert (target.host, target.port) == ("::1", 8000)
    assert target.request(b"{}").startswith(b"POST /a%20b/%C3%BC?q=%C3%A4%20b HTTP/1.1\r\nHost: [::1]:8000\r\n")
    assert target_of("http://bücher.example").headers["Host"] == "xn--bcher-kva.example"
    assert (target_of("https://here/").port, target_of("http://here").path) == (443, "/")


@pytest.mark.parametrize(
    ("use", "given"),
    [(load, {name: 0}) for name in ("connections", "timeout_s", "queries", "rate_per_s")]
    + [(ramp, {name: 0}) for name in ("bound_ms", "seconds", "queries")],
)
def test_loads_and_ramps_of_nothing_are_refused(use: Callable[..., object], given: dict[str, Any]) -> None:
    usual = QUICK if use is load else {"bound_ms": 10.0}
    with pytest.raises(BadInput, match="above 0"):
        use("http://127.0.0.1:9/", [b"{}"], **(usual | given))


def test_a_server_that_is_not_there_is_said_to_be_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BadInput, match=rf"127\.0\.0\.1:{port} .*Is it running\?"):
        load(f"http://127.0.0.1:{port}/", [b"{}"], **QUICK)
    with pytest.raises(BadInput, match="first request"):
        probe(target_of(f"http://127.0.0.1:{port}/"), b"{}", 1.0)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (answer(422, b'{"error": "no such field"}'), ("422", '{"error": "no such')),
        (b"garbage\r\n\r\n", ("first request",)),
        (None, ("first request",)),
    ],
    ids=["refused", "garbage", "closed"],
)
def test_a_probe_says_what_came_back(said: bytes | None, told: tuple[str, ...]) -> None:
    with serving(writes(said)) as server, pytest.raises(BadInput) as refused:
        probe(target_of(server.url), b"{}", 2.0)
    assert all(part in str(refused.value) for part in told)


def test_https_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, tls = self_signed(tmp_path)
    with serving(at_once, tls) as server:
        with pytest.raises(BadInput, match="certificate"):
            load(server.url, [b"{}"], **QUICK)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        probe(target_of(server.url), b"{}", 5.0)
        found = load(server.url, [b"{}"], **QUICK)
    assert (len(found.latencies_ms), found.errors) == (40, {})
