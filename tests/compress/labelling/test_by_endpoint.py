"""`label --with-url` against an endpoint that misbehaves in every way that one can."""

import asyncio
import inspect
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from loopback import PAUSE, Asked, answer
from loopback import serving as loopback_serving
from patience import PATIENCE_S
from processes import started
from repository import ROOT
from small_task import examples, write_rows

import stillroom as face
from serve.errors import BadInput

NAMES = ["praise", "refund", "status"]
Behave = Callable[["Endpoint", str, int], Any]


def label_of(text: str) -> str:
    rules = {"refund": "refund", "money": "refund", "parcel": "status", "sent": "status"}
    return next((label for word, label in rules.items() if word in text), "praise")


class Endpoint:
    """A small endpoint of chat completions; `behave(endpoint, text, times)` gives what is said of a text that was asked so often before.

    It is a string (what the model says), or a number (the status), a (status, header) or (status, error) pair, bytes (the whole body), a
    bytearray (all that is written), or None, which cuts the connection; or awaits one of these.
    """

    def __init__(self, behave: Behave) -> None:
        self.behave = behave
        self.asked: Counter[str] = Counter()
        self.messages: list[list[dict[str, str]]] = []
        self.keys: set[str] = set()
        self.temperatures: dict[str, float | None] = {}
        self.times: list[float] = []
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def answer(self, request: Asked) -> bytes | None:
        body = json.loads(request.body)
        messages = body["messages"]
        text = messages[1]["content"]
        self.temperatures[text] = body.get("temperature")
        self.messages.append(messages)
        self.keys |= {*re.findall("(?i)authorization: (.*?)\r\n", request.head)}
        self.times.append(time.monotonic())
        times = self.asked[text]
        self.asked[text] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        found = self.behave(self, text, times)
        if inspect.isawaitable(found):
            found = await found
        self.at_once -= 1
        if isinstance(found, bytearray):
            return bytes(found)
        if found is None or isinstance(found, bytes):
            return found and answer(200, found)
        if isinstance(found, tuple) and isinstance(found[1], dict):
            return answer(found[0], json.dumps({"error": found[1]}).encode())
        if isinstance(found, int | tuple):
            status, *headers = (found,) if isinstance(found, int) else found
            return answer(status, b"no", *headers)
        usage = {"prompt_tokens": 10, "completion_tokens": 2}
        return answer(200, json.dumps({"choices": [{"message": {"content": found}}], "usage": usage}).encode())


@contextmanager
def serving(behave: Behave) -> Iterator[Endpoint]:
    endpoint = Endpoint(behave)
    with loopback_serving(endpoint.answer) as server:
        endpoint.url = f"http://127.0.0.1:{server.port}/v1"
        yield endpoint


def good(_: Endpoint, text: str, __: int) -> str:
    return json.dumps({"label": label_of(text)})


def label(endpoint: Endpoint, tmp_path: Path, count: int = 40, **settings: Any) -> dict[str, Any]:
    tmp_path.mkdir(exist_ok=True)
    texts = write_rows(tmp_path / "texts.jsonl", examples(count, seed=3))
    given = {"task": "text-classification", "label": NAMES, "model": "small", "timeout_s": 2.0} | settings
    return face.label([texts], tmp_path / "out.jsonl", url=endpoint.url, **given)


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def right(found: list[dict[str, Any]]) -> bool:
    wanted = examples(len(found), seed=3)
    return [(row["text"], row.get("label")) for row in found] == [(row["text"], row["label"]) for row in wanted]


def test_tokens_and_cost_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABELLER_KEY", "s3cret")

    async def slowly(endpoint: Endpoint, text: str, times: int) -> str:
        await asyncio.sleep(0.02)
        return good(endpoint, text, times)

    prices = {"prompt_price": 2.0, "completion_price": 10.0}
    with serving(slowly) as endpoint:
        document = label(endpoint, tmp_path, key_variable="LABELLER_KEY", concurrency=4, **prices)
    assert right(rows(tmp_path))
    assert set(endpoint.asked.values()) == {1}
    assert (document["requests"], document["retries"], document["unanswered"]) == (40, 0, 0)
    assert (document["prompt_tokens"], document["completion_tokens"]) == (400, 80)
    assert document["cost"] == pytest.approx((400 * 2 + 80 * 10) / 1e6)
    assert endpoint.keys == {"Bearer s3cret"}
    assert "- refund\n" in endpoint.messages[0][0]["content"]
    assert 1 < endpoint.most_at_once <= 4
    assert "s3cret" not in "".join(file.read_text() for file in tmp_path.iterdir() if file.is_file())


async def misbehaving(endpoint: Endpoint, text: str, times: int) -> Any:
    """Each text meets one kind of trouble at first, and is then answered."""
    number = int(text.rsplit(" ", 1)[1])
    right_away = good(endpoint, text, times)
    if times or number % 10 == 9:
        return right_away
    if number % 100 == 8:
        await asyncio.sleep(2.5)  # longer than the client waits
    troubles = {
        0: (429, "Retry-After: 0.05"),
        1: 500,
        2: None,
        3: b"<html>a proxy speaks</html>",
        4: b'{"choices": []}',
        5: "Sure! It is about a refund.",
        6: '{"label": "something else"}',
        7: f"```json\n{right_away}\n```",  # which is understood
    }
    return troubles.get(number % 10, right_away)


def test_trouble_in_passing_costs_requests_that_are_counted_and_no_answer(tmp_path: Path) -> None:
    with serving(misbehaving) as endpoint:
        document = label(endpoint, tmp_path, count=100, concurrency=16, timeout_s=2.0, retries=8)
    assert right(rows(tmp_path))
    assert document["unanswered"] == 0
    assert document["retries"] == document["requests"] - 100
    assert document["requests"] >= endpoint.asked.total()  # on a busy machine one may time out before it is read
    # Once again for each trouble but the fence; where a connection was cut others on it may be cut too.
    assert document["retries"] >= 71


def test_a_model_is_told_once_what_was_wrong_with_its_answer(tmp_path: Path) -> None:
    def stubborn(endpoint: Endpoint, text: str, times: int) -> str:
        return '{"label": "odd"}' if text.endswith("03") else good(endpoint, text, times)

    with serving(stubborn) as endpoint:
        document = label(endpoint, tmp_path, concurrency=2)
    found = rows(tmp_path)
    bad = [row for row in found if "label" not in row]
    assert [row["error"] for row in bad] == ["'odd' is not one of the labels: praise, refund, status"]
    assert (document["unanswered"], document["retries"]) == (1, 1)
    assert bad[0]["paid_tokens"] == [20, 4]
    (again,) = [messages for messages in endpoint.messages if len(messages) == 4]
    assert again[2] == {"role": "assistant", "content": '{"label": "odd"}'}
    assert again[3]["content"].startswith("This cannot be used: 'odd' is not one of the labels")


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (500, "asked 2 times, and the last time: status 500: no"),
        (400, "status 400: no"),
        (b'{"choices": [{"message": {"content": null}}]}', "the model said nothing of this text"),
    ],
    ids=["for now", "for good", "without words"],
)
def test_a_text_that_is_always_refused_is_asked_again_by_the_next_call(
    tmp_path: Path, trouble: Any, error: str
) -> None:
    mended: list[bool] = []

    def refuses_one(endpoint: Endpoint, text: str, times: int) -> Any:
        return trouble if text.endswith("3020") and not mended else good(endpoint, text, times)

    with serving(refuses_one) as endpoint:
        for call in range(2):  # the second asks about that one alone
            document = label(endpoint, tmp_path, concurrency=2, retries=1)
            assert (document["texts_before"], document["unanswered"]) == (39 * call, 1)
            assert rows(tmp_path)[20]["error"] == error
        mended.append(True)
        assert label(endpoint, tmp_path, concurrency=2)["unanswered"] == 0
    assert right(rows(tmp_path))
    assert {times for text, times in endpoint.asked.items() if not text.endswith("3020")} == {1}


def test_a_text_that_is_forbidden_is_an_error_of_its_text_once_another_is_answered(tmp_path: Path) -> None:
    revoked: list[bool] = []

    def flags_one(endpoint: Endpoint, text: str, times: int) -> Any:
        return 403 if text.endswith("3020") or revoked else good(endpoint, text, times)

    with serving(flags_one) as endpoint:
        for before in (0, 39):  # the second call asks about that one alone
            document = label(endpoint, tmp_path, concurrency=2)
            assert (document["texts_before"], document["unanswered"]) == (before, 1)
            assert rows(tmp_path)[20]["error"] == "status 403: no"
        revoked.append(True)
        with pytest.raises(BadInput, match="status 403: no"):
            label(endpoint, tmp_path, concurrency=2)


def test_an_invalid_key_is_refused_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-s3cret\r")  # a line end of another system
    with serving(good) as endpoint:
        label(endpoint, tmp_path)
    assert endpoint.keys == {"Bearer sk-s3cret"}
    for wrong in ("s3cret\x00key", "s3cret\u2603"):
        monkeypatch.setenv("OPENAI_API_KEY", wrong.replace("\x00", "\x01"))
        with pytest.raises(BadInput, match="OPENAI_API_KEY") as refused:
            label(endpoint, tmp_path / "other")
        assert "s3cret" not in str(refused.value)


def test_retry_after_delays_all_requests(tmp_path: Path) -> None:
    def limited(endpoint: Endpoint, text: str, times: int) -> Any:
        return (429, "Retry-After: 1") if len(endpoint.times) == 5 else good(endpoint, text, times)

    with serving(limited) as endpoint:
        label(endpoint, tmp_path, concurrency=2)
    gaps = [after - before for before, after in zip(endpoint.times, endpoint.times[1:], strict=False)]
    assert max(gaps) > 0.7  # one request may have been under way
    assert right(rows(tmp_path))


def test_no_more_requests_a_minute_than_asked(tmp_path: Path) -> None:
    with serving(good) as endpoint:
        label(endpoint, tmp_path, count=8, per_minute=300, concurrency=8)
    assert endpoint.times[-1] - endpoint.times[0] > 7 * 0.2 - 0.05


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (401, "status 401: no"),
        (403, "status 403: no"),
        (404, "status 404: no"),
        (400, "none of the first 8 answers of small can be used: status 400: no"),
        ("It depends.", "can be used: the answer is not JSON: 'It depends.'"),
        (503, "can be used: asked 2 times, and the last time: status 503: no"),
    ],
)
def test_an_endpoint_of_no_use_is_told_after_a_few_requests(tmp_path: Path, says: Any, message: str) -> None:
    with serving(lambda *_: says) as endpoint, pytest.raises(BadInput) as refused:
        label(endpoint, tmp_path, count=200, retries=1, concurrency=2)
    assert message in str(refused.value)
    assert endpoint.asked.total() <= 40  # of 400 that 200 texts would cost
    assert not (tmp_path / "out.jsonl").exists()


def test_an_endpoint_that_does_not_listen_is_told(tmp_path: Path) -> None:
    with serving(good) as endpoint:
        pass
    with pytest.raises(BadInput, match=r"--with-url http://127.*asked 1 times, and the last time: Connect"):
        label(endpoint, tmp_path, retries=0)


def test_settings_that_an_endpoint_needs_are_asked_for_at_once(tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "texts.jsonl", examples(3, seed=3))
    with pytest.raises(BadInput) as refused:
        face.label([texts], tmp_path / "out.jsonl", url="ftp://user:key@host", task="text-classification")
    for fault in ("--model is needed", "--label is needed", "needs http:// or https://", "holds a user or a password"):
        assert fault in str(refused.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://[", "--with-url is no address"),
        ("http://localhost:99999/v1", "--with-url is no address"),
        ("http://a\tb/v1", "--with-url is no address"),
        ("http:///v1", "--with-url needs http:// or https:// and a host"),
        ("localhost:8080/v1", "--with-url needs http:// or https:// and a host"),
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_asked(tmp_path: Path, url: str, message: str) -> None:
    texts = write_rows(tmp_path / "texts.jsonl", examples(3, seed=3))
    with pytest.raises(BadInput, match=message):
        face.label([texts], tmp_path / "out.jsonl", url=url, task="text-classification", label=NAMES, model="small")


def test_a_proxy_that_cannot_be_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "garbage://x")
    with (
        serving(good) as endpoint,
        pytest.raises(BadInput, match="A proxy or certificates are named in the environment"),
    ):
        label(endpoint, tmp_path)


@pytest.mark.parametrize(
    ("variable", "value", "cause"),
    [("ALL_PROXY", "socks5://127.0.0.1:1", "socksio"), ("SSL_CERT_FILE", "/not/there.pem", "No such file")],
)
def test_what_the_environment_names_and_is_not_there_is_told_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, cause: str
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)  # not installed
    monkeypatch.setenv(variable, value)
    with serving(good) as endpoint, pytest.raises(BadInput, match=f"(?s)SSL_CERT_FILE.*cannot be used: .*{cause}"):
        label(endpoint, tmp_path)


@pytest.mark.parametrize("error", [ZeroDivisionError("odd"), asyncio.CancelledError()], ids=["raised", "ended"])
def test_whatever_ends_the_requests_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("httpx.AsyncClient", fails)
    wanted = (ZeroDivisionError, RuntimeError)
    with serving(good) as endpoint, pytest.raises(wanted, match=r"odd|ended with 0 of 40 texts answered"):
        label(endpoint, tmp_path)


@pytest.mark.parametrize("count", [100, pytest.param(2_000, marks=pytest.mark.slow)])
def test_killed_three_times_no_row_is_lost_or_doubled_and_no_answer_is_asked_for_again(
    tmp_path: Path, count: int
) -> None:
    async def slowly(endpoint: Endpoint, text: str, times: int) -> Any:
        await asyncio.sleep(0.01)
        return await misbehaving(endpoint, text, times)

    texts = write_rows(tmp_path / "texts.jsonl", examples(count, seed=3))
    out = tmp_path / "out.jsonl"
    with serving(slowly) as endpoint:
        command = [
            sys.executable, "-m", "stillroom", "label", "--with-url", endpoint.url, "--model", "small", "--task", "text-classification",
            *[part for name in NAMES for part in ("--label", name)], "--input", str(texts), "--out", str(out), "--timeout-s", "2",
            "--concurrency", "8", "--retries", "8", "--json",
        ]  # fmt: skip
        for part in (0.2, 0.5, 0.8):
            with started(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                while len(endpoint.asked) < part * count:
                    assert process.poll() is None
                    time.sleep(0.005)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert right(rows(tmp_path))
    assert len(rows(tmp_path)) == document["texts"] == count
    assert document["unanswered"] == 0
    assert document["texts_before"] >= 0.8 * count - 3 * 8 - 8
    # Of each kill at most the 8 texts that were being asked are asked again; the rest is trouble of the endpoint's own making, once a text.
    again = sum(times - 1 for text, times in endpoint.asked.items())
    own = sum(int(text.rsplit(" ", 1)[1]) % 10 < 7 or int(text.rsplit(" ", 1)[1]) % 100 == 8 for text in endpoint.asked)
    assert own <= again <= own + 3 * 8 + count // 5


def refused(status: int, **error: Any) -> tuple[int, dict[str, Any]]:
    return status, {"message": "It cannot be done.", "type": "x"} | error


def test_a_model_that_takes_its_own_temperature_alone_is_asked_without_one(tmp_path: Path) -> None:
    def own(endpoint: Endpoint, text: str, times: int) -> Any:
        if endpoint.temperatures[text] is not None:
            return refused(400, param="temperature", code="unsupported_value")
        return good(endpoint, text, times)

    with serving(own) as endpoint:
        document = label(endpoint, tmp_path, concurrency=2)
    assert right(rows(tmp_path))
    assert document["requests"] <= 40 + 2  # those that were under way

    def echoes(endpoint: Endpoint, text: str, times: int) -> Any:
        return (
            refused(400, message=f"{text}: the temperature is hot")
            if text.endswith("03")
            else good(endpoint, text, times)
        )

    with serving(echoes) as endpoint:
        document = label(endpoint, tmp_path / "echoes")
    assert document["unanswered"] == 1
    assert [text for text, given in endpoint.temperatures.items() if given != 0] == [examples(4, seed=3)[3]["text"]]


@pytest.mark.parametrize(
    "refusal",
    [
        401,
        402,
        403,  # as a flagged text is, but so is a text that was answered before
        refused(403, code="insufficient_quota"),
        refused(429, type="insufficient_quota", code="insufficient_quota"),
        refused(429, code="insufficient_quota"),
        refused(400, code="billing_not_active"),
        refused(503, type="exceeded_current_quota_error"),
    ],
)
def test_an_account_that_is_refused_ends_the_call_at_once_and_every_answer_is_kept(
    tmp_path: Path, refusal: Any
) -> None:
    answered: list[str] = []

    async def used_up(endpoint: Endpoint, text: str, times: int) -> Any:
        if endpoint.asked.total() > 60:
            return refusal
        await asyncio.sleep(
            0.3 if endpoint.asked.total() > 40 else 0
        )  # so that these are under way when the first is refused
        answered.append(text)
        return good(endpoint, text, times)

    with serving(used_up) as endpoint, pytest.raises(BadInput, match=r"status 4|status 503") as told:
        label(endpoint, tmp_path, count=200, concurrency=32, timeout_s=PATIENCE_S)
    assert "What was answered is kept: give the same command again" in str(told.value)
    assert endpoint.asked.total() <= 60 + 32 * (2 if refusal == 403 else 1)
    kept = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl.part").read_text().splitlines()]
    assert sorted(kept) == sorted(answered)


def test_a_limit_of_the_minute_is_waited_for(tmp_path: Path) -> None:
    def limited(endpoint: Endpoint, text: str, times: int) -> Any:
        return (
            good(endpoint, text, times) if times else refused(429, type="rate_limit_error", code="rate_limit_exceeded")
        )

    with serving(limited) as endpoint:
        assert label(endpoint, tmp_path, count=8)["unanswered"] == 0


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"content-length: 1000\r\n\r\n", *[b" "] * 1_000],
        [HEAD, *[b"x-slow: 1\r\n"] * 1_000, b"content-length: 0\r\n\r\n"],
    ],
)
def test_the_whole_answer_must_come_in_time(tmp_path: Path, pieces: list[bytes]) -> None:
    def slow(endpoint: Endpoint, text: str, times: int) -> Any:
        return bytearray(PAUSE.join(pieces)) if text.endswith("03") else good(endpoint, text, times)

    with serving(slow) as endpoint:
        document = label(endpoint, tmp_path, timeout_s=2.0, retries=0)
    found = rows(tmp_path)
    assert found[3]["error"] == "asked 1 times, and the last time: no whole answer came in 2 s (--timeout-s)"
    assert document["unanswered"] == 1


def said(content: Any, **usage: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}}], "usage": usage}).encode()


ODD: dict[str, Any] = {
    "00": '{"label": ' + "[" * 100_000,
    "01": '{"label": ' * 100_000,
    "02": '{"label": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "03": b"[" * 100_000,
    "04": '{"label": "\ud800"}',
    "05": '{"label": ' + "9" * 5_000 + "}",
    "06": "<think>" * 20_000,
    "07": b'{"choices": [{"message": {"content": 3}}], "usage": {"prompt_tokens": 1e999}}',
    "08": "{" * 100_000,
    "09": '{"' * 100_000,
}
"""What is said of the texts whose number ends so."""


def test_an_answer_of_any_form_costs_no_more_than_its_text(tmp_path: Path) -> None:
    def odd(endpoint: Endpoint, text: str, times: int) -> Any:
        if text[-2:] == "10":
            return said([{"type": "thinking", "thinking": []}, {"type": "text", "text": good(endpoint, text, times)}])
        if text[-2:] == "11":
            return said(good(endpoint, text, times), prompt_tokens="many", completion_tokens=float("inf"))
        return ODD.get(text[-2:]) if text[-2:] in ODD else good(endpoint, text, times)

    with serving(odd) as endpoint:
        document = label(endpoint, tmp_path, retries=0, timeout_s=60.0)
    found = rows(tmp_path)
    assert [row["text"][-2:] for row in found if "error" in row] == [*ODD]
    assert document["unanswered"] == len(ODD)
