"""Candidates take turns: A B A B, each in a process of its own, so that a slow moment of the machine hits all alike."""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, cast

import numpy as np

from latency.candidates import Candidate
from latency.machine import busy_core_seconds
from latency.measurement import Condition, Measurement
from latency.worker import Visit
from latency.workloads import Workload
from serve.errors import BadInput, InternalError

Progress = Callable[[int, int, str], None]  # visits done, visits in all, what is being timed

REPLY_TIMEOUT_S = 600.0  # a turn takes seconds; after this long the worker hangs
# Pools that spin for a moment after a call (libgomp about a millisecond) are asleep after this.
PAUSE_S = 0.02
SETTLED = 0.05  # two medians in a row this close: warm
WARMUP_CHUNKS = 10  # bound of the warm-up, of a fifth of a second each (or one call, if that is longer)
MOST_PER_TURN = 250  # keeps the raw samples of a fast model to a few kilobytes a turn


def measure(
    candidates: Sequence[Candidate],
    workloads: Sequence[Workload],
    *,
    turns: int = 7,
    seconds_per_turn: float = 0.4,
    min_samples: int = 21,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Measurement]:
    """Times every candidate on every workload; workload by workload, candidates in the order given.

    A turn visits each candidate once, in an order shuffled anew from `seed`, for `seconds_per_turn` of timed calls, or
    as many more as `min_samples` in all needs. Raises BadInput for candidates that cannot be compared, loaded or run,
    InternalError for a worker that dies; no worker outlives the call.
    """
    _check(candidates, turns)
    names = [candidate.name for candidate in candidates]
    measured: list[Measurement] = []
    done = 0
    with ExitStack() as stack:
        workers = {c.name: stack.enter_context(Worker(c)) for c in candidates}
        for worker in workers.values():  # all load at once; the answers are collected after
            worker.send_load(workloads)
        for worker in workers.values():
            worker.receive()
        for workload in workloads:
            logs = {name: _Log(calls_not_kept=1 + _warm_up(workers[name], workload)) for name in names}
            for order in visiting_orders(names, turns, seed):
                for name in order:
                    if progress:
                        progress(done, len(workloads) * turns * len(names), f"{name}, {workload.name}")
                    least = math.ceil(min_samples / turns)
                    logs[name].add(_visit(workers[name], workload, seconds_per_turn, least))
                    done += 1
            measured += [
                _measurement(candidate, workload, logs[candidate.name], seconds_per_turn) for candidate in candidates
            ]
    if progress:
        progress(done, done, "done")
    return measured


def visiting_orders(names: Sequence[str], turns: int, seed: int) -> list[list[str]]:
    """For each turn, every name once, in an order of its own; the same for the same seed."""
    shuffler = random.Random(seed)
    return [shuffler.sample(list(names), len(names)) for _ in range(turns)]


def timing_environment() -> dict[str, str]:
    """The environment of a process that times: it finds these packages, and its OpenMP threads do not spin.

    Threads that spin while they wait take the core from the others, and so does whoever called us.
    """
    root = str(Path(__file__).resolve().parent.parent)
    search_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": search_path, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


class Worker:
    """A `latency.worker` process for one candidate; a context manager that always ends its process."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate

    def __enter__(self) -> "Worker":
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # closed in __exit__
        self.process = subprocess.Popen(
            [sys.executable, "-m", "latency.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
            env=timing_environment(),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # It holds nothing that could be lost, so it is not asked to leave: a call under way may take long.
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with suppress(BrokenPipeError):  # bytes that a dead worker never read
                    pipe.close()
        self._stderr.close()

    def send_load(self, workloads: Sequence[Workload]) -> None:
        """Asks the worker to load its candidate and to try each workload once; `receive` waits for it."""
        described = {**vars(self.candidate), "path": str(self.candidate.path.absolute())}
        packed = {workload.name: workload.input_ids.tolist() for workload in workloads}
        self._send({"command": "load", "candidate": described, "work": packed})

    def run(self, workload: Workload, *, seconds: float, least: int, most: int, untimed: int) -> Visit:
        """One visit, see `latency.worker.timed_calls`."""
        limits = {"seconds": seconds, "least": least, "most": most, "untimed": untimed}
        self._send({"command": "run", "work": workload.name, **limits})
        return cast(Visit, self.receive())

    def receive(self) -> dict[str, object]:
        """The worker's next answer. Raises BadInput for one that reports an error, InternalError when there is none."""
        assert self.process.stdout
        hung = threading.Timer(REPLY_TIMEOUT_S, self.process.kill)  # ends the read below
        hung.start()
        try:
            line = self.process.stdout.readline()
        finally:
            hung.cancel()
        if not line:
            status = self.process.wait()
            raise InternalError(
                f"the process that timed {self.candidate.name!r} ended with status {status} "
                f"(or took over {REPLY_TIMEOUT_S:.0f} s and was ended). Its last words:\n{self.last_words()}"
            )
        reply: dict[str, object] = json.loads(line)
        if "error" in reply:
            self.process.wait()
            if reply["named"]:
                raise BadInput(str(reply["error"]))
            raise BadInput(
                f"candidate {self.candidate.name!r} ({self.candidate.runtime}, {self.candidate.path}) cannot be timed: "
                f"{reply['error']}. Its last words:\n{self.last_words()}"
            )
        return reply

    def last_words(self, lines: int = 12) -> str:
        """The end of what the worker wrote to stderr."""
        self._stderr.seek(0)
        said = self._stderr.read().decode("utf-8", errors="replace").strip().splitlines()
        return "\n".join(said[-lines:]) or "(nothing)"

    def _send(self, request: dict[str, object]) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it has died; `receive` says so with its last words
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()


@dataclass
class _Log:
    """What a candidate's visits on one workload have brought so far."""

    calls_not_kept: int
    turns_ms: list[list[float]] = field(default_factory=list)
    other_core_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, visited: tuple[Visit, float]) -> None:
        visit, other_core_seconds = visited
        self.calls_not_kept += 1
        self.turns_ms.append(visit["samples_ms"])
        self.other_core_seconds += other_core_seconds
        self.seconds += visit["wall_s"]


def _check(candidates: Sequence[Candidate], turns: int) -> None:
    names = [candidate.name for candidate in candidates]
    if not names:
        raise BadInput("no candidate was given; give at least one model to time")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInput(f"two candidates are named {', '.join(twice)}; give each a name of its own")
    if turns < 1:
        raise BadInput(f"{turns} turns were asked for; ask for 1 or more (2 or more for ratios)")


def _warm_up(worker: Worker, workload: Workload) -> int:
    """Runs `workload` until two chunks in a row agree on the median, or to the bound; returns the calls made."""
    calls, last_ms = 0, math.inf
    for _ in range(WARMUP_CHUNKS):
        samples_ms = worker.run(workload, seconds=0.2, least=1, most=10_000, untimed=0)["samples_ms"]
        calls += len(samples_ms)
        median_ms = float(np.median(samples_ms))
        if abs(median_ms - last_ms) <= SETTLED * median_ms:
            break
        last_ms = median_ms
    return calls


def _visit(worker: Worker, workload: Workload, seconds: float, least: int) -> tuple[Visit, float]:
    """One visit, and the core-seconds that others used meanwhile (0 where the system does not tell)."""
    time.sleep(PAUSE_S)
    before_s = busy_core_seconds()
    visit = worker.run(workload, seconds=seconds, least=least, most=MOST_PER_TURN, untimed=1)
    after_s = busy_core_seconds()
    if before_s is None or after_s is None:
        return visit, 0.0
    return visit, after_s - before_s - visit["cpu_s"]


def _measurement(candidate: Candidate, workload: Workload, log: _Log, seconds_per_turn: float) -> Measurement:
    conditions: dict[str, Condition] = {
        "runtime": candidate.runtime,
        "precision": candidate.precision,
        "threads": candidate.threads,
        "process": "one per candidate, taking turns",
        "turns": len(log.turns_ms),
        "seconds_per_turn": seconds_per_turn,
        "other_load_cores": round(max(0.0, log.other_core_seconds / log.seconds), 2),
    }
    return Measurement(
        candidate=candidate.name,
        batch=workload.batch,
        tokens=workload.tokens,
        samples_ms=tuple(sample_ms for turn_ms in log.turns_ms for sample_ms in turn_ms),
        warmup=log.calls_not_kept,
        conditions=conditions,
        turn_sizes=tuple(map(len, log.turns_ms)),
    )
