"""Compare load generators on stillroom's server: ours, autocannon and wrk, in turns, in a closed loop and (without wrk) at a fixed rate.

    npm install --ignore-scripts --prefix NODE autocannon
    apt-get install wrk
    python benchmarks/latency/against_generators.py BUNDLE --texts F [--node NODE] [--wrk wrk] [--rate 200] [--connections 16]
        [--seconds 4] [--turns 3] [--json F]

Generators that are not given are left out. Prints medians over the turns; --json writes every turn. CPU is the generator's time per query.
"""

import argparse
import contextlib
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.texts import read_texts
from latency.load.arrivals import poisson_s
from latency.load.driver import drive
from latency.load.generator import OUR_TEMPLATE, request_bodies
from latency.load.http_client import target_of
from latency.measure.statistics import PAIRS_FOR_INTERVAL, paired_ratio
from serve.tasks import open_bundle, task_of

# autocannon reports latencies in whole milliseconds. It sends the requests of each second at once, at the second's start.
THEIRS = """
const autocannon = require(process.argv[1]);
let read = ""; process.stdin.on("data", (part) => { read += part; });
process.stdin.on("end", async () => {
  const given = JSON.parse(read);
  given.requests = given.bodies.map((body) => ({ method: "POST", body, headers: { "content-type": "application/json" } }));
  delete given.bodies;
  const before = process.cpuUsage();
  const found = await autocannon(given);
  const used = process.cpuUsage(before);
  found.cpu_us = used.user + used.system;
  console.log(JSON.stringify(found));
});
"""

# Every request is made beforehand, so that wrk only sends.
WRK = """
local made, at = {}, 0
function init(arguments)
  for body in io.lines(arguments[1]) do
    made[#made + 1] = wrk.format("POST", nil, {["Content-Type"] = "application/json"}, body)
  end
end
function request() at = at % #made + 1; return made[at] end
function done(summary, latency)
  local errors, failed = summary.errors, 0
  for _, kind in ipairs({"connect", "read", "write", "status", "timeout"}) do failed = failed + errors[kind] end
  -- summary.requests counts answers with any status.
  print(string.format('{"ok": %d, "us": %d, "failed": %d, "p50": %f, "p90": %f, "p99": %f}', summary.requests - errors.status,
    summary.duration, failed, latency:percentile(50), latency:percentile(90), latency:percentile(99)))
end
"""


@contextlib.contextmanager
def serving(bundle: Path) -> Iterator[str]:
    command = [sys.executable, "-P", "-m", "serve", str(bundle), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            while True:
                with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{url}/readyz"):  # noqa: S310
                    break
                time.sleep(0.05)
            yield url
        finally:
            process.terminate()


def ours(
    url: str, bodies: list[bytes], rate: float | None, connections: int, queries: int, seed: int
) -> dict[str, float]:
    target = target_of(url)
    requests = random.Random(seed).choices([target.request(body) for body in bodies], k=queries)
    due_s = poisson_s(rate, queries, seed) if rate else None
    found = drive(target, requests, connections=connections, due_s=due_s)
    times_ms = found.latencies_ms
    p50_ms, p90_ms, p99_ms = np.percentile(times_ms, [50, 90, 99])
    return {
        "answered_per_s": len(times_ms) / found.seconds, "p50_ms": p50_ms, "p90_ms": p90_ms, "p99_ms": p99_ms,
        "late_p99_ms": 1000 * np.percentile(found.late_s, 99), "cpu_us": found.core_s / queries * 1e6,
        "failed": queries - len(times_ms),
    }  # fmt: skip


def theirs(
    node: Path, url: str, bodies: list[bytes], rate: float | None, connections: int, seconds: int
) -> dict[str, float]:
    given: dict[str, Any] = {
        "url": url, "connections": connections, "duration": seconds, "bodies": [body.decode() for body in bodies],
    } | ({"overallRate": round(rate)} if rate else {})  # fmt: skip
    command = ["node", "-e", THEIRS, str((node / "node_modules" / "autocannon").resolve())]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    answered = found["2xx"]
    return {
        "answered_per_s": answered / found["duration"], "p50_ms": found["latency"]["p50"],
        "p90_ms": found["latency"]["p90"], "p99_ms": found["latency"]["p99"], "late_p99_ms": float("nan"),
        "cpu_us": found["cpu_us"] / answered, "failed": found["non2xx"] + found["errors"] + found["timeouts"],
    }  # fmt: skip


def wrks(wrk: Path, url: str, bodies: list[bytes], connections: int, seconds: int) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        script, lines = Path(folder) / "script.lua", Path(folder) / "bodies"
        script.write_text(WRK)
        lines.write_bytes(b"\n".join(bodies))
        command = [
            str(wrk),
            "-t1",
            f"-c{connections}",
            f"-d{seconds}s",
            "--timeout",
            "60",
            "-s",
            str(script),
            url,
            "--",
            str(lines),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout.splitlines()[-1])
    answered = found["ok"]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "answered_per_s": answered / found["us"] * 1e6, "p50_ms": found["p50"] / 1000, "p90_ms": found["p90"] / 1000,
        "p99_ms": found["p99"] / 1000, "late_p99_ms": float("nan"), "cpu_us": cpu_s / answered * 1e6, "failed": found["failed"],
    }  # fmt: skip


def per_query_s(runs: list[dict[str, Any]], who: str) -> list[np.ndarray]:
    """Seconds per answer in a closed loop, by turn."""
    return [np.array([1 / run["answered_per_s"]]) for run in runs if (run["way"], run["who"]) == ("closed loop", who)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--node", type=Path, help="where autocannon was installed")
    parser.add_argument("--wrk", type=Path)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    bodies = request_bodies(OUR_TEMPLATE, read_texts(given.texts))
    runs: list[dict[str, Any]] = []
    chance = random.Random(0)
    with serving(given.bundle) as server:
        url = server + task_of(open_bundle(given.bundle).manifest).endpoint.path
        closed_per_s = ours(url, bodies, None, given.connections, 500, seed=0)["answered_per_s"]  # warms the server too
        for turn in range(given.turns):
            for way, rate in (("fixed rate", given.rate), ("closed loop", None)):
                queries = round((rate or closed_per_s) * given.seconds)
                those = ["ours", *(["autocannon"] if given.node else []), *(["wrk"] if given.wrk and not rate else [])]
                for who in chance.sample(those, len(those)):
                    if who == "ours":
                        found = ours(url, bodies, rate, 256 if rate else given.connections, queries, seed=turn)
                    elif who == "autocannon":
                        found = theirs(given.node, url, bodies, rate, given.connections, given.seconds)
                    else:
                        found = wrks(given.wrk, url, bodies, given.connections, given.seconds)
                    runs.append({"way": way, "who": who, **found})
    print(
        f"{'':12s}{'':12s}{'answers/s':>10s}{'p50 ms':>9s}{'p90 ms':>9s}{'p99 ms':>9s}{'late p99':>10s}{'CPU us':>8s}{'failed':>8s}"
    )
    for way in ("fixed rate", "closed loop"):
        for who in ("ours", "autocannon", "wrk"):
            of_both = [run for run in runs if (run["way"], run["who"]) == (way, who)]
            if not of_both:
                continue
            middle = {
                key: statistics.median(run[key] for run in of_both) for key in of_both[0] if key not in ("way", "who")
            }
            print(
                f"{way:12s}{who:12s}{middle['answered_per_s']:10.1f}{middle['p50_ms']:9.2f}{middle['p90_ms']:9.2f}"
                f"{middle['p99_ms']:9.2f}{middle['late_p99_ms']:10.2f}{middle['cpu_us']:8.0f}{middle['failed']:8.0f}"
            )
    ours_closed = per_query_s(runs, "ours")
    for who in ("autocannon", "wrk"):
        if len(theirs_closed := per_query_s(runs, who)) > 1:
            ratio, low, high = paired_ratio(ours_closed, theirs_closed)
            spread = "interval of 95 %" if len(theirs_closed) >= PAIRS_FOR_INTERVAL else "range"
            print(
                f"closed loop, answers/s of ours over {who}'s: {1 / ratio:.3f}, {spread} {1 / high:.3f} to {1 / low:.3f}"
            )
    if given.json:
        given.json.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
