"""Texts a second of a bundle that is served on a GPU, by texts a request: a closed loop of some connections.

    python benchmarks/serve/on_gpu.py BUNDLE TEXTS [--device cuda] [--variant fp16] [--seconds 5] [--out on_gpu.json]

TEXTS has a text a line. Refused requests are counted apart. Prints a JSON document.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from running import drive, endpoint, post, serving, text_body

from compress.data.texts import read_texts
from latency.measure.machine import machine_facts
from serve.bundle.runtimes import gpu_lacks

LOADS = ((1, 1), (8, 16), (64, 8))  # texts a request, connections
GPU_OPTIONS = ("--batch-tokens", "16384", "--threads", "8")
WARM_REQUESTS = 50


def measured(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a load."""
    texts = read_texts(given.texts)
    options = ["--device", given.device, *(["--variant", given.variant] if given.variant else [])]
    if given.device == "cuda":
        options += GPU_OPTIONS
    rows = []
    with serving([given.bundle], *options) as server:
        path = endpoint(given.bundle)
        for size, connections in LOADS:
            some = [[texts[(start + i) % len(texts)] for i in range(size)] for start in range(0, 20 * size, size)]
            bodies = [post(server.place, path, text_body(each)) for each in some]
            drive(server.place, bodies * (WARM_REQUESTS // len(bodies) + 1), connections=connections)
            count = len(bodies)
            while True:  # as many requests as take long enough
                done = drive(server.place, (bodies * (count // len(bodies) + 1))[:count], connections=connections)
                took_s = done.seconds
                if took_s >= given.seconds:
                    break
                count = int(count * min(10, max(2, 1.2 * given.seconds / took_s)))
            rows.append(
                {
                    "texts_a_request": size,
                    "connections": connections,
                    "texts_per_s": size * len(done.latencies_ms) / took_s,
                    "p50_ms": float(np.percentile(done.latencies_ms, 50)),
                    "p99_ms": float(np.percentile(done.latencies_ms, 99)),
                    "not_answered": count - len(done.latencies_ms),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--variant", default="")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.device == "cuda" and (lacks := gpu_lacks()):
        sys.exit(lacks)
    text = json.dumps({"machine": machine_facts(), "device": given.device, "rows": measured(given)}, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
