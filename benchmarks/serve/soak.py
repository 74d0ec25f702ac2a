"""Run mixed traffic for minutes or hours, and check that the server loses no answer, gives no wrong one, and does not grow.

    python benchmarks/serve/soak.py ENTITIES_BUNDLE CLASSES_BUNDLE TEXTS [--minutes 30] [--connections 8] [--kill-every-s 60]
        [--reload-every-s 0] [--options '--processes 4'] [--warm-up-minutes 5] [--log F] [--json F]

One server serves both bundles. Texts have 1 to 2,000 characters of the words of TEXTS, other scripts and emoji. One request in eight is
bad and needs its own status; some clients close the connection in mid-request. `--kill-every-s` kills a random child process of the
server (0: never), `--reload-every-s` sends the server a SIGHUP (0: never). Each answer is compared with that of `Pipeline`.

A closed connection and a 503 within KILL_S after a kill are allowed and counted separately, since the killed process had requests.
So is a 429 to at most MOST_REFUSED of all requests, since texts queue up while a process is replaced. The exit code is 1 if any other
answer is wrong or lost.

Memory: the slope, by least squares after the warm-up, of the resident memory of all processes, and of the first one alone, over the
samples with the usual number of processes (a killed process is missing until it is replaced).
"""

import argparse
import contextlib
import json
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from mixed_traffic import Asked, bad_requests, good_requests, texts_of_all_lengths
from running import Server, drive, results_of, serving

from compress.data.texts import read_texts
from latency.load.driver import TIMEOUT, Became, Driven
from latency.measure.machine import machine_facts
from serve.settings import Limits

SLICE = 400  # requests between two samples of memory
BAD_SHARE = 1 / 8
HANG_UPS = 3  # a slice
KILL_S = 10.0
MOST_REFUSED = 0.01
TIMEOUT_S = 60.0
TEXTS_MADE = 1500
REQUESTS_MADE = 1500  # of each bundle
SHOWN = 5


class Disturber(threading.Thread):
    """Kills child processes of the server and makes it reload, each at its interval, until it is stopped."""

    def __init__(self, server: Server, kill_every_s: float, reload_every_s: float) -> None:
        super().__init__(daemon=True)
        self.server, self.every_s = server, {"kill": kill_every_s, "reload": reload_every_s}
        self.kills_s: list[float] = []
        self.reloads_s: list[float] = []
        self._chance = random.Random(3)
        self._stopped = threading.Event()

    def run(self) -> None:
        due_s = {what: time.monotonic() + every_s for what, every_s in self.every_s.items() if every_s > 0}
        while due_s and not self._stopped.wait(0.05):
            for what, at_s in due_s.items():
                if time.monotonic() >= at_s:
                    due_s[what] = at_s + self.every_s[what]
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self.kill() if what == "kill" else self.reload()

    def kill(self) -> None:
        below = self.server.process.children(recursive=True)
        if below:
            self.kills_s.append(time.monotonic())
            self._chance.choice(below).kill()

    def reload(self) -> None:
        self.reloads_s.append(time.monotonic())
        self.server.process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


class Judge:
    """Compares answers with the right ones, and counts."""

    def __init__(self, *, processes_die: bool) -> None:
        self.processes_die = processes_die
        self.counts: Counter[str] = Counter()
        self.shown: list[dict[str, Any]] = []
        self._known: dict[bytes, bytes] = {}  # request -> the bytes that were right

    def look(self, asked: list[Asked], driven: Driven, began_s: float, kills_s: list[float]) -> None:
        """Counts the answers of one slice, which began at `began_s` of the monotonic clock."""
        for each, status, body, ended_s in zip(asked, driven.became, driven.bodies, driven.ended_s, strict=True):
            at_s = began_s + float(ended_s)
            verdict = self._verdict(each, status, body, any(0 <= at_s - kill_s < KILL_S for kill_s in kills_s))
            self.counts[verdict] += 1
            if verdict in ("wrong", "lost", "unavailable") and len(self.shown) < 100:
                self.shown.append({
                    "verdict": verdict, "status": status, "needed": each.status, "body": body[:500].decode("utf-8", "replace"),
                    "request": each.request[:500].decode("utf-8", "replace"),
                })  # fmt: skip

    def _verdict(self, asked: Asked, status: Became, body: bytes, killed: bool) -> str:
        if isinstance(status, str):  # a timeout, or a kind of error
            return "closed by a kill" if killed and self.processes_die and status != TIMEOUT else "lost"
        if status == 503:
            return "unavailable after a kill" if killed else "unavailable"
        if status == 429:
            return "refused"
        if status == asked.status != 200:
            return "right refusal of a bad request"
        return "right" if status == 200 and self._right(asked, body) else "wrong"

    def _right(self, asked: Asked, body: bytes) -> bool:
        if self._known.get(asked.request) != body:
            if asked.status != 200 or results_of(body) != asked.results:
                return False
            self._known[asked.request] = body
        return True

    @property
    def faults(self) -> int:
        return self.counts["wrong"] + self.counts["lost"] + self.counts["unavailable"]


def hang_up(server: Server, request: bytes, chance: random.Random) -> None:
    """A client that closes its connection in mid-request, or before its answer."""
    with contextlib.suppress(OSError), contextlib.closing(socket.create_connection(server.place)) as connection:
        connection.sendall(request[: chance.choice((1, len(request) // 2, len(request)))])


def slope_mib_an_hour(samples: list[dict[str, float]], key: str, warm_up_s: float) -> dict[str, float] | None:
    """The slope by least squares after the warm-up, with its standard error; None for fewer than 3 samples."""
    usual = Counter(sample["processes"] for sample in samples).most_common(1)[0][0]
    kept = [sample for sample in samples if sample["at_s"] >= warm_up_s and sample["processes"] == usual]
    if len(kept) < 3:
        return None
    hours = np.array([sample["at_s"] for sample in kept]) / 3600
    mib = np.array([sample[key] for sample in kept]) / 2**20
    slope, start = np.polyfit(hours, mib, 1)
    errors = mib - (slope * hours + start)
    error = np.sqrt((errors @ errors) / (len(kept) - 2) / ((hours - hours.mean()) ** 2).sum())
    return {
        "slope": float(slope),
        "standard_error": float(error),
        "samples": len(kept),
        "at_warm": float(mib[0]),
        "at_end": float(mib[-1]),
    }


def soaked(server: Server, given: argparse.Namespace) -> dict[str, Any]:
    """The whole measurement."""
    words = " ".join(read_texts(given.texts)).split()
    texts = texts_of_all_lengths(words, TEXTS_MADE)
    good = [
        asked
        for number, bundle in enumerate((given.entities, given.classes))
        for asked in good_requests(server.place, bundle, texts, REQUESTS_MADE, seed=number)
    ]
    bad = bad_requests(server.place, Limits())
    chance, judge = random.Random(4), Judge(processes_die=given.kill_every_s > 0)
    disturber = Disturber(server, given.kill_every_s, given.reload_every_s)
    samples: list[dict[str, float]] = []
    began_s = told_s = time.monotonic()
    disturber.start()
    while (at_s := time.monotonic() - began_s) < given.minutes * 60:
        tree = server.tree()
        first_bytes = server.process.memory_info().rss
        samples.append(
            {"at_s": at_s, "processes": len(tree), "rss_bytes": server.rss_bytes(), "first_rss_bytes": first_bytes}
        )
        asked = [chance.choice(bad) if chance.random() < BAD_SHARE else chance.choice(good) for _ in range(SLICE)]
        for each in chance.choices(good, k=HANG_UPS):
            hang_up(server, each.request, chance)
        slice_began_s = time.monotonic()
        driven = drive(
            server.place, [each.request for each in asked], connections=given.connections, timeout_s=TIMEOUT_S
        )
        judge.look(asked, driven, slice_began_s, disturber.kills_s)
        if time.monotonic() - told_s > 30:
            told_s = time.monotonic()
            print(
                f"{at_s:6.0f} s  {samples[-1]['rss_bytes'] / 2**20:.0f} MiB  {dict(judge.counts)}",
                file=sys.stderr,
                flush=True,
            )
    disturber.stop()
    warm_up_s = given.warm_up_minutes * 60
    return {
        "minutes": given.minutes, "requests": sum(judge.counts.values()), "counts": dict(judge.counts),
        "kills": len(disturber.kills_s), "reloads": len(disturber.reloads_s), "faults": judge.faults,
        "memory_mib_an_hour": slope_mib_an_hour(samples, "rss_bytes", warm_up_s),
        "first_memory_mib_an_hour": slope_mib_an_hour(samples, "first_rss_bytes", warm_up_s),
        "shown": judge.shown, "samples": samples,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entities", type=Path)
    parser.add_argument("classes", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--kill-every-s", type=float, default=60.0)
    parser.add_argument("--reload-every-s", type=float, default=0.0)
    parser.add_argument("--options", default="", help="of the server")
    parser.add_argument("--warm-up-minutes", type=float, default=5.0)
    parser.add_argument(
        "--log", type=Path, default=Path(tempfile.gettempdir()) / "soak.log", help="file for the server's output"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with serving([given.entities, given.classes], *given.options.split(), log=given.log) as server:
        found = soaked(server, given)
    for key in ("requests", "counts", "kills", "reloads", "faults", "memory_mib_an_hour", "first_memory_mib_an_hour"):
        print(f"{key:28s}{json.dumps(found[key])}")
    for each in found["shown"][:SHOWN]:
        print(json.dumps(each, ensure_ascii=False, indent=1))
    if given.json:
        given.json.write_text(json.dumps({"machine": machine_facts(), **found}, indent=1))
    return int(found["faults"] > 0 or found["counts"].get("refused", 0) > MOST_REFUSED * found["requests"])


if __name__ == "__main__":
    raise SystemExit(main())
