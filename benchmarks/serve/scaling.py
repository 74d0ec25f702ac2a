"""How evenly connections spread over the processes of a server, and how requests a second grow with them, with a model that sleeps.

    python benchmarks/serve/scaling.py [--processes 1 2 4 8 16] [--connections 4] [--seconds 4] [--rounds 3] [--starts 0]
        [--out scaling.json]

The model is a small table whose every run sleeps 1 ms and computes next to nothing, so that more processes than cores can work at once.
Each request has one text, on connections that stay open: `--connections` for each process.

Shown: requests a second (median of the rounds, lowest and highest), core time a request, and of all requests the share of the busiest
process, as a multiple of an equal share. Every answer is compared with the first; the exit code is 1 if
one differs. `--starts` starts a server of two processes so often, and shows p50 of two connections that stay open over that of one.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from running import Server, drive, get, post, serving, text_body
from small_server import write_bundles

from latency.measure.machine import machine_facts

STUB = Path(__file__).with_name("sleeping_model")
MOST_OVER_ONE = 1.1
TEXT = "order a table in Paris"


def measured(server: Server, connections: int, seconds: float) -> dict[str, Any]:
    """Requests a second, core time, and the answers of the busiest process."""
    requests = [post(server.place, "/v1/entities", text_body(TEXT))] * 64
    drive(server.place, requests, connections=connections)  # warm
    before, answered_before = core_s(server), answered(server)
    count = max(64, round(seconds * 64 / max(1e-3, drive(server.place, requests, connections=connections).seconds)))
    driven = drive(server.place, requests[:1] * count, connections=connections)
    spent = {pid: after - before.get(pid, 0.0) for pid, after in core_s(server).items()}
    counts = [now - answered_before.get(process, 0.0) for process, now in answered(server).items()]
    return {
        "requests_per_s": len(driven.bodies) / driven.seconds,
        "core_us_a_request": 1e6 * sum(spent.values()) / sum(counts),
        "busiest_of_equal": max(counts) * len(counts) / sum(counts),
        "answers": {results(body) for body in driven.bodies},
    }


def two_over_one(server: Server) -> float:
    """p50 of two connections that stay open, over that of one: the median of three turns of each, 200 requests a connection."""
    requests = [post(server.place, "/v1/entities", text_body(TEXT))] * 200

    def p50_ms(connections: int) -> float:
        return float(np.median(drive(server.place, requests * connections, connections=connections).latencies_ms))

    turns = [(p50_ms(2), p50_ms(1)) for _ in range(3)]
    return statistics.median(two / one for two, one in turns)


def core_s(server: Server) -> dict[int, float]:
    """Core-seconds of each process."""
    return {each.pid: sum(each.cpu_times()[:2]) for each in server.tree()}


def answered(server: Server) -> dict[str, float]:
    """Requests answered, of each process."""
    text = get(server.place, "/metrics")[1].decode()
    series = r'^stillroom_requests_total{process="(\d+)",endpoint="/v1/entities",status="200"} (\S+)$'
    return {process: float(count) for process, count in re.findall(series, text, re.MULTILINE)}


def results(body: bytes | None) -> str:
    """What was found in the text."""
    return json.dumps(json.loads(body or b"{}").get("results"))


def main() -> int:
    """Measure and print; 1 if an answer differs."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    reader.add_argument("--connections", type=int, default=4)
    reader.add_argument("--seconds", type=float, default=4.0)
    reader.add_argument("--rounds", type=int, default=3)
    reader.add_argument("--starts", type=int, default=0)
    reader.add_argument("--out", type=Path)
    given = reader.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STUB), *filter(None, [os.environ.get("PYTHONPATH")])])
    rows, answers = [], set()
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundles(Path(folder))[0]
        found: dict[int, list[dict[str, Any]]] = {n: [] for n in given.processes}
        for _ in range(given.rounds):
            for processes, each in found.items():
                with serving([bundle], "--processes", str(processes), "--no-access-log") as server:
                    each.append(measured(server, given.connections * processes, given.seconds))
        for processes, each in found.items():
            rates = [one["requests_per_s"] for one in each]
            row: dict[str, Any] = {"processes": processes, "connections": given.connections * processes}
            row |= {
                "requests_per_s": round(statistics.median(rates)),
                "lowest": round(min(rates)),
                "highest": round(max(rates)),
            }
            row["core_us_a_request"] = round(statistics.median(one["core_us_a_request"] for one in each))
            row["busiest_of_equal"] = round(max(one["busiest_of_equal"] for one in each), 3)
            rows.append(row)
            answers |= set().union(*(one["answers"] for one in each))
            print(json.dumps(row), flush=True)
        starts: list[float] = []
        for _ in range(given.starts):
            with serving([bundle], "--processes", "2", "--no-access-log") as server:
                starts.append(round(two_over_one(server), 3))
        if starts:
            within = sum(each <= MOST_OVER_ONE for each in starts)
            middle = statistics.median(starts)
            print(f"p50 of two connections over one: {middle}, at most {MOST_OVER_ONE} in {within} of {len(starts)}")
    if given.out:
        document = {"machine": machine_facts(), "rows": rows, "two_over_one": starts}
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"different answers: {len(answers)}")
    return int(len(answers) != 1)


if __name__ == "__main__":
    sys.exit(main())
