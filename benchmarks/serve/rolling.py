"""Restart every server behind haproxy under load, and go from one server to four and back: is a request lost, or an answer wrong?

    python benchmarks/serve/rolling.py BUNDLE TEXTS [--requests 50000] [--connections 8] [--linger-s 2] [--json F]

haproxy has the config of `deploy/haproxy/`. The load is a closed loop of one text a request over `--connections` connections that stay
open. Every answer is compared, byte for byte, with that of one server alone. The parts are

  rolling   two servers; each in turn gets SIGTERM, ends, starts, and is up again, over and over until the load ends
  scaling   one server; three more start one after another, and stop one after another
  killed    as rolling, but each server gets SIGKILL, without notice

A request failed if its answer is not that of the server alone, with status 200: refusals (429, 503) are failures too. `resent` counts
queries that the client had to send again because haproxy closed an idle connection. The exit code is 1 if a request failed in the first
two parts.
"""

import argparse
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from behind_haproxy import FRONT_PORT, LINGER_S, SERVERS, Cluster, behind_haproxy
from running import Place, drive, endpoint, post, text_body

from compress.data.texts import read_texts
from latency.measure.machine import machine_facts

TWO = ("one", "two")


def rolled(cluster: Cluster, ended: threading.Event, *, killed: bool = False) -> list[str]:
    """Restarts the servers in turn until the load has `ended`; each once at least. The names of those restarted."""
    restarted = []
    while not ended.is_set() or not restarted:
        for name in TWO:
            (cluster.kill if killed else cluster.stop)(name)
            cluster.start(name)
            restarted.append(name)
    return restarted


def scaled(cluster: Cluster, ended: threading.Event) -> list[str]:
    """Goes from one server to four and back until the load has `ended`; once at least. The names of those started and stopped."""
    done = []
    more = list(SERVERS)[1:]
    while not ended.is_set() or not done:
        for name in more:
            cluster.start(name)
        for name in reversed(more):
            cluster.stop(name)
        done += [*more, *more]
    return done


def under_load(
    cluster: Cluster,
    path: str,
    texts: list[str],
    requests: int,
    connections: int,
    change: Callable[[Cluster, threading.Event], list[str]],
) -> dict[str, Any]:
    """Sends `requests` while `change` changes the servers, and says what came of them."""
    alone, front = Place(cluster.host, SERVERS["one"]), Place(cluster.host, FRONT_PORT)
    right = drive(alone, [post(alone, path, text_body(text)) for text in texts], connections=1)
    if right.having(200) < len(texts):
        raise RuntimeError(f"a server alone does not answer: {Counter(right.became)}")
    posts = [post(front, path, text_body(text)) for text in texts]
    order = [number % len(texts) for number in range(requests)]
    before, ended, done, errors = cluster.table(), threading.Event(), list[str](), list[Exception]()

    def changing() -> None:
        try:
            done.extend(change(cluster, ended))
        except Exception as error:  # told below: this thread has nobody to tell
            errors.append(error)

    thread = threading.Thread(target=changing)
    thread.start()
    try:
        driven = drive(front, [posts[place] for place in order], connections=connections)
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]
    wrong = sum(
        status == 200 and body != right.bodies[place]
        for place, status, body in zip(order, driven.became, driven.bodies, strict=True)
    )
    p50_ms, p99_ms = np.percentile(driven.latencies_ms, (50, 99)).tolist()
    after = cluster.table()
    return {
        "requests": requests, "failed": requests - driven.having(200) + wrong, "wrong": wrong, "resent": driven.resent,
        "became": {str(became): count for became, count in Counter(driven.became).items()},
        "changes": len(done), "seconds": round(driven.seconds, 1), "answers_per_s": round(driven.having(200) / driven.seconds),
        "p50_ms": round(p50_ms, 2), "p99_ms": round(p99_ms, 2), "longest_ms": round(float(driven.latencies_ms.max()), 1),
        "haproxy": {
            what: int(after["BACKEND"][column]) - int(before["BACKEND"][column])
            for what, column in (("retries", "wretr"), ("sent_to_another", "wredis"), ("empty_answers", "eresp"))
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--linger-s", type=float, default=LINGER_S, help="of each server")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    texts, path = read_texts(given.texts), endpoint(given.bundle)
    parts: dict[str, tuple[tuple[str, ...], Callable[[Cluster, threading.Event], list[str]]]] = {
        "rolling": (TWO, rolled),
        "scaling": (TWO[:1], scaled),
        "killed": (TWO, lambda cluster, ended: rolled(cluster, ended, killed=True)),
    }
    found: dict[str, Any] = {"machine": machine_facts(), "linger_s": given.linger_s, "connections": given.connections}
    for name, (servers, change) in parts.items():
        with tempfile.TemporaryDirectory() as folder:
            with behind_haproxy(given.bundle, Path(folder), servers=servers, linger_s=given.linger_s) as cluster:
                found[name] = under_load(cluster, path, texts, given.requests, given.connections, change)
        print(f"{name:10s}{json.dumps(found[name])}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return int(found["rolling"]["failed"] > 0 or found["scaling"]["failed"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
