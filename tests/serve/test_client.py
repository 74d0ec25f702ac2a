"""The client against the real server in a process, and against one whose every answer the test decides."""

import asyncio
import dataclasses
import json
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import PAUSE, Asked, Loopback, answer, self_signed, serving
from repository import ROOT

from serve import client as client_module
from serve.client import Client, RelationItem, parts_of
from serve.errors import (
    BadInput,
    DeadlineExceeded,
    InternalError,
    NotFound,
    Overloaded,
    StillroomError,
    TooLarge,
    Unauthorized,
    Unavailable,
    drawn_pause_s,
    retry_after_s,
)
from serve.model.pipeline import Pipeline, PipelineOptions
from serve.text.answers import AnswerOptions

EMPTY = {"entities": [], "truncated": False}


def told(results: list[Any]) -> bytes:
    return answer(200, json.dumps({"model": "m", "variant": "fp32", "results": results}).encode())


def refusal(status: int, code: str, *headers: str, **more: str) -> bytes:
    return answer(status, json.dumps({"error": {"code": code, "message": "as it is", **more}}).encode(), *headers)


class Script:
    """Gives one answer after another, the last for ever."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = answers

    async def __call__(self, asked: Asked) -> bytes | None:
        return self.answers[min(asked.number, len(self.answers) - 1)]


def at(server: Loopback, **settings: Any) -> Client:
    return Client(f"http://localhost:{server.port}", **settings)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the client makes, which take no time here."""
    pauses: list[float] = []
    monkeypatch.setattr(client_module.time, "sleep", pauses.append)
    return pauses


def test_it_answers_as_the_pipeline_does(url: str, entities_bundle: Path, intents_bundle: Path) -> None:
    texts = ["from oslo\r\n\tplease " * 3, "", "１２ new york 😀", "a " * 40]
    cities, intents = Pipeline(entities_bundle), Pipeline(intents_bundle)
    with Client(url + "/") as client:
        assert client.entities(texts) == cities(texts)
        assert client.entities(texts[2]) == cities(texts[2])
        asked_otherwise = client.entities("😀 Rome", offsets="utf16", min_score=0.5, model="cities")
        assert asked_otherwise == cities("😀 Rome", offsets="utf16")
        assert asked_otherwise["entities"][0]["start"] == 3
        assert client.entities("rome", min_score=0.999) == EMPTY
        assert client.classify("i love it") == intents("i love it")
        assert client.classify(["refund"], ["a"], top_k=1) == intents(["refund"], text_pair=["a"], top_k=1)
        assert [model["name"] for model in client.models()][:2] == ["cities", "intents"]
        assert client.ready()


def test_the_servers_errors_are_raised_as_they_are(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(NotFound, match="'x'; the models are 'cities'") as refused:
            client.entities("a", model="x")
        assert refused.value.field == "model"
        with pytest.raises(BadInput, match=r"text\[1\]") as refused:
            client.entities(["a", 7])  # type: ignore[list-item]
        assert refused.value.field == "text[1]"
        with (
            pytest.raises(TooLarge, match="2,049 texts"),
            Client(url, request_texts=4000) as other,
        ):
            other.entities(["a"] * 2049)
        with pytest.raises(BadInput, match="half a surrogate pair"):
            client.entities("a\ud83d")
        assert client.entities("a") == EMPTY, "the connection serves on after errors"


def test_a_list_beyond_a_request_is_answered_in_order(url: str, entities_bundle: Path, intents_bundle: Path) -> None:
    texts = ["rome", "from oslo", "", "a " * 40, "１２ new york 😀", "paris", "b"]
    with Client(url) as client:
        assert client.entities(["a"] * 1025) == [EMPTY] * 1025
    with Client(url, request_bytes=100) as client:
        assert client.entities(texts) == Pipeline(entities_bundle)(texts)
    with Client(url, request_texts=2, connections=3) as client:
        assert client.entities(texts, min_score=0.5) == Pipeline(entities_bundle)(texts, min_score=0.5)
        pairs = texts[::-1]
        assert client.classify(texts, pairs) == Pipeline(intents_bundle)(texts, text_pair=pairs)
        with pytest.raises(BadInput, match=r"^text\[5\]") as refused:
            client.entities([*texts[:5], 7])  # type: ignore[list-item]
        assert refused.value.field == "text[5]"
        with pytest.raises(BadInput, match="a list as long as text"):
            client.classify(texts, pairs[:3])
        with pytest.raises(TooLarge, match=r"^text\[6\] has 100,001 characters") as too_large:
            client.entities([*texts[:6], "a" * 100_001])
        assert too_large.value.field == "text[6]"
        assert too_large.value.__cause__ is None
    with (
        Client(url, request_bytes=2_000_000, request_texts=2) as client,
        pytest.raises(TooLarge, match=r"^text\[2\]: the body has "),
    ):
        client.entities(["a", "b", "c" * 1_000_001])


def test_no_request_is_larger_than_asked_for_and_only_some_are_under_way() -> None:
    async def as_many(asked: Asked) -> bytes:
        sent = json.loads(asked.body)["text"]
        under_way.append(1)
        most.append(len(under_way))
        await asyncio.sleep(0.05)
        under_way.pop()
        return told([{"entities": [], "truncated": False, "of": text} for text in sent])

    under_way: list[int] = []
    most: list[int] = []
    texts = ["x" * (7 * number % 40) for number in range(50)]
    with (
        serving(as_many) as server,
        at(server, request_texts=6, request_bytes=160, connections=2) as client,
    ):
        assert [each["of"] for each in client.entities(texts)] == texts  # type: ignore[typeddict-item]
        assert all(len(asked.body) <= 160 and len(json.loads(asked.body)["text"]) <= 6 for asked in server.asked)
    assert max(most) == 2


@given(sizes_bytes=st.lists(st.integers(1, 50), min_size=1), most=st.integers(1, 9), most_bytes=st.integers(1, 100))
def test_parts_of_a_list_are_all_of_it_and_as_few_as_fit(sizes_bytes: list[int], most: int, most_bytes: int) -> None:
    parts = list(parts_of(sizes_bytes, most, most_bytes))
    assert [size for part in parts for size in sizes_bytes[part]] == sizes_bytes
    held = [sizes_bytes[part] for part in parts]
    assert all(len(each) <= most and (len(each) == 1 or sum(each) <= most_bytes) for each in held)
    for part, after in pairwise(held):
        assert len(part) == most or sum(part) + after[0] > most_bytes


def test_threads_share_a_client_and_each_gets_its_own_answers(url: str) -> None:
    texts = [["rome", "oslo", "paris"][number % 3] for number in range(60)]
    with Client(url) as client, ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda text: client.entities(text)["entities"][0]["text"], texts))
    assert found == texts


def test_the_key_goes_with_every_request_and_is_never_shown() -> None:
    with serving(Script(refusal(401, "unauthorized"))) as server, at(server, api_key="secret") as client:
        with pytest.raises(Unauthorized) as refused:
            client.entities("a")
        assert "\r\nAuthorization: Bearer secret\r\n" in server.asked[0].head
        assert "secret" not in f"{refused.value} {client}"


def test_relations_are_asked_for_one_item_or_a_list() -> None:
    item: RelationItem = {"text": "Rome is in Italy", "head": {"start": 0, "end": 4}, "tail": {"start": 11, "end": 16}}
    labels = {"labels": [{"label": "in", "score": 0.9}], "truncated": False}
    with serving(Script(told([labels]))) as server, at(server) as client:
        assert client.relations(item, top_k=1) == labels
        assert client.relations([item]) == [labels]
        assert [json.loads(asked.body) for asked in server.asked] == [{**item, "top_k": 1}, {"items": [item]}]
        assert "POST /v1/relations " in server.asked[0].head


@pytest.mark.parametrize("status", [429, 503])
def test_it_comes_again_when_the_server_says(waited: list[float], status: int) -> None:
    code = {429: "overloaded", 503: "unavailable"}[status]
    in_20_s = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    script = Script(
        refusal(status, code, "Retry-After: 7"), refusal(status, code, f"Retry-After: {in_20_s}"), told([EMPTY])
    )
    with serving(script) as server, at(server) as client:
        assert client.entities("a") == EMPTY
    assert waited[0] == 7
    assert 15 < waited[1] <= 20


def test_without_a_word_from_the_server_pauses_are_drawn_and_grow(waited: list[float]) -> None:
    with serving(Script(refusal(503, "unavailable"))) as server, at(server, retries=5) as client:
        with pytest.raises(Unavailable, match="as it is"):
            client.entities("a")
        assert len(server.asked) == 6
    assert all(0 <= pause <= 0.2 * 2**retry for retry, pause in enumerate(waited))
    assert len(set(waited)) == 5
    assert max(drawn_pause_s(retry, 0.2, 10) for retry in range(100)) <= 10
    assert max(drawn_pause_s(7, 0.2, 10) for _ in range(50)) > 5


def test_a_wait_beyond_the_time_left_is_not_begun(waited: list[float]) -> None:
    with serving(Script(refusal(429, "overloaded", "Retry-After: 60"))) as server, at(server, timeout_s=30) as client:
        with pytest.raises(Overloaded) as refused:
            client.entities("a")
        assert len(server.asked) == 1
    assert refused.value.retry_after_s == 60
    assert waited == []


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        pytest.param(refusal(422, "invalid_input", field="text"), BadInput, id="invalid"),
        pytest.param(refusal(504, "deadline_exceeded"), DeadlineExceeded, id="the-servers-deadline"),
        pytest.param(refusal(500, "internal"), InternalError, id="the-servers-fault"),
        pytest.param(refusal(405, "method_not_allowed"), BadInput, id="a-code-that-nobody-knows"),
        pytest.param(answer(502, b"<h1>Bad  gateway</h1>"), Unavailable, id="a-gateways-page"),
        pytest.param(answer(413, b"too large"), TooLarge, id="a-gateways-limit"),
        pytest.param(answer(301, b"", "Location: http://elsewhere/"), BadInput, id="a-redirect"),
        pytest.param(answer(200, b"<h1>Welcome</h1>"), InternalError, id="another-server"),
        pytest.param(answer(200, b'{"results": 1}'), InternalError, id="no-list"),
    ],
)
def test_other_errors_are_raised_at_once(waited: list[float], said: bytes, kind: type[StillroomError]) -> None:
    with serving(Script(said)) as server, at(server) as client:
        with pytest.raises(kind) as refused:
            client.entities("a")
        assert type(refused.value) is kind
        assert len(server.asked) == 1
        assert re.search(r"as it is|http://localhost:\d+", refused.value.message)
    assert refused.value.field == ("text" if kind is BadInput and b'"field"' in said else None)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(None, id="not-a-word"),
        pytest.param(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 500\r\n\r\n{", id="half-an-answer"),
        pytest.param(b"Hello\r\n\r\n", id="no-http"),
    ],
)
def test_a_broken_connection_is_tried_again(waited: list[float], broken: bytes | None) -> None:
    with serving(Script(broken, broken, told([EMPTY]))) as server, at(server) as client:
        assert client.entities("a") == EMPTY
        assert len(server.asked) == 3
    with serving(Script(broken)) as server, at(server, retries=1) as client:
        with pytest.raises(Unavailable, match=r"the connection to http://localhost:\d+ failed \(.+\); check address"):
            client.entities("a")
        assert len(server.asked) == 2


def test_a_connection_that_was_closed_meanwhile_costs_no_attempt(waited: list[float]) -> None:
    with serving(Script(told([EMPTY]), None, told([EMPTY]))) as server, at(server, retries=0) as client:
        assert client.entities("a") == EMPTY
        assert client.entities("b") == EMPTY
        assert [asked.on_connection for asked in server.asked] == [0, 1, 0]  # one connection serves call after call


def test_answers_in_chunks_and_answers_that_end_with_the_connection_are_read() -> None:
    body = told([EMPTY]).partition(b"\r\n\r\n")[2]
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(body), body)
    closing = b"HTTP/1.1 200 OK\r\n\r\n" + body
    with serving(Script(chunked + PAUSE + b"0\r\n\r\n", closing, told([EMPTY]))) as server, at(server) as client:
        assert [client.entities("a") for _ in range(3)] == [EMPTY] * 3
        assert [asked.on_connection for asked in server.asked] == [0, 1, 0]


def test_the_time_allowed_bounds_a_server_that_is_silent_and_one_that_drips() -> None:
    async def silent(asked: Asked) -> bytes | None:
        await asyncio.sleep(60)
        return None

    dripping = PAUSE.join([b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", *[b"a"] * 10_000])
    for handler in (silent, Script(dripping)):
        with serving(handler) as server, at(server, timeout_s=1) as client:
            with pytest.raises(DeadlineExceeded, match="within 1 s"):
                client.entities("a")
            assert len(server.asked) == 1


def test_nobody_there_is_told_after_the_last_attempt_and_is_not_ready(waited: list[float]) -> None:
    with serving(Script(None)) as server:
        port = server.port
    with Client(f"http://localhost:{port}", retries=2) as client:
        with pytest.raises(Unavailable, match="check address and server"):
            client.models()
        assert len(waited) == 2
        assert client.ready() is False


def test_not_ready_is_an_answer_and_not_an_error() -> None:
    script = Script(refusal(503, "unavailable"), answer(), refusal(401, "unauthorized"))
    with serving(script) as server, at(server) as client:
        assert client.ready() is False
        assert client.ready() is True
        with pytest.raises(Unauthorized):
            client.ready()


@pytest.mark.parametrize(
    ("url", "settings", "named"),
    [
        *((url, {}, "give a server") for url in ("localhost:8000", "ftp://localhost", "http://", "http://localhost:x")),
        ("http://me:pw@localhost", {}, "give a server"),
        ("http://a/?q", {}, "give a server"),
        ("http://localhost", {"timeout_s": 0}, "timeout_s"),
        ("http://localhost", {"timeout_s": float("nan")}, "timeout_s"),
        ("http://localhost", {"retries": -1}, "retries"),
        ("http://localhost", {"api_key": "se\r\ncret"}, "HTTP headers cannot hold"),
    ],
)
def test_an_address_or_a_setting_that_means_nothing_is_refused(url: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        Client(url, **settings)


def test_what_json_cannot_carry_and_what_has_no_time_left_is_not_sent() -> None:
    with serving(Script(told([EMPTY]))) as server, at(server) as client, at(server, timeout_s=1e-9) as late:
        with pytest.raises(BadInput, match="object"):
            client.entities(object())  # type: ignore[call-overload]
        with pytest.raises(DeadlineExceeded):
            late.entities("a")
        assert server.asked == []


def test_it_asks_over_tls_and_believes_no_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, tls = self_signed(tmp_path)
    with serving(Script(told([EMPTY])), tls) as server:
        with Client(f"https://localhost:{server.port}", retries=0) as client, pytest.raises(Unavailable):
            client.entities("a")
        assert server.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with Client(f"https://localhost:{server.port}") as client:
            assert client.entities("a") == EMPTY


def test_a_path_before_the_endpoints_is_kept() -> None:
    with (
        serving(Script(told([EMPTY]))) as server,
        Client(f"http://localhost:{server.port}/models/ner/") as client,
    ):
        client.entities("a")
        assert server.asked[0].head.startswith("POST /models/ner/v1/entities HTTP/1.1\r\n")


def test_a_retry_after_is_seconds_or_a_date_and_anything_else_is_not_heeded() -> None:
    for said in ("", "soon", "-3", "1e3", "Wed, 99 Nov", "1 Jan 99999999999999999999 00:00:00 GMT"):
        assert retry_after_s(said) is None, said
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    for zone in ("GMT", "-0000"):  # the second: no zone is told, and UTC is meant
        assert (retry_after_s(f"Wed, 21 Oct 2093 07:28:00 {zone}") or 0) > 365 * 86_400


def test_the_code_in_its_page_runs(url: str, entities_bundle: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Client(" in block]
    (in_process,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Pipeline(" in block]
    assert len(blocks) >= 2
    known: dict[str, Any] = {}
    for block in [in_process, *blocks]:
        known.pop("answer", None)
        code = block.replace("http://127.0.0.1:8000", url).replace("ner.bundle", str(entities_bundle))
        exec(code, known)  # noqa: S102 - the page is ours
        if "answer = " in block:
            assert known["answer"]["entities"][0]["text"] == "Rome"


def test_its_page_names_every_option() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    of_pipeline = {"text_pair", *PipelineOptions.__annotations__}
    assert set(PipelineOptions.__annotations__) == {field.name for field in dataclasses.fields(AnswerOptions)}
    assert of_pipeline == set(re.findall(r"^\| `(\w+)` \| [^|]+ \| (?:entities|models|labels|all)", page, re.MULTILINE))
    kinds = {
        "entities": client_module.EntitiesOptions,
        "classify": client_module.ClassifyOptions,
        "score": client_module.ScoreOptions,
        "relations": client_module.RelationsOptions,
    }
    for method, kind in kinds.items():
        (listed,) = re.findall(rf"^\| `{method}\([^|]* \| ([^|]+) \|", page, re.MULTILINE)
        assert re.findall(r"`(\w+)`", listed) == list(kind.__annotations__)
