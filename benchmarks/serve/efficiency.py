"""Measure the share of the bare model's speed that the server reaches over HTTP, and the latency that HTTP adds to one text.

    python benchmarks/serve/efficiency.py BUNDLE TEXTS [--connections 1 8 32] [--seconds 4] [--rounds 7] [--beside PYTHON] [--memo-mib 64]
        [--json F]

`bare` is tokenise, run and decode without a server on the same texts sorted by length, with the fastest batch size and the faster of
two processes of one thread and one process of two; `bare unsorted` the same in a random order, as a server gets them. Over HTTP the
same texts come in random order, 1 and 8 a request, on connections that stay open, from a client on the same cores. `--beside` is the
Python of another checkout, whose server takes turns with that of this one. `--memo-mib` adds a server with that setting, which has been
asked every text before its first turn: with few bytes, such as 0.02, it finds hardly any, which shows the cost of looking. All take turns.
Ratios are paired by rounds, with a 95 % interval (`latency.measure.statistics.paired_ratio`). Every answer is compared with that of
`Pipeline`; the exit code is 1 if one differs. Requests that the server refused with 429 are counted apart.

Latency is measured with one connection and one text a request, and with the same texts in the bare model, in turns.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from running import Place, Server, drive, endpoint, post, results_of, serving, text_body

from compress.data.texts import read_texts
from latency.load.driver import Driven
from latency.measure.machine import machine_facts
from latency.measure.statistics import paired_ratio
from serve.model.pipeline import Pipeline

BARE = Path(__file__).with_name("bare.py")
NOOP = Path(__file__).with_name("noop.py")
BATCH_TOKENS = (256, 512, 1024, 4096)
TEXTS_A_REQUEST = (1, 8)
REFUSED = 429


class Bare:
    """Processes of `bare.py` that share the texts."""

    def __init__(self, bundle: Path, texts: Path, threads: int, processes: int) -> None:
        self.name = f"{processes} x {threads} thread{'s' if threads > 1 else ''}"
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, BARE, bundle, texts, str(threads), str(share), str(processes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for share in range(processes)
        ]  # fmt: skip
        self._said()

    def texts_per_s(self, seconds: float, batch_tokens: int, *, unsorted: bool = False) -> float:
        """Texts a second of all processes together."""
        self._ask({"seconds": seconds, "batch_tokens": batch_tokens, "unsorted": unsorted})
        return sum(float(said["texts"] / said["seconds"]) for said in self._said())

    def alone_ms(self, places: list[int]) -> list[float]:
        """Latencies in ms of each text alone, in the first process."""
        self._ask({"alone": places}, self.processes[:1])
        found: list[float] = self._said(self.processes[:1])[0]["ms"]
        return found

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
            process.wait()

    def _ask(self, what: dict[str, Any], processes: list[subprocess.Popen[str]] | None = None) -> None:
        for process in processes or self.processes:
            assert process.stdin
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()

    def _said(self, processes: list[subprocess.Popen[str]] | None = None) -> list[dict[str, Any]]:
        lines = []
        for process in processes or self.processes:
            assert process.stdout
            lines.append(json.loads(process.stdout.readline() or sys.exit("a bare process ended; see above")))
        return lines


def fastest(candidates: list[Bare], seconds: float) -> tuple[Bare, int, dict[str, float]]:
    """The fastest candidate and batch size, by the better of two turns each, and all speeds."""
    found: dict[tuple[int, int], float] = {}
    for _ in range(2):
        for index, bare in enumerate(candidates):
            for tokens in BATCH_TOKENS:
                speed = bare.texts_per_s(seconds, tokens)
                found[index, tokens] = max(found.get((index, tokens), 0.0), speed)
    best = max(found, key=found.__getitem__)
    tried = {f"{candidates[i].name}, {tokens} tokens": round(speed, 1) for (i, tokens), speed in found.items()}
    return candidates[best[0]], best[1], tried


@contextlib.contextmanager
def noop(body_bytes: int) -> Iterator[Place]:
    """A server that answers every request with the same bytes."""
    with subprocess.Popen(
        [sys.executable, NOOP, str(body_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        yield Place("127.0.0.1", int(process.stdout.readline()))


class Http:
    """Sends the texts over HTTP and checks the answers."""

    def __init__(self, bundle: Path, texts: list[str]) -> None:
        self.path, self.texts = endpoint(bundle), texts
        answers = Pipeline(bundle, threads=1)(texts)
        self.right = [json.loads(msgspec.json.encode(answer)) for answer in answers]
        self.wrong = self.refused = 0

    def turn(self, place: Place, a_request: int, seconds: float, speed: float, connections: int, seed: int) -> Driven:
        """About `seconds` of requests at `speed` texts a second: whole passes over the texts, each in another order."""
        asked = self._asked(a_request, max(1, round(seconds * speed / len(self.texts))), seed)
        driven = drive(place, [post(place, self.path, self._body(places)) for places in asked], connections=connections)
        for places, status, body in zip(asked, driven.became, driven.bodies, strict=True):
            self._count(status, body, [self.right[place] for place in places])
        return driven

    def cost(self, place: Place, a_request: int, connections: int) -> dict[str, float]:
        """The cost of the client alone, measured on the server of `noop`."""
        asked = self._asked(a_request, 8, 0)
        driven = drive(place, [post(place, self.path, self._body(places)) for places in asked], connections=connections)
        return {
            "requests_per_s": round(len(asked) / driven.seconds),
            "client_us_a_request": round(driven.core_s / len(asked) * 1e6, 1),
        }

    def alone_ms(self, place: Place, places: list[int]) -> np.ndarray:
        """Latencies in ms of each text alone, on one connection."""
        driven = drive(place, [post(place, self.path, text_body(self.texts[each])) for each in places], connections=1)
        for each, status, body in zip(places, driven.became, driven.bodies, strict=True):
            self._count(status, body, [self.right[each]])
        return driven.latencies_ms

    def _count(self, status: int | str, body: bytes, right: list[Any]) -> None:
        if status == REFUSED:
            self.refused += 1
        else:
            self.wrong += status != 200 or results_of(body) != right

    def _asked(self, a_request: int, passes: int, seed: int) -> list[list[int]]:
        chance = random.Random(seed)
        places: list[int] = []
        for _ in range(passes):
            places += chance.sample(range(len(self.texts)), len(self.texts))
        return [places[first : first + a_request] for first in range(0, len(places), a_request)]

    def _body(self, places: list[int]) -> bytes:
        return text_body(self.texts[places[0]] if len(places) == 1 else [self.texts[place] for place in places])


def throughput(
    servers: dict[str, Server], bare: Bare, tokens: int, http: Http, given: argparse.Namespace
) -> dict[str, Any]:
    """Rounds of bare and of HTTP, by texts a request, connections and server, in random order."""
    turns = {
        f"{server} {n} a request, {connections} connections": (n, connections, server)
        for server in servers
        for n in TEXTS_A_REQUEST
        for connections in given.connections
    }
    speeds: dict[str, list[float]] = {name: [] for name in ("bare", "bare unsorted", *turns)}
    shares: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
    guess = {
        name: len(http.texts) / http.turn(servers[server].place, n, 0, 0, connections, 0).seconds
        for name, (n, connections, server) in turns.items()
    }
    chance = random.Random(0)
    for turn in range(given.rounds):
        for name in chance.sample(list(speeds), len(speeds)):
            if name.startswith("bare"):
                speeds[name].append(bare.texts_per_s(given.seconds, tokens, unsorted=name.endswith("unsorted")))
                continue
            a_request, connections, which = turns[name]
            server = servers[which]
            before_s = sum(server.core_s())
            driven = http.turn(server.place, a_request, given.seconds, guess[name], connections, seed=1 + turn)
            server_s = sum(server.core_s()) - before_s
            texts = driven.having(200) * a_request
            speeds[name].append(texts / driven.seconds)
            shares[name].append({
                "client_cores": driven.core_s / driven.seconds, "server_cores": server_s / driven.seconds,
                "p50_ms": float(np.percentile(driven.latencies_ms, 50)), "p99_ms": float(np.percentile(driven.latencies_ms, 99)),
            })  # fmt: skip
    found: dict[str, Any] = {
        name: {"texts_per_s": speeds[name], "median": statistics.median(speeds[name])}
        for name in speeds
        if name not in shares
    }
    for name, visits in shares.items():
        alike = name.replace(turns[name][2], "http", 1)
        times = {
            which: [np.array([1 / speed]) for speed in speeds[which]]
            for which in ("bare", "bare unsorted", alike, name)
        }
        ratio, low, high = paired_ratio(times["bare"], times[name])
        of_unsorted = paired_ratio(times["bare unsorted"], times[name])
        middle = {key: statistics.median(share[key] for share in visits) for key in visits[0]}
        found[name] = {
            "texts_per_s": speeds[name], "median": statistics.median(speeds[name]), "of_bare": ratio, "low": low, "high": high,
            "of_unsorted": list(of_unsorted), "medians": middle,
            "of_http": list(paired_ratio(times[alike], times[name])),
        }  # fmt: skip
    return found


def added_latency(server: Server, bare: Bare, http: Http, rounds: int) -> dict[str, Any]:
    """Latency of one text at a time, bare and over HTTP, in turns."""
    chance = random.Random(1)
    taken: dict[str, list[np.ndarray]] = {"bare": [], "http": []}
    for _ in range(rounds + 1):  # the first round is left out
        places = chance.sample(range(len(http.texts)), len(http.texts))
        for name in chance.sample(list(taken), 2):
            taken[name].append(
                np.array(bare.alone_ms(places)) if name == "bare" else http.alone_ms(server.place, places)
            )
    found: dict[str, Any] = {}
    for percent in (50, 99):
        each = {name: [float(np.percentile(turn, percent)) for turn in turns[1:]] for name, turns in taken.items()}
        added = [h - b for h, b in zip(each["http"], each["bare"], strict=True)]
        found[f"p{percent}"] = {
            **{f"{name}_ms": statistics.median(values) for name, values in each.items()},
            "added_ms": statistics.median(added), "least_ms": min(added), "most_ms": max(added), "rounds": each,
        }  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--connections", type=int, nargs="+", default=[32])
    parser.add_argument("--seconds", type=float, default=4.0, help="of one turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--beside", help="the Python of another checkout, whose server takes turns with this one's")
    parser.add_argument("--memo-mib", help="adds a server that keeps answers")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    http = Http(given.bundle, read_texts(given.texts))
    with contextlib.ExitStack() as stack:
        candidates = [Bare(given.bundle, given.texts, 1, 2), Bare(given.bundle, given.texts, 2, 1)]
        for candidate in candidates:
            stack.callback(candidate.close)
        bare, tokens, tried = fastest(candidates, given.seconds / 4)
        body_bytes = len(msgspec.json.encode(http.right[0]))
        with noop(body_bytes) as nothing:
            costs = {f"http {n}": http.cost(nothing, n, given.connections[-1]) for n in TEXTS_A_REQUEST}
        pythons = {"http": sys.executable} | ({"beside": given.beside} if given.beside else {})
        servers = {
            name: stack.enter_context(serving([given.bundle], python=python)) for name, python in pythons.items()
        }
        if given.memo_mib:
            servers["memo"] = stack.enter_context(serving([given.bundle], "--memo-mib", given.memo_mib))
        speeds = throughput(servers, bare, tokens, http, given)
        latency = added_latency(servers["http"], candidates[0], http, given.rounds)
    document = {
        "machine": machine_facts(), "bare": f"{bare.name}, batches of {tokens} tokens", "bare_tried": tried, "client_alone": costs,
        "connections": given.connections, "throughput": speeds, "latency": latency, "wrong": http.wrong, "refused": http.refused,
    }  # fmt: skip
    say(document)
    if given.json:
        given.json.write_text(json.dumps(document, indent=1))
    return int(http.wrong > 0)


def say(document: dict[str, Any]) -> None:
    print(
        f"bare: {document['bare']}, {document['throughput']['bare']['median']:,.0f} texts/s, unsorted "
        f"{document['throughput']['bare unsorted']['median']:,.0f}; tried {document['bare_tried']}"
    )
    for name, found in document["throughput"].items():
        if name.startswith("bare"):
            continue
        middle, unsorted, of_http = found["medians"], found["of_unsorted"], found["of_http"]
        print(
            f"{name}: {found['median']:,.0f} texts/s, {found['of_bare']:.3f} of bare [{found['low']:.3f}, {found['high']:.3f}], "
            f"{unsorted[0]:.3f} of unsorted [{unsorted[1]:.3f}, {unsorted[2]:.3f}], "
            f"{of_http[0]:.2f} of http [{of_http[1]:.2f}, {of_http[2]:.2f}], p50 {middle['p50_ms']:.2f} ms, p99 "
            f"{middle['p99_ms']:.1f} ms; cores: client {middle['client_cores']:.2f}, server {middle['server_cores']:.2f}"
        )
    for a_request, cost in document["client_alone"].items():
        print(
            f"client alone, no-op server, {a_request} a request: {cost['requests_per_s']:,.0f}/s, {cost['client_us_a_request']} us"
        )
    for percent, row in document["latency"].items():
        print(
            f"one text, {percent}: bare {row['bare_ms']:.3f} ms, HTTP {row['http_ms']:.3f}, "
            f"added {row['added_ms']:.3f} [{row['least_ms']:.3f}, {row['most_ms']:.3f}]"
        )
    print(f"answers that differ from Pipeline's: {document['wrong']}; requests refused: {document['refused']}")


if __name__ == "__main__":
    raise SystemExit(main())
