"""Load a server with several times its capacity, and measure its answers, refusals, memory and recovery.

    python benchmarks/serve/overload.py BUNDLE TEXTS [--times 5] [--seconds 60] [--a-request 1] [--connections 1000] [--timeout-s 10]
        [--json F]

A closed loop first measures the capacity. Then requests are sent at `--times` that rate, as by many independent users (a Poisson
process), whether or not earlier ones are answered. Latency counts from the time a request was due; the client gives up `--timeout-s`
after it. Each answer is compared with that of `Pipeline`. The exit code is 1 if an answer is wrong, or if a request ended in any other
way than with a 200, a 429 or a timeout.

Recovery: after the load, one connection sends one text after another. The result is the time until the p99 of WINDOW of them is within
1.5 times the p99 before the load.
"""

import argparse
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from running import Server, drive, endpoint, post, results_of, serving, text_body

from compress.data.texts import read_texts
from latency.load.driver import TIMEOUT, Driven, poisson_s
from latency.measure.machine import machine_facts
from serve.model.pipeline import Pipeline

REFUSED = 429
WINDOW = 300  # single requests of one p99
NORMAL = 1.5  # times the p99 before the load
GIVE_UP_S = 60.0  # longest wait for recovery
CAPACITY_CONNECTIONS = 32
SAMPLE_S = 0.25  # between two samples of memory


class Memory(threading.Thread):
    """Samples the memory of the server's processes until it is stopped."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.rss_bytes = [server.rss_bytes()]
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(SAMPLE_S):
            self.rss_bytes.append(self.server.rss_bytes())

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        self.rss_bytes.append(self.server.rss_bytes())


class Singles:
    """Single requests one after another, on one connection."""

    def __init__(self, server: Server, requests: list[bytes]) -> None:
        self.server, self.requests = server, requests
        self.chance = random.Random(2)

    def window(self) -> tuple[float, int]:
        """The p99 in ms of WINDOW of them, and how many were not answered with 200."""
        driven = drive(self.server.place, self.chance.choices(self.requests, k=WINDOW), connections=1)
        latencies_ms = driven.latencies_ms
        return float(np.percentile(latencies_ms, 99)) if len(latencies_ms) else np.inf, WINDOW - len(latencies_ms)

    def normal_after_s(self, bound_ms: float) -> float | None:
        """Seconds until the start of the first window within the bound with every request answered; None after GIVE_UP_S."""
        began_s = time.perf_counter()
        while (at_s := time.perf_counter() - began_s) < GIVE_UP_S:
            p99_ms, unanswered = self.window()
            if p99_ms <= bound_ms and not unanswered:
                return at_s
        return None


def of_statuses(driven: Driven) -> dict[str, int]:
    return dict(sorted(Counter(map(str, driven.became)).items()))


def percentiles_ms(times_ms: np.ndarray) -> dict[str, float] | None:
    if not len(times_ms):
        return None
    return {f"p{percent}": round(float(np.percentile(times_ms, percent)), 2) for percent in (50, 90, 99, 100)}


def overloaded(server: Server, path: str, texts: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """The whole measurement."""
    right = [json.loads(msgspec.json.encode(each)) for each in Pipeline(given.bundle, threads=1)(texts)]
    chance = random.Random(0)
    groups = [chance.choices(range(len(texts)), k=given.a_request) for _ in range(len(texts))]
    requests = [
        post(server.place, path, text_body([texts[i] for i in group] if len(group) > 1 else texts[group[0]]))
        for group in groups
    ]
    singles = Singles(server, [post(server.place, path, text_body(text)) for text in texts])
    drive(server.place, requests, connections=CAPACITY_CONNECTIONS)  # warms up
    capacities = []
    for _ in range(3):
        driven = drive(server.place, requests * given.capacity_passes, connections=CAPACITY_CONNECTIONS)
        capacities.append(len(driven.became) / driven.seconds)
    capacity = float(np.median(capacities))
    before_ms = float(np.median([singles.window()[0] for _ in range(5)]))
    rate = given.times * capacity
    queries = round(rate * given.seconds)
    order = random.Random(1).choices(range(len(groups)), k=queries)
    memory = Memory(server)
    memory.start()
    recovery: dict[str, float | None] = {}

    def recover() -> None:
        recovery["s"] = singles.normal_after_s(NORMAL * before_ms)

    recovering = threading.Thread(target=recover)
    timer = threading.Timer(given.seconds, recovering.start)
    timer.start()
    before_s = sum(server.core_s())
    driven = drive(
        server.place, [requests[i] for i in order], connections=given.connections, due_s=poisson_s(rate, queries, 0),
        timeout_s=given.timeout_s,
    )  # fmt: skip
    server_s = sum(server.core_s()) - before_s
    timer.join()
    recovering.join()
    memory.stop()
    statuses = np.array([became if isinstance(became, int) else 0 for became in driven.became])
    wrong = sum(
        results_of(driven.bodies[query]) != [right[place] for place in groups[order[query]]]
        for query in np.flatnonzero(statuses == 200)
    )
    return {
        "capacity_requests_per_s": capacities, "rate_per_s": rate, "queries": queries, "statuses": of_statuses(driven),
        "admitted_per_s": driven.having(200) / given.seconds,
        "admitted_ms": percentiles_ms(driven.latencies_ms),
        "admitted_from_sent_ms": percentiles_ms(((driven.ended_s - driven.sent_s) * 1000)[statuses == 200]),
        "refused_share": driven.having(REFUSED) / queries,
        "refused_ms": percentiles_ms(((driven.ended_s - driven.due_s) * 1000)[statuses == REFUSED]),
        "refused_from_sent_ms": percentiles_ms(((driven.ended_s - driven.sent_s) * 1000)[statuses == REFUSED]),
        "client_late_ms": percentiles_ms(((driven.sent_s - driven.due_s) * 1000)[driven.sent_s > 0]),
        "cores": {"client": driven.core_s / driven.seconds, "server": server_s / driven.seconds},
        "wrong": int(wrong), "unexplained": int(sum(became not in (200, REFUSED, TIMEOUT) for became in driven.became)),
        "rss_mib": {
            "start": memory.rss_bytes[0] / 2**20, "peak": max(memory.rss_bytes) / 2**20, "end": memory.rss_bytes[-1] / 2**20,
        },
        "p99_before_ms": before_ms, "normal_after_s": recovery.get("s"),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--times", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--a-request", type=int, default=1, help="texts")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--timeout-s", type=float, default=10.0)
    parser.add_argument(
        "--capacity-passes", type=int, default=20, help="over the texts, for each of three measurements"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with serving([given.bundle]) as server:
        found = overloaded(server, endpoint(given.bundle), read_texts(given.texts), given)
    document = {"machine": machine_facts(), "a_request": given.a_request, "times": given.times, **found}
    for key, value in found.items():
        print(f"{key:28s}{json.dumps(value)}")
    if given.json:
        given.json.write_text(json.dumps(document, indent=1))
    return int(bool(found["wrong"] or found["unexplained"]))


if __name__ == "__main__":
    raise SystemExit(main())
