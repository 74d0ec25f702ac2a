"""Keys: how they are read, what they may, and that they are nowhere to be seen."""

import hashlib
import logging
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.errors import BadInput, RateLimited, Unauthorized
from serve.http.api_keys import Key, KeyLimits, Keyring, read_keys

SECRET = "0123456789abcdef0123"  # noqa: S105
OTHER = "fedcba9876543210#xyz"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    made.touch(mode=0o600)
    return made


def asked(**headers: str) -> dict[bytes, bytes]:
    return {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}


def test_keys_come_from_a_file_and_the_environment_in_clear_or_as_digests(file: Path) -> None:
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    file.write_text(
        f"# who may ask\n\nalice:{SECRET}  rate=30/min concurrency=8 # a note\nbob sha256:{digest} rate=2.5/s\n"
    )
    keyring = read_keys(file, {"STILLROOM_KEYS": "carol:0000000000000000,dave:1111111111111111 concurrency=1"})
    assert [(key.name, key.limits) for key in keyring.keys] == [
        ("alice", KeyLimits(0.5, 8)),
        ("bob", KeyLimits(2.5, None)),
        ("carol", KeyLimits()),
        ("dave", KeyLimits(None, 1)),
    ]
    assert keyring.key_of(asked(authorization=f"Bearer {SECRET}")).name == "alice"
    assert keyring.key_of(asked(authorization=f"bearer  {OTHER}")).name == "bob"
    assert keyring.key_of(asked(x_api_key="0000000000000000")).name == "carol"
    assert keyring.key_of(asked(authorization="Basic abc", x_api_key="1111111111111111")).name == "dave"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {SECRET[:-1]}"},
        {"authorization": f"Basic {SECRET}"},
        {"x_api_key": SECRET.upper()},
        {"x_api_key": hashlib.sha256(SECRET.encode()).hexdigest()},
        {"authorization": "Bearer wrong", "x_api_key": SECRET},
    ],
)
def test_without_a_right_key_nobody_is_let_in(file: Path, headers: dict[str, str]) -> None:
    file.write_text(f"alice:{SECRET}\n")
    with pytest.raises(Unauthorized):
        read_keys(file, {}).key_of(asked(**headers))


def test_all_lines_that_cannot_be_read_are_told_at_once_and_none_is_quoted(file: Path) -> None:
    lines = [
        f"alice {SECRET}", "bob:short", f"ca/rol:{SECRET}", f"dave:{SECRET} rate=0/s", f"erin:{OTHER} concurrency=many",
        "frank sha256:abc", "grace:sha256:" + "0" * 64, f"heidi:{OTHER}", f"heidi:{SECRET}", f"ivan:{OTHER}",
    ]  # fmt: skip
    file.write_text("\n".join(lines))
    with pytest.raises(BadInput) as caught:
        read_keys(file, {})
    message = caught.value.message
    for number in range(1, 8):
        assert f"{file}, line {number}: " in message
    assert f"{file}, line 8: " not in message
    assert "the name of 'heidi' is given more than once" in message
    assert "the key of 'ivan' is given more than once" in message
    for secret in (SECRET, OTHER, "short"):
        assert secret not in message.replace("openssl rand", "")


@pytest.mark.parametrize("text", ["", "# nobody yet\n"])
def test_a_server_that_was_meant_to_be_closed_does_not_come_up_open(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(BadInput, match="has no key"):
        read_keys(file, {})
    with pytest.raises(BadInput, match="STILLROOM_KEYS has no key"):
        read_keys(None, {"STILLROOM_KEYS": text})
    with pytest.raises(BadInput, match="cannot be read"):
        read_keys(file.parent / "nowhere", {})
    assert read_keys(None, {}).keys == ()


def test_a_file_that_everybody_can_read_is_warned_about(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(f"alice:{SECRET}\n")
    with caplog.at_level(logging.WARNING, "serve"):
        read_keys(file, {})
        assert caplog.text == ""
        file.chmod(0o644)
        read_keys(file, {})
    assert f"chmod 600 {file}" in caplog.text
    assert SECRET not in caplog.text


def test_every_key_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [Key(f"k{index}", hashlib.sha256(f"key-{index}".encode()).digest(), KeyLimits()) for index in range(5)]
    compared = []
    import serve.http.api_keys

    compare = serve.http.api_keys.hmac.compare_digest
    monkeypatch.setattr(serve.http.api_keys.hmac, "compare_digest", lambda a, b: compared.append(a) or compare(a, b))
    for index in range(5):
        compared.clear()
        assert Keyring(keys).key_of(asked(x_api_key=f"key-{index}")) is keys[index]
        assert compared == [key.digest for key in keys]


def key(rate_per_s: float | None = None, concurrency: int | None = None) -> Key:
    return Key("alice", b"", KeyLimits(rate_per_s, concurrency))


def test_a_key_may_spend_a_second_at_once_and_is_told_when_there_is_more() -> None:
    alice = key(rate_per_s=4.0)
    for _ in range(4):
        alice.enter(100.0)
    with pytest.raises(RateLimited) as caught:
        alice.enter(100.0)
    assert caught.value.retry_after_s == pytest.approx(0.25)
    with pytest.raises(RateLimited):
        alice.enter(100.24)
    alice.enter(100.25 + 1e-6)
    alice.enter(200.0)


@given(
    rate_per_s=st.floats(0.01, 1000),
    pauses_s=st.lists(st.floats(0, 10), min_size=1, max_size=60),
)
def test_no_key_gets_more_than_its_rate_and_what_it_is_told_is_true(rate_per_s: float, pauses_s: list[float]) -> None:
    alice, now_s, given_s = key(rate_per_s), 1000.0, []
    for pause_s in pauses_s:
        now_s += pause_s
        try:
            alice.enter(now_s)
        except RateLimited as error:
            now_s += error.retry_after_s + 1e-6
            alice.enter(now_s)
        given_s.append(now_s)
    burst = max(1.0, rate_per_s)
    for first in range(len(given_s)):
        asked_for = len(given_s) - first
        assert asked_for <= burst + rate_per_s * (given_s[-1] - given_s[first]) + 1e-3


def test_a_key_may_have_so_many_requests_at_once_and_no_more() -> None:
    alice = key(concurrency=2)
    alice.enter(0.0)
    alice.enter(0.0)
    with pytest.raises(RateLimited) as caught:
        alice.enter(0.0)
    assert 0 <= caught.value.retry_after_s < math.inf
    alice.leave(3.0)
    alice.enter(0.0)
    assert alice.running == 2
    with pytest.raises(RateLimited) as caught:
        alice.enter(0.0)
    assert caught.value.retry_after_s == pytest.approx(1.5)  # two at once, of three seconds each: one ends every 1.5


def test_a_refused_request_uses_up_nothing() -> None:
    alice = key(rate_per_s=1.0, concurrency=1)
    alice.enter(0.0)
    for _ in range(5):
        with pytest.raises(RateLimited):
            alice.enter(0.5)
    alice.leave(0.1)
    alice.enter(1.0)


def test_keys_that_are_read_again_go_on_with_what_they_have_used(file: Path) -> None:
    file.write_text(f"alice:{SECRET} rate=1/s\nbob:{OTHER}\n")
    before = read_keys(file, {})
    before.keys[0].enter(0.0)
    file.write_text(f"alice:{SECRET} rate=1/s\nbob:{OTHER} concurrency=1\n")
    after = read_keys(file, {}).after(before)
    assert after.keys[0] is before.keys[0]
    assert after.keys[1].limits == KeyLimits(None, 1)
