"""Our own server under our generator and under autocannon, taking turns: at one fixed rate, and in a closed loop.

    npm install --ignore-scripts --prefix NODE autocannon
    python benchmarks/latency/against_autocannon.py BUNDLE --texts F --node NODE [--rate 200] [--connections 16]
        [--seconds 4] [--turns 3] [--json F]

Printed are medians over the turns; --json keeps every turn. Closed, ours is the open loop with all queries due at the start and
as many connections, timed from the moment of sending. CPU is the generator's own, a query.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from compress.examples import read_texts
from latency.load import AT_ONCE_PER_S, OUR_TEMPLATE, load, request_bodies
from serve.app import ENDPOINT_OF
from serve.bundle import open_bundle

# Its latencies are whole milliseconds; its rate is as many requests a second and connection, sent at once when each begins.
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
    found = load(
        url,
        bodies,
        rate_per_s=rate or AT_ONCE_PER_S,
        queries=queries,
        connections=connections,
        timeout_s=60.0,
        seed=seed,
    )
    times_ms = found.latencies_ms if rate else found.from_sent_ms
    p50_ms, p90_ms, p99_ms = np.percentile(times_ms, [50, 90, 99])
    cpu_us = found.client_core_share * found.seconds / queries * 1e6
    return {
        "answered_per_s": len(times_ms) / found.seconds, "p50_ms": p50_ms, "p90_ms": p90_ms, "p99_ms": p99_ms,
        "late_p99_ms": found.late_percentile_ms(99), "cpu_us": cpu_us, "failed": queries - len(times_ms),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--node", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    bodies = request_bodies(OUR_TEMPLATE, read_texts(given.texts))
    runs: list[dict[str, Any]] = []
    with serving(given.bundle) as server:
        url = server + ENDPOINT_OF[open_bundle(given.bundle).manifest.task]
        closed_per_s = ours(url, bodies, None, given.connections, 500, seed=0)["answered_per_s"]  # warms the server too
        for turn in range(given.turns):
            for way, rate in (("fixed rate", given.rate), ("closed loop", None)):
                queries = round((rate or closed_per_s) * given.seconds)
                of_ours = ours(url, bodies, rate, 256 if rate else given.connections, queries, seed=turn)
                of_theirs = theirs(given.node, url, bodies, rate, given.connections, given.seconds)
                runs += [{"way": way, "who": "ours", **of_ours}, {"way": way, "who": "autocannon", **of_theirs}]
    print(
        f"{'':12s}{'':12s}{'answers/s':>10s}{'p50 ms':>9s}{'p90 ms':>9s}{'p99 ms':>9s}{'late p99':>10s}{'CPU us':>8s}{'failed':>8s}"
    )
    for way in ("fixed rate", "closed loop"):
        for who in ("ours", "autocannon"):
            of_both = [run for run in runs if (run["way"], run["who"]) == (way, who)]
            middle = {
                key: statistics.median(run[key] for run in of_both) for key in of_both[0] if key not in ("way", "who")
            }
            print(
                f"{way:12s}{who:12s}{middle['answered_per_s']:10.1f}{middle['p50_ms']:9.2f}{middle['p90_ms']:9.2f}"
                f"{middle['p99_ms']:9.2f}{middle['late_p99_ms']:10.2f}{middle['cpu_us']:8.0f}{middle['failed']:8.0f}"
            )
    if given.json:
        given.json.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
