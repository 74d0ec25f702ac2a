"""A server under malformed requests: it refuses them, and answers right ones as before."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import httpx
import pytest
from loopback import Asked, answer
from loopback import serving as pretending
from patience import PATIENCE_S

from benchmarks.serve.malformations import KINDS, RIGHT, Malformed
from benchmarks.serve.malformed import attack
from benchmarks.serve.small_server import serving


@pytest.fixture(scope="module")
def url(entities_bundle: Path, intents_bundle: Path, relations_bundle: Path) -> Iterator[str]:
    with serving([entities_bundle, intents_bundle, relations_bundle]) as url:
        yield url


def test_300_malformed_requests_are_refused_and_right_ones_answered_as_before(url: str) -> None:
    tally = asyncio.run(attack(url, requests=300, seed=4))
    assert tally.faults == []
    assert tally.requests == 300
    assert max(tally.by_status) < 500
    assert tally.by_status[422] > 50
    assert tally.by_status[400] > 50
    assert tally.right_before.keys() == RIGHT.keys()
    assert all(body.startswith(b"200 ") for body in tally.right_before.values())
    assert tally.right_after == tally.right_before
    # Nothing died of it and was replaced in silence.
    assert "stillroom_process_restarts_total{" not in httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_same_seed_makes_the_same_request(kind: Callable[[Random], Malformed]) -> None:
    assert [kind(Random(seed)) for seed in range(5)] == [kind(Random(seed)) for seed in range(5)]
    assert len({kind(Random(seed)).raw for seed in range(40)}) > 1


@pytest.mark.parametrize(
    ("said", "told"),
    [
        pytest.param(answer(500), "500", id="a-fault-of-the-server"),
        pytest.param(
            answer(422, b'{"detail": "no"}', "Content-Type: application/json"), "another form", id="a-form-not-ours"
        ),
        pytest.param(None, "no answer", id="a-connection-broken-off"),
    ],
)
def test_a_server_that_fails_is_told_of(said: bytes | None, told: str) -> None:
    right: set[str] = set()

    async def handler(asked: Asked) -> bytes | None:
        path = asked.head.split()[1]
        if path in RIGHT and path not in right:  # the first requests are the right ones
            right.add(path)
            return answer()
        return said

    with pretending(handler) as server:
        tally = asyncio.run(attack(f"http://127.0.0.1:{server.port}", requests=40, seed=0, owed_s=1))
    assert any(told in fault for fault in tally.faults)
    assert tally.right_after != tally.right_before
