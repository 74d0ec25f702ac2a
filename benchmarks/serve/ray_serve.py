"""Ray Serve beside `stillroom serve`, in turns: the same bundle, the same number of worker processes, the same client.

    python -m benchmarks.serve.ray_serve BUNDLE TEXTS [TEXTS ...] [--count 3000] [--workers 2] [--seconds 5] [--rounds 6] [--json F]

Both run all the time, and one is loaded while the other is idle. First every text is sent to both, one a request, and the bodies of the
answers are compared. Then, in each round and in random order, each gets one text a request: over one connection (p50 and p99), and in a
closed loop of CONNECTIONS connections (answers a second, p50 and p99). Ratios are paired round by round. The exit code is 1 if an answer
differs or fails. Variables of Ray, such as RAY_SERVE_THROUGHPUT_OPTIMIZED, are those of the environment.
"""

import argparse
import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # where `running` is for the other scripts

from running import Place, drive, endpoint, post, serving, text_body

from benchmarks.serve.on_ray import ray_serving
from compress.data.texts import read_texts
from latency.load.driver import Driven
from latency.measure.machine import machine_facts
from latency.measure.statistics import paired_ratio

CONNECTIONS = 16


def measured(driven: Driven) -> dict[str, float]:
    p50_ms, p99_ms = np.percentile(driven.latencies_ms, (50, 99)).tolist()
    ok = driven.having(200)
    return {"answers_per_s": ok / driven.seconds, "p50_ms": p50_ms, "p99_ms": p99_ms, "failed": len(driven.became) - ok}


def loaded(place: Place, path: str, texts: list[str], seconds: float, connections: int) -> dict[str, float]:
    """One measurement of about `seconds`, whose number of requests is found by a short one before it."""
    ahead = drive(place, [post(place, path, text_body(text)) for text in texts[:200]], connections=connections)
    count = max(200, round(seconds * 200 / ahead.seconds))
    cycled = list(itertools.islice(itertools.cycle(texts), count))
    return measured(drive(place, [post(place, path, text_body(text)) for text in cycled], connections=connections))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=3000, help="texts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    texts = list(dict.fromkeys(text for file in given.texts for text in read_texts(file)))[: given.count]
    path, rounds, chance = endpoint(given.bundle), list[dict[str, Any]](), random.Random(0)
    with (
        open(os.devnull, "w") as nowhere,
        ray_serving(f"bundle={given.bundle}", f"replicas={given.workers}", log=nowhere) as (url, _),
        serving([given.bundle], "--processes", str(given.workers), "--no-access-log") as server,
    ):
        on_ray = urlsplit(url)
        places = {"ray": Place(str(on_ray.hostname), int(on_ray.port or 0)), "stillroom": server.place}
        answers = {
            name: drive(place, [post(place, path, text_body(text)) for text in texts], connections=CONNECTIONS)
            for name, place in places.items()
        }
        failed = sum(len(texts) - each.having(200) for each in answers.values())
        differing = sum(ray != ours for ray, ours in zip(*(answers[name].bodies for name in places), strict=True))
        print(f"{len(texts):,} texts: {differing} bodies differ, {failed} requests failed", flush=True)
        for number in range(given.rounds):
            found: dict[str, Any] = {}
            for name in chance.sample(list(places), 2):
                chance.shuffle(texts)
                one = loaded(places[name], path, texts, given.seconds, 1)
                found[name] = {"one": one, "closed": loaded(places[name], path, texts, given.seconds, CONNECTIONS)}
            rounds.append(found)
            print(f"round {number}: {json.dumps(found)}", flush=True)
    failed += int(sum(found[name][kind]["failed"] for found in rounds for name in places for kind in ("one", "closed")))
    ratios = {
        f"{kind}_{what}": paired_ratio(*([found[name][kind][what] for found in rounds] for name in places))
        for kind, what in (("one", "p50_ms"), ("one", "p99_ms"), ("closed", "answers_per_s"), ("closed", "p99_ms"))
    }
    for name, ratio in ratios.items():
        print(f"ray / stillroom {name:22s}{ratio}")
    if given.json:
        document = {
            "machine": machine_facts(), "texts": len(texts), "differing": differing, "failed": failed, "workers": given.workers,
            "rounds": rounds, "ratios": ratios,
        }  # fmt: skip
        given.json.write_text(json.dumps(document, indent=1))
    return int(bool(differing or failed))


if __name__ == "__main__":
    raise SystemExit(main())
