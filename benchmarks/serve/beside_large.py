"""The latency of single short texts while other clients send the server very long texts, or very many at once.

    python benchmarks/serve/beside_large.py BUNDLE TEXTS [--seconds 10] [--rounds 3] [--share 0.2] [--options '--processes 2'] [--json F]

Single texts of TEXTS arrive by a Poisson process, at `--share` of the rate that the server reaches with them alone in a closed loop.
Three conditions take turns: nobody else asks; one client sends texts of LONG_WORDS words, one after the other, on a connection that
stays open; another one sends requests of MANY texts in the same way. Shown for each: p50, p90 and p99 of the single texts from the
moment they were due, how many were refused, and what the other client got done. Every answer to a single text is compared with that
of `Pipeline`; the exit code is 1 if one differs, or if another client's answer is not 200 or 429.
"""

import argparse
import contextlib
import http.client
import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from running import Place, Server, drive, endpoint, post, results_of, serving, text_body

from compress.data.texts import read_texts
from latency.load.driver import poisson_s
from latency.measure.machine import machine_facts
from serve.model.pipeline import Pipeline

LONG_WORDS = 5000
MANY = 1000
CONNECTIONS = 64
REFUSED = 429
WORTH_WAITING_S = 0.05  # before a refused client asks again


def large_bodies(texts: list[str]) -> dict[str, bytes | None]:
    """What the other client sends, by condition."""
    chance = random.Random(0)
    words = " ".join(texts).split()
    return {
        "alone": None,
        f"texts of {LONG_WORDS:,} words": text_body(" ".join(chance.choices(words, k=LONG_WORDS))),
        f"requests of {MANY:,} texts": text_body(chance.choices(texts, k=MANY)),
    }


@contextlib.contextmanager
def asked_for(place: Place, path: str, body: bytes | None) -> Iterator[Counter[int]]:
    """A client that sends `body` again and again within this context; the statuses that it got."""
    got: Counter[int] = Counter()
    ended = threading.Event()

    def ask() -> None:
        with contextlib.closing(http.client.HTTPConnection(*place, timeout=60)) as connection:
            while not ended.is_set():
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                got[answer.status] += 1
                if answer.status == REFUSED:
                    ended.wait(WORTH_WAITING_S)

    asking = threading.Thread(target=ask, daemon=True)
    if body is not None:
        asking.start()
        time.sleep(0.5)
    yield got
    ended.set()
    if body is not None:
        asking.join(60)


def turn(
    server: Server, path: str, body: bytes | None, singles: list[str], right: list[Any], due_s: Any
) -> dict[str, Any]:
    """One condition, once."""
    requests = [post(server.place, path, text_body(text)) for text in singles]
    with asked_for(server.place, path, body) as got:
        driven = drive(server.place, requests, connections=CONNECTIONS, due_s=due_s)
    good = [status == 200 for status in driven.became]
    wrong = sum(
        fine and results_of(answer) != [known] for fine, answer, known in zip(good, driven.bodies, right, strict=True)
    )
    p50, p90, p99 = np.percentile(driven.latencies_ms, (50, 90, 99))
    return {
        "p50_ms": float(p50), "p90_ms": float(p90), "p99_ms": float(p99), "wrong": wrong,
        "refused": driven.having(REFUSED), "lost": len(good) - sum(good) - driven.having(REFUSED),
        "large_done": got[200] / driven.seconds, "large_refused": got[REFUSED], "large_other": sum(got.values()) - got[200] - got[REFUSED],
    }  # fmt: skip


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("bundle", type=Path)
    reader.add_argument("texts", type=Path)
    reader.add_argument("--seconds", type=float, default=10)
    reader.add_argument("--rounds", type=int, default=3)
    reader.add_argument("--share", type=float, default=0.2)
    reader.add_argument("--options", default="")
    reader.add_argument("--json", type=Path)
    given = reader.parse_args()
    texts, path = read_texts(given.texts), endpoint(given.bundle)
    answers = [json.loads(msgspec.json.encode(answer)) for answer in Pipeline(given.bundle, threads=1)(texts)]
    bodies, chance = large_bodies(texts), random.Random(1)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in bodies}
    with serving([given.bundle], "--no-access-log", *given.options.split()) as server:
        warm = [post(server.place, path, text_body(text)) for text in texts]
        rate = given.share * len(warm) / drive(server.place, warm, connections=32).seconds
        for turned in range(given.rounds):
            for name in chance.sample(list(bodies), len(bodies)):
                due_s = poisson_s(rate, round(rate * given.seconds), seed=turned)
                places = [chance.randrange(len(texts)) for _ in due_s]
                singles, right = [texts[place] for place in places], [answers[place] for place in places]
                found[name].append(turn(server, path, bodies[name], singles, right, due_s))
                print(json.dumps({"beside": name, **found[name][-1]}), flush=True)
    rows = [
        {"beside": name, "rate": round(rate, 1)}
        | {key: round(statistics.median(each[key] for each in turns), 2) for key in turns[0]}
        | {
            "p99_ms_lowest": min(each["p99_ms"] for each in turns),
            "p99_ms_highest": max(each["p99_ms"] for each in turns),
        }
        for name, turns in found.items()
    ]
    print(json.dumps(rows, indent=1))
    if given.json:
        given.json.write_text(json.dumps({"machine": machine_facts(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return int(any(each["wrong"] or each["lost"] or each["large_other"] for turns in found.values() for each in turns))


if __name__ == "__main__":
    raise SystemExit(main())
