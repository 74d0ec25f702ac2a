"""Send malformed requests of many kinds to a server: none may cause a 5xx, and right requests must keep their answers.

    python benchmarks/serve/malformed.py --requests 10000 --seed 0 [URL | BUNDLE...]

Without an argument it serves five small models, whose names the requests use. It counts answers by status, answers with a 5xx,
answers that are not in the server's format, and connections that end without an answer. Before and after, it sends right requests
and compares their answers. Some bodies never end; their connections stay open throughout, and the server must answer others
meanwhile. The exit code is 1 if there is a fault (a 5xx, a missing answer or another format), or if a right answer has changed.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

if __package__:
    from benchmarks.serve.malformations import KINDS, RIGHT, Malformed, right
    from benchmarks.serve.small_server import serving, small_server
else:
    from malformations import KINDS, RIGHT, Malformed, right
    from small_server import serving, small_server

AT_ONCE = 32
# Time limit of an answer that the server must give, and of one that it need not give.
OWED_S = 30.0
UNOWED_S = 0.5
# Most bodies without an end that are open at once.
MOST_ENDLESS = 12


@dataclass
class Tally:
    """The outcomes of the requests."""

    by_status: Counter[int] = field(default_factory=Counter)
    """Answers by status."""
    by_kind: dict[str, Counter[str]] = field(default_factory=dict)
    """Outcomes by kind of request: a status, `no answer` or `waiting`."""
    faults: list[str] = field(default_factory=list)
    """Answers with a 5xx, missing answers, and answers in another format, each with the request."""
    right_before: dict[str, bytes] = field(default_factory=dict)
    """The answers to right requests before, by path."""
    right_after: dict[str, bytes] = field(default_factory=dict)
    """The same after the malformed requests."""

    @property
    def requests(self) -> int:
        """How many requests were sent."""
        return sum(outcomes.total() for outcomes in self.by_kind.values())

    @property
    def unanswered(self) -> int:
        """How many connections ended without an answer."""
        return sum(outcomes["no answer"] + outcomes["waiting"] for outcomes in self.by_kind.values())


async def attack(url: str, requests: int, seed: int, owed_s: float = OWED_S) -> Tally:
    """Sends malformed requests to the server at `url`, and right ones before and after.

    An answer that the server must give has to come within `owed_s`.
    """
    place = urlsplit(url)
    assert place.hostname
    assert place.port
    host, port = place.hostname, place.port
    chance, tally = Random(seed), Tally()
    tally.right_before = await _right_answers(host, port, owed_s)
    slots, endless = asyncio.Semaphore(AT_ONCE), []

    async def one(name: str, malformed: Malformed) -> None:
        async with slots:
            await _sent(host, port, name, malformed, owed_s, tally)

    async with asyncio.TaskGroup() as group:
        for _ in range(requests):
            kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
            malformed = kind(chance)
            while malformed.endless and len(endless) == MOST_ENDLESS:
                kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
                malformed = kind(chance)
            if malformed.endless:
                endless.append(await _left_open(host, port, malformed))
                continue
            await slots.acquire()  # so that requests are not made far ahead
            slots.release()
            group.create_task(one(kind.__name__, malformed))
    tally.right_after = await _right_answers(host, port, owed_s)
    for reader, writer in endless:
        outcome = "waiting"
        with contextlib.suppress(TimeoutError):
            try:
                outcome = _noted(await asyncio.wait_for(_answer(reader), UNOWED_S), "endless", b"", tally)
            except (EOFError, ConnectionError):
                outcome = "no answer"
        tally.by_kind.setdefault("endless", Counter())[outcome] += 1
        await _closed(writer)
    return tally


async def _right_answers(host: str, port: int, owed_s: float) -> dict[str, bytes]:
    """Status and body of the answers to right requests, by path; `no answer` where there is none."""
    found = {}
    for path in RIGHT:
        reader, writer = await asyncio.open_connection(host, port)
        found[path] = b"no answer"
        with contextlib.suppress(TimeoutError, EOFError, ConnectionError):
            writer.write(right(path))
            status, _, body = await asyncio.wait_for(_answer(reader), owed_s)
            found[path] = b"%d " % status + body
        await _closed(writer)
    return found


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _left_open(host: str, port: int, malformed: Malformed) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(malformed.raw)
    return reader, writer


async def _sent(host: str, port: int, name: str, malformed: Malformed, owed_s: float, tally: Tally) -> None:
    """Sends one request and counts its outcome."""
    reader, writer = await asyncio.open_connection(host, port)
    outcome = "no answer"
    try:
        with contextlib.suppress(ConnectionError):  # refused while it is sent; there may be an answer nevertheless
            writer.write(malformed.raw)
            await writer.drain()
        answer = await asyncio.wait_for(_answer(reader), owed_s if malformed.answered else UNOWED_S)
        outcome = _noted(answer, name, malformed.raw, tally)
    except TimeoutError:
        outcome = "waiting"
    except (EOFError, ConnectionError, ValueError):
        outcome = "no answer"
    finally:
        await _closed(writer)
    if malformed.answered and not outcome.isdigit():
        tally.faults.append(f"{name}: {outcome} to {malformed.raw[:300]!r}")
    tally.by_kind.setdefault(name, Counter())[outcome] += 1


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer; IncompleteReadError when the connection ends before."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        if status >= 200:  # lower ones are interim answers
            break
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    if "content-length" not in headers:
        return status, headers, await reader.read()
    size = int(headers["content-length"])
    body = await reader.read(size)  # none to HEAD
    return status, headers, body if len(body) in {0, size} else body + await reader.readexactly(size - len(body))


def _noted(answer: tuple[int, dict[str, str], bytes], name: str, raw: bytes, tally: Tally) -> str:
    """Counts an answer; returns its status."""
    status, headers, body = answer
    tally.by_status[status] += 1
    if status >= 500:
        tally.faults.append(f"{name}: {status} {body[:300]!r} to {raw[:300]!r}")
    elif status >= 400 and body and headers.get("content-type") == "application/json":
        error = json.loads(body).get("error")
        if not (isinstance(error, str) or (isinstance(error, dict) and {"code", "message"} <= error.keys())):
            tally.faults.append(f"{name}: {status} in another format, {body[:300]!r} to {raw[:300]!r}")
    return str(status)


def main() -> int:
    """Sends the requests and prints the outcomes."""
    parser = argparse.ArgumentParser(description="Send malformed requests to a server.")
    parser.add_argument(
        "target", nargs="*", help="the URL of a running server, or bundles to serve (default: three small ones)"
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if asked.target[:1] and asked.target[0].startswith("http://"):
            url = asked.target[0]
        elif asked.target:
            url = stack.enter_context(serving([Path(bundle) for bundle in asked.target]))
        else:
            url = stack.enter_context(small_server())
        tally = asyncio.run(attack(url, asked.requests, asked.seed))
    for kind, outcomes in sorted(tally.by_kind.items()):
        print(f"{kind:16}", "  ".join(f"{outcome}: {count}" for outcome, count in sorted(outcomes.items())))
    for fault in tally.faults:
        print("FAULT", fault)
    from_500 = sum(count for status, count in tally.by_status.items() if status >= 500)
    same = tally.right_before == tally.right_after
    print(
        f"{tally.requests} requests; by status {dict(sorted(tally.by_status.items()))}; {from_500} with a 5xx; "
        f"{tally.unanswered} connections without an answer; {len(tally.faults)} faults; "
        f"right requests afterwards: {'the same answers' if same else 'OTHER ANSWERS'}"
    )
    return 0 if same and not tally.faults else 1


if __name__ == "__main__":
    sys.exit(main())
