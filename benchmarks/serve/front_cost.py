"""Where a front process spends its time on one request of one text, in microseconds of CPU by part.

    python benchmarks/serve/front_cost.py [--requests 4000] [--rounds 7] [--profile] [--out front_cost.json]

Everything but the sockets and the pipes of the system is the server's own code, in this process: bytes of requests go into `Connection`,
bytes of answers come out of it. The parts are measured by adding one after the other, in turns, and taking the differences of the
medians:

    connection   parse the head and the body, write the answer, with an app that does nothing
    middleware   id, access, limits, metrics, headers; the log is off, as with --no-access-log
    endpoint     decode and check the request, encode the answer; the model answers at once
    queue        the batcher: enter, take, be answered; a slot answers at once
    messages     pack the batch for a worker process, and read its answer

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
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from small_server import write_bundles
from starlette.responses import Response

from latency.measure.machine import machine_facts
from serve.http.app import create_app
from serve.http.auth.access import Access, Bodies
from serve.http.connections.limits import Watch
from serve.http.connections.protocol import Connection
from serve.http.middleware import RequestMiddleware
from serve.model.work_items import Parts, Reply, Work, packed
from serve.observe.metrics import Metrics
from serve.settings import ConnectionLimits

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
        found[part] = create_app([bundle], processes=1)
        model = found[part].state.service.models["cities"]
        if part == "endpoint":
            model.answers = at_once
        else:
            model.batcher.add_slot(messages(model._observe) if part == "messages" else slot)
    return found


async def at_once(works: list[Work], context: Any) -> list[bytes]:
    """The answers, without a model."""
    return [ANSWER] * len(works)


async def slot(asked: list[Any], done: Callable[[int, bytes], None]) -> None:
    """A worker that answers at once."""
    for place in range(len(asked)):
        done(place, ANSWER)


def messages(observe: Callable[[Parts], None]) -> Any:
    """A worker whose messages are made and read."""
    reply = packed(Reply([(0, ANSWER)], [], [], [Parts(1, 8, 8, 0.0001, 0.0005, 0.00005)], last=True))[4:]
    decoder = msgspec.msgpack.Decoder(Reply)

    async def run(asked: list[Any], done: Callable[[int, bytes], None]) -> None:
        packed([each.work for each in asked])
        said = decoder.decode(reply)
        for parts in said.parts:
            observe(parts)
        for place, answer in said.answers:
            done(place, answer)

    return run


async def asked(app: Any, count: int) -> float:
    """CPU seconds of this process for each of `count` requests."""
    watch = Watch(ConnectionLimits(), Metrics())
    connection, wire = Connection(app, watch), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    for left in (count // 4, count):  # the first are to warm up
        began_s = time.process_time()
        for _ in itertools.repeat(None, left):
            wire.answer = b""
            connection.data_received(REQUEST)
            while not wire.answer:
                await asyncio.sleep(0)
        taken_s = time.process_time() - began_s
    if not wire.answer.startswith(b"HTTP/1.1 200") or b"Paris" not in wire.answer:
        sys.exit(f"a wrong answer: {wire.answer!r}")
    return taken_s / count


async def measured(given: argparse.Namespace, bundle: Path) -> dict[str, list[float]]:
    """Microseconds of a request with each part and those before it, by rounds."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    of = apps(bundle)
    for _ in range(given.rounds):
        for part in PARTS:
            found[part].append(1e6 * await asked(of[part], given.requests))
    if given.profile:
        with cProfile.Profile() as profile:
            await asked(of[PARTS[-1]], given.requests)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return found


def main() -> None:
    """Measure and print."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--requests", type=int, default=4000)
    reader.add_argument("--rounds", type=int, default=7)
    reader.add_argument("--profile", action="store_true")
    reader.add_argument("--out", type=Path)
    given = reader.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(measured(given, write_bundles(Path(folder))[0]))
    rows, before = [], [0.0] * given.rounds
    for part in PARTS:
        added = [now - then for now, then in zip(found[part], before, strict=True)]
        rows.append(
            {
                "part": part,
                "us": round(statistics.median(added), 1),
                "lowest": round(min(added), 1),
                "highest": round(max(added), 1),
            }
        )
        before = found[part]
        print(json.dumps(rows[-1]))
    rows.append(
        {
            "part": "all",
            "us": round(statistics.median(before), 1),
            "lowest": round(min(before), 1),
            "highest": round(max(before), 1),
        }
    )
    print(json.dumps(rows[-1]))
    if given.out:
        given.out.write_text(json.dumps({"machine": machine_facts(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
