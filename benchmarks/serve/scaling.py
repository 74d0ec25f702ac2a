"""Does any process read for all? Requests a second and the busiest process, by worker and front processes, with a model that sleeps.

    python benchmarks/serve/scaling.py [--processes 1 2 4 8 16] [--connections 32] [--seconds 4] [--rounds 3] [--out scaling.json]

The model is a small table whose every run sleeps 1 ms and computes next to nothing, so that more worker processes than cores can work at
once. Each request has one text, on connections that stay open. For each number of worker processes the server runs with one front
process and with as many as it takes by itself, in turns. Then 2, 8 and 32 connections ask a server of four fronts: the share of the
requests that the busiest front answered (0.25 is even).

Shown: requests a second (median of the rounds, lowest and highest), and of the core-seconds of all server processes the share of the
busiest one. Every answer is compared with the first; the exit code is 1 if one differs.
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

from running import Server, drive, get, post, serving, text_body
from small_server import write_bundles

from latency.measure.machine import machine_facts

STUB = Path(__file__).with_name("sleeping_model")
TEXT = "order a table in Paris"


def measured(server: Server, connections: int, seconds: float) -> dict[str, Any]:
    """Requests a second, the busiest process, and the answers of each front."""
    requests = [post(server.place, "/v1/entities", text_body(TEXT))] * 64
    drive(server.place, requests, connections=connections)  # warm
    before, answered_before = core_s(server), answered(server)
    count = max(64, round(seconds * 64 / max(1e-3, drive(server.place, requests, connections=connections).seconds)))
    driven = drive(server.place, requests[:1] * count, connections=connections)
    spent = {pid: after - before.get(pid, 0.0) for pid, after in core_s(server).items()}
    by_front = [now - answered_before.get(front, 0.0) for front, now in answered(server).items()]
    return {
        "requests_per_s": len(driven.bodies) / driven.seconds,
        "busiest_share": max(spent.values()) / sum(spent.values()),
        "core_us_a_request": 1e6 * sum(spent.values()) / sum(by_front),
        "busiest_front_share": max(by_front) / sum(by_front),
        "answers": {results(body) for body in driven.bodies},
    }


def core_s(server: Server) -> dict[int, float]:
    """Core-seconds of each process."""
    return {each.pid: sum(each.cpu_times()[:2]) for each in server.tree()}


def answered(server: Server) -> dict[str, float]:
    """Requests answered, of each front (of the only one under an empty name)."""
    text = get(server.place, "/metrics")[1].decode()
    series = r'^stillroom_requests_total{(?:front="(\d+)",)?endpoint="/v1/entities",status="200"} (\S+)$'
    return {front: float(count) for front, count in re.findall(series, text, re.MULTILINE)}


def results(body: bytes | None) -> str:
    """What was found in the text."""
    return json.dumps(json.loads(body or b"{}").get("results"))


def main() -> int:
    """Measure and print; 1 if an answer differs."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    reader.add_argument("--connections", type=int, default=32)
    reader.add_argument("--seconds", type=float, default=4.0)
    reader.add_argument("--rounds", type=int, default=3)
    reader.add_argument("--out", type=Path)
    given = reader.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STUB), *filter(None, [os.environ.get("PYTHONPATH")])])
    rows, answers = [], set()
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundles(Path(folder))[0]
        runs = [(n, fronts) for n in given.processes for fronts in sorted({1, -(-n // 4)})]
        found: dict[tuple[int, int], list[dict[str, Any]]] = {run: [] for run in runs}
        for _ in range(given.rounds):
            for processes, fronts in runs:
                with serving(
                    [bundle], "--processes", str(processes), "--fronts", str(fronts), "--no-access-log"
                ) as server:
                    found[processes, fronts].append(measured(server, given.connections, given.seconds))
        for (processes, fronts), each in found.items():
            rates = [one["requests_per_s"] for one in each]
            row: dict[str, Any] = {
                "processes": processes,
                "fronts": fronts,
                "requests_per_s": round(statistics.median(rates)),
            }
            row |= {"lowest": round(min(rates)), "highest": round(max(rates))}
            for name, digits in (("busiest_share", 2), ("core_us_a_request", 0)):
                row[name] = round(statistics.median(one[name] for one in each), digits)
            rows.append(row)
            answers |= set().union(*(one["answers"] for one in each))
            print(json.dumps(row), flush=True)
        for connections in (2, 8, 32):
            with serving([bundle], "--processes", "4", "--fronts", "4", "--no-access-log") as server:
                one = measured(server, connections, given.seconds)
            rows.append(
                {"fronts": 4, "connections": connections, "busiest_front_share": round(one["busiest_front_share"], 3)}
            )
            answers |= one["answers"]
            print(json.dumps(rows[-1]), flush=True)
    if given.out:
        given.out.write_text(json.dumps({"machine": machine_facts(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"different answers: {len(answers)}")
    return int(len(answers) != 1)


if __name__ == "__main__":
    sys.exit(main())
