"""Where a front process spends its time on one request of one text, in microseconds of CPU by part.

    python benchmarks/serve/front_cost.py [--requests 4000] [--rounds 7] [--connections 1 8] [--profile] [--out front_cost.json]

Everything but the sockets and the pipes of the system is the server's own code, in this process: bytes of requests go into `Connection`,
bytes of answers come out of it. The parts are measured by adding one after the other, in turns, and taking the differences of the
medians:

    connection   parse the head and the body, write the answer, with an app that does nothing
    middleware   id, access, limits, metrics, headers; the log is off, as with --no-access-log
    endpoint     decode and check the request, encode the answer; the model answers at once
    queue        the batcher: enter, take, be answered; a slot answers at once
    messages     pack the batch for a worker process, and read its answer

With several connections their requests come at once, as to a busy server: they share turns of the loop and batches.

What the system needs for sockets and pipes comes on top (`scaling.py` has the whole). `--profile` prints the functions by their own time.
"""

import argparse
import asyncio
import cProfile
import itertools
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from small_server import write_bundles
from starlette.responses import Response

from latency.measure.machine import machine_facts
from serve.http.access import Access, Bodies
from serve.http.app import create_app
from serve.http.connections.limits import Watch
from serve.http.connections.protocol import Connection
from serve.http.middleware import RequestMiddleware
from serve.model.work_items import LENGTH, Parts, Reply, Work, packed
from serve.observe.metrics import Metrics
from serve.settings import ConnectionLimits, ServeSettings

PARTS = ("connection", "middleware", "endpoint", "queue", "messages")
PATH = "/v1/entities"
BODY = json.dumps({"text": "order a table in Paris"}).encode()
HEADS = (
    f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
)
REQUEST = HEADS.encode() + BODY
ANSWER = b'[{"start":17,"end":22,"text":"Paris","label":"city","score":0.99}]'


class Wire:
    """A transport that keeps the last answer."""

    def __init__(self) -> None:
        self.answer = b""

    def write(self, data: bytes) -> None:
        self.answer = data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 50_000) if name in ("peername", "sockname") else None


def apps(bundle: Path) -> dict[str, Any]:
    """The app of each part, and of all parts before it."""
    answer = msgspec.json.encode({"model": "cities", "results": [msgspec.Raw(ANSWER)]})
    length = str(len(answer)).encode()

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        head = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": answer})

    async def direct(request: Any) -> Response:
        await request.body()
        return Response(answer, media_type="application/json")

    found: dict[str, Any] = {"connection": nothing}
    found["middleware"] = RequestMiddleware(
        nothing,
        metrics=Metrics(),
        endpoints=frozenset({PATH}),
        direct={PATH: direct},
        access=Access(),
        bodies=Bodies(1 << 30),
    )
    for part in PARTS[2:]:
        found[part] = create_app([bundle], ServeSettings(processes=1))
        model = found[part].state.service.models["cities"]
        if part == "endpoint":
            model.answers = at_once
        else:
            model.batcher.add_slot(messages(model._observe) if part == "messages" else slot)
    return found


async def at_once(works: list[Work], context: Any, answered: Any = None) -> list[bytes]:
    """The answers, without a model."""
    return [ANSWER] * len(works)


def slot(asked: list[Any], done: Callable[[int, bytes], None]) -> asyncio.Future[None]:
    """A worker that answers at once."""
    for place in range(len(asked)):
        done(place, ANSWER)
    return ended()


def ended() -> asyncio.Future[None]:
    """The end of a batch."""
    end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    end.set_result(None)
    return end


def messages(observe: Callable[[Parts], None]) -> Any:
    """A worker whose messages are made and read."""
    decoder = msgspec.msgpack.Decoder(Reply)

    @cache
    def reply(texts: int) -> bytes:
        parts = Parts(texts, 8 * texts, 8 * texts, 0.0001, 0.0005, 0.00005)
        return packed(Reply([(place, ANSWER) for place in range(texts)], [], [], [parts], last=True))[LENGTH.size :]

    def run(asked: list[Any], done: Callable[[int, bytes], None]) -> asyncio.Future[None]:
        packed([each.work for each in asked])
        said = decoder.decode(reply(len(asked)))
        for parts in said.parts:
            observe(parts)
        for place, answer in said.answers:
            done(place, answer)
        return ended()

    return run


async def asked(app: Any, count: int, connections: int) -> float:
    """CPU seconds of this process for each of `count` requests, one on each connection at a time."""
    watch = Watch(ConnectionLimits(), Metrics())
    wired = [(Connection(app, watch), Wire()) for _ in range(connections)]
    for connection, wire in wired:
        connection.connection_made(wire)  # type: ignore[arg-type]
    for turns in (count // connections // 4, count // connections):  # the first are to warm up
        began_s = time.process_time()
        for _ in itertools.repeat(None, turns):
            for connection, wire in wired:
                wire.answer = b""
                connection.data_received(REQUEST)
            while not all(wire.answer for _, wire in wired):
                await asyncio.sleep(0)
        taken_s = time.process_time() - began_s
    for _, wire in wired:
        if not wire.answer.startswith(b"HTTP/1.1 200") or b"Paris" not in wire.answer:
            sys.exit(f"a wrong answer: {wire.answer!r}")
    return taken_s / (count // connections * connections)


async def measured(given: argparse.Namespace, bundle: Path, connections: int) -> dict[str, list[float]]:
    """Microseconds of a request with each part and those before it, by rounds."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    of = apps(bundle)
    for _ in range(given.rounds):
        for part in PARTS:
            found[part].append(1e6 * await asked(of[part], given.requests, connections))
    if given.profile:
        with cProfile.Profile() as profile:
            await asked(of[PARTS[-1]], given.requests, connections)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return found


def table(found: dict[str, list[float]], connections: int) -> list[dict[str, Any]]:
    """A row for each part, and one for all; printed too."""
    rows, before = [], [0.0] * len(found[PARTS[0]])
    for part in (*PARTS, "all"):
        added = before if part == "all" else [now - then for now, then in zip(found[part], before, strict=True)]
        before = found.get(part, before)
        middle, lowest, highest = (round(each, 1) for each in (statistics.median(added), min(added), max(added)))
        rows.append({"connections": connections, "part": part, "us": middle, "lowest": lowest, "highest": highest})
        print(json.dumps(rows[-1]))
    return rows


def main() -> None:
    """Measure and print."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--requests", type=int, default=4000)
    reader.add_argument("--rounds", type=int, default=7)
    reader.add_argument("--connections", type=int, nargs="+", default=[1, 8])
    reader.add_argument("--profile", action="store_true")
    reader.add_argument("--out", type=Path)
    given = reader.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundles(Path(folder))[0]
        for connections in given.connections:
            rows += table(uvloop.run(measured(given, bundle, connections)), connections)
    if given.out:
        given.out.write_text(json.dumps({"machine": machine_facts(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
