"""Candidates take alternating turns (A B A B), each in its own process, so that a slow phase of the machine affects all."""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from latency.candidates.candidate import Candidate
from latency.candidates.end_to_end import Text
from latency.measure.machine import busy_core_seconds, energy_counters, joules_between
from latency.measure.statistics import Condition, Measurement, paired_ratio
from serve.bundle.cpu import one_cpu_a_core, read_cores
from serve.errors import BadInput, InternalError
from serve.tasks import Answer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Progress = Callable[[int, int, str], None]  # steps done, all steps, what is being timed

TERMINATION_S = 5.0  # then a worker that has not ended is killed
REPLY_TIMEOUT_S = 600.0  # a turn takes seconds; a worker that takes longer than this counts as hung
# Thread pools that spin after a call (libgomp about 1 ms) are idle after this pause.
PAUSE_S = 0.005
SETTLED = 0.05  # a warm-up ends when two medians in a row differ by at most this share
WARMUP_CHUNKS = 10  # at most
WARMUP_CHUNK_S = 0.1  # of timed calls, or one longer call
MOST_PER_TURN = 250  # calls; limits the raw samples of a fast model to a few kilobytes a turn
TEXTS_AT_ONCE = 500  # texts scored per request to a worker
LEAST_TURNS = 6  # fewer pairs have no 95 % interval
MOST_TURNS = 400


@dataclass(frozen=True)
class Workload:
    """One shape of input."""

    name: str
    batch: int  # rows
    tokens: int  # per row, special tokens included
    input_ids: npt.NDArray[np.int64]  # (batch, tokens)


@dataclass(frozen=True)
class StoppingRule:
    """When the turns on one workload end."""

    seconds: float = 10.0
    """Wall time after which the current round is the last, if there are at least `least_turns`."""
    tight: float = 0.02
    """Relative half-width of the ratios' intervals at which the turns end."""
    turn_seconds: float = 0.03
    """Timed calls of one turn: short, so that the machine's state changes little between two candidates."""
    least_turns: int = LEAST_TURNS


@contextmanager
def start_workers(
    candidates: Sequence[Candidate],
    workloads: Sequence[Workload],
    texts: Sequence[Text] = (),
    progress: Progress | None = None,
    *,
    cold_starts: bool = False,
) -> "Iterator[dict[str, Worker]]":
    """A loaded worker for each candidate, by name; each has run every workload once. All have ended after the block.

    They load at the same time; with `cold_starts` they load one after another, so that load times are comparable. Raises
    BadInput for candidates that cannot be compared, loaded or run, InternalError for a worker that dies.
    """
    names = [candidate.name for candidate in candidates]
    if not names:
        raise BadInput("no candidate was given; give at least one model to time")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInput(f"two candidates are named {', '.join(twice)}; give each its own name")
    with ExitStack() as stack:
        workers = {}
        for i, candidate in enumerate(candidates):
            if progress:
                progress(i, len(candidates), f"loading {candidate.name}")
            worker = stack.enter_context(Worker(candidate))
            worker.send_load(workloads, texts if candidate.reads else ())
            if cold_starts:
                worker.loaded = worker.receive()
            workers[candidate.name] = worker
        if not cold_starts:
            for worker in workers.values():
                worker.loaded = worker.receive()
        for worker in workers.values():
            worker.bind()
        yield workers


def measure(
    workers: "Mapping[str, Worker]",
    workload: Workload,
    *,
    patience: StoppingRule = StoppingRule(),
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Measurement]:
    """Times every candidate on `workload`, in the order of `workers`.

    A round gives each candidate one turn, in an order drawn with `seed`. Rounds go on until the interval of each ratio to the
    first candidate is as narrow as `patience.tight` (for a single candidate: of its turns to their median), or the time is
    up. The condition "stopped" of each measurement is `tight` or `time`.
    """
    chunk_s = min(WARMUP_CHUNK_S, patience.seconds / WARMUP_CHUNKS)
    for worker in workers.values():
        last_ms = math.inf
        for _ in range(WARMUP_CHUNKS):
            chunk = worker.run(workload, seconds=chunk_s, least=1, most=10_000)
            median_ms = float(np.median(chunk["samples_ms"]))
            if abs(median_ms - last_ms) <= SETTLED * median_ms:
                break
            last_ms = median_ms

    def take(worker: Worker, _turn: int) -> Any:
        return worker.run(workload, seconds=patience.turn_seconds, least=1, most=MOST_PER_TURN)

    logs, stopped = interleave_turns(workers, take, lambda each: each["samples_ms"], patience, seed, progress)
    return [
        measurement_of(workers[name], log, stopped, batch=workload.batch, tokens=workload.tokens)
        for name, log in logs.items()
    ]


@dataclass
class Log:
    """The results so far of a candidate's turns on one workload."""

    turns: list[dict[str, Any]] = field(default_factory=list)
    turns_ms: list[list[float]] = field(default_factory=list)
    other_core_seconds: float = 0.0  # of other processes; 0 if the system does not report them
    seconds: float = 0.0
    joules: float | None = 0.0  # of all processor packages; None without energy counters


def interleave_turns(
    workers: "Mapping[str, Worker]",
    take: "Callable[[Worker, int], dict[str, Any]]",
    samples_ms: Callable[[dict[str, Any]], list[float]],
    patience: StoppingRule,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[dict[str, Log], str]:
    """Runs rounds with one turn of each of `workers`; returns their results, and why the rounds ended: `tight` or `time`."""
    logs: dict[str, Log] = {name: Log() for name in workers}
    shuffler = random.Random(seed)
    began_s = time.monotonic()
    for turn in range(MOST_TURNS):
        for name in shuffler.sample(list(workers), len(workers)):
            if progress:
                progress(min(99, int(100 * (time.monotonic() - began_s) / max(patience.seconds, 0.001))), 100, name)
            log = logs[name]
            time.sleep(PAUSE_S)
            energy = energy_counters()
            turn_began_s, before_s = time.perf_counter(), busy_core_seconds()
            taken = take(workers[name], turn)
            after_s = busy_core_seconds()
            spent = energy_counters()

            if energy and spent and log.joules is not None:
                log.joules += joules_between(energy, spent)
            else:
                log.joules = None
            log.turns.append(taken)
            log.turns_ms.append(samples_ms(taken))
            log.seconds += time.perf_counter() - turn_began_s
            if before_s is not None and after_s is not None:
                log.other_core_seconds += after_s - before_s - taken["cpu_s"]
        if turn + 1 < patience.least_turns:
            continue
        if turn % max(1, turn // 20) == 0 and _tight(logs, patience.tight):
            return logs, "tight"
        if time.monotonic() - began_s > patience.seconds:
            return logs, "time"
    return logs, "tight" if _tight(logs, patience.tight) else "time"


def _tight(logs: Mapping[str, Log], tight: float) -> bool:
    turns = [[np.asarray(turn_ms) for turn_ms in log.turns_ms] for log in logs.values()]
    if len(turns) == 1:  # no other candidate: its turns are paired with their median
        middle = np.median([float(np.median(turn_ms)) for turn_ms in turns[0]])
        turns = [[np.array([middle])] * len(turns[0]), turns[0]]
    first: list[npt.NDArray[np.float64]] = turns[0]
    return all(math.log(high / low) / 2 <= tight for _, low, high in (paired_ratio(first, each) for each in turns[1:]))


def measurement_of(worker: "Worker", log: Log, stopped: str, *, batch: int, tokens: int | None) -> Measurement:
    """The turns in `log` as one measurement, with its conditions for its readers."""
    conditions: dict[str, Condition] = {
        "runtime": worker.candidate.runtime,
        "precision": worker.candidate.precision,
        "device": worker.candidate.device,
        "threads": worker.candidate.threads,
        "process": "one per candidate, taking turns",
        "cores": ",".join(map(str, worker.cores)) or "all",
        "turns": len(log.turns_ms),
        "stopped": stopped,
        "other_load_cores": round(max(0.0, log.other_core_seconds / log.seconds), 2),
    }
    return Measurement(
        candidate=worker.candidate.name,
        batch=batch,
        tokens=tokens,
        samples_ms=tuple(sample_ms for turn_ms in log.turns_ms for sample_ms in turn_ms),
        warmup=sum(turn["warmup"] for turn in log.turns),
        conditions=conditions,
        turn_sizes=tuple(map(len, log.turns_ms)),
    )


def timing_environment() -> dict[str, str]:
    """The environment of a process that measures: it can import these packages, and its OpenMP threads do not spin.

    Threads that spin while they wait take the cores from the other candidates.
    """
    root = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": search_path, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


class Worker:
    """A `latency.measure.worker` process for one candidate; a context manager that always ends its process."""

    loaded: dict[str, Any]

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.cores: list[int] = []  # that it is bound to; empty: it may run on all

    def __enter__(self) -> "Worker":
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # closed in __exit__
        self._spawned_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "latency.measure.worker"],
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
        # A worker has nothing to save and its current call may take long, so it is ended without waiting for the call.
        self.process.terminate()
        try:
            self.process.wait(TERMINATION_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with suppress(BrokenPipeError):  # a dead worker left bytes unread
                    pipe.close()
        self._stderr.close()

    def bind(self) -> None:
        """Pins a candidate with fewer threads than cores to the first cores, on systems that can pin.

        It gets one CPU of each core, so that no two threads share a core. Under a control group's CPU quota it is not pinned,
        since threads of such a group run on any CPU. Cores of a machine with other load differ in speed. Without pinning, the
        interval between two identical models was about twice as wide (2 cores of a virtual machine: 1.1 to 2.4 % after 4 s;
        pinned 0.7 to 1.3 %).
        """
        tasks = Path(f"/proc/{self.process.pid}/task")
        cores = one_cpu_a_core()
        if not tasks.is_dir() or read_cores().quota_cores is not None:
            return
        if self.candidate.threads >= len(cores) or self.candidate.device != "cpu":
            return
        self.cores = cores[: self.candidate.threads]
        for task in tasks.iterdir():
            with suppress(ProcessLookupError):  # the thread has just ended
                os.sched_setaffinity(int(task.name), self.cores)

    def send_load(self, workloads: Sequence[Workload], texts: Sequence[Text] = ()) -> None:
        """Asks the worker to load its candidate, and to run a text and each workload once; `receive` waits for the reply."""
        packed = {workload.name: workload.input_ids.tolist() for workload in workloads}
        described = self.candidate.as_dict()
        self._texts = len(texts)
        given = {"candidate": described, "work": packed, "texts": list(texts), "spawned_s": self._spawned_s}
        self._send({"command": "load", **given})

    def run(self, workload: Workload, *, seconds: float, least: int, most: int) -> Any:
        """One turn on rows of token ids; see `latency.measure.worker.timed_calls`."""
        return self.ask("run", work=workload.name, seconds=seconds, least=least, most=most)

    def answers(self) -> "list[Answer]":
        """The candidate's answers to all texts, requested in parts so that no request reaches the timeout."""
        found: list[Answer] = []
        while len(found) < self._texts:
            found += self.ask("answers", first=len(found), count=TEXTS_AT_ONCE)
        return found

    def stream(self, chosen: Sequence[int], passes: int) -> Any:
        """One turn on the chosen texts, one at a time."""
        return self.ask("stream", chosen=list(chosen), passes=passes)

    def offline(self, count: int, batch_tokens: int) -> Any:
        """One pass over the first `count` texts."""
        return self.ask("offline", count=count, batch_tokens=batch_tokens)

    def serve(
        self, at_s: Sequence[float], chosen: Sequence[int], *, most: int, bound_s: float, late_allowed: int
    ) -> Any:
        """The chosen texts, due at given moments, until more than `late_allowed` answers take longer than `bound_s`."""
        self._send(
            {
                "command": "serve", "at_s": list(at_s), "chosen": list(chosen), "most": most, "bound_s": bound_s,
                "late_allowed": late_allowed,
            }
        )  # fmt: skip
        last_s = at_s[-1]  # waiting for the last text is not a hang
        return self.receive(last_s + REPLY_TIMEOUT_S)

    def ask(self, command: str, **given: Any) -> Any:
        """The worker's reply to a command; see `latency.measure.worker`."""
        self._send({"command": command, **given})
        return self.receive()

    def receive(self, timeout_s: float | None = None) -> Any:
        """The worker's next reply, within `timeout_s` (default REPLY_TIMEOUT_S).

        Raises BadInput for a reply that reports an error, InternalError without a reply.
        """
        assert self.process.stdout
        timeout_s = REPLY_TIMEOUT_S if timeout_s is None else timeout_s
        hung = threading.Timer(timeout_s, self.process.kill)  # ends the read below
        hung.daemon = True  # an interrupt before `cancel` must not wait for the timer
        try:
            hung.start()
            line = self.process.stdout.readline()
        finally:
            hung.cancel()
        if not line:
            status = self.process.wait()
            raise InternalError(
                f"the process that timed {self.candidate.name!r} ended with status {status} "
                f"(or took over {timeout_s:.0f} s and was killed). Its last output:\n{self.last_words()}"
            )
        reply: object = json.loads(line)
        if isinstance(reply, dict) and "error" in reply:
            self.process.wait()
            if reply["named"]:
                raise BadInput(str(reply["error"]))
            raise BadInput(
                f"candidate {self.candidate.name!r} ({self.candidate.runtime}, {self.candidate.path}) cannot be timed: "
                f"{reply['error']}. Its last output:\n{self.last_words()}"
            )
        return reply

    def last_words(self, lines: int = 12) -> str:
        """The last lines of the worker's stderr."""
        self._stderr.seek(0)
        said = self._stderr.read().decode("utf-8", errors="replace").strip().splitlines()
        return "\n".join(said[-lines:]) or "(nothing)"

    def _send(self, request: dict[str, object]) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # the worker has died; `receive` raises the error
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()


def from_texts(texts: Sequence[str], tokenizer: "Tokenizer", batch: int, tokens: int) -> Workload:
    """A workload of `batch` rows of exactly `tokens` tokens, cut from `texts` in order.

    Texts are joined until a row is full, and the rest of the last text is cut off. Each row starts with a new text and has
    the tokenizer's special tokens, like a real input. After the last text the first follows again. Raises BadInput when
    no text has a token, or when `tokens` leaves no room for any.
    """
    if batch < 1:
        raise BadInput(f"batch {batch} was given; a workload needs 1 or more rows")
    text_ids = [ids for ids in (_plain_ids(tokenizer, text) for text in texts) if ids]
    if not text_ids:
        raise BadInput(f"{len(texts)} texts were given, without any token; give texts like those that will be served")
    # The special tokens that the tokenizer puts before and after a text.
    encoding = tokenizer.encode(next(text for text in texts if _plain_ids(tokenizer, text)))
    kinds = zip(encoding.ids, encoding.special_tokens_mask, encoding.attention_mask, strict=True)
    real = [(token, bool(special)) for token, special, attended in kinds if attended]
    own = [i for i, (_, special) in enumerate(real) if not special]
    opening, closing = ([token for token, _ in part] for part in (real[: own[0]], real[own[-1] + 1 :]))
    room = tokens - len(opening) - len(closing)
    if room < 1:
        raise BadInput(
            f"{tokens} tokens were asked for, but special tokens alone take {len(opening) + len(closing)}; "
            f"ask for {len(opening) + len(closing) + 1} or more"
        )
    rows, position = [], 0
    for _ in range(batch):
        row: list[int] = []
        while len(row) < room:
            row += text_ids[position % len(text_ids)]
            position += 1
        rows.append([*opening, *row[:room], *closing])
    return Workload(f"batch {batch} x {tokens} tokens", batch, tokens, np.array(rows, dtype=np.int64))


def _plain_ids(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Ids of `text` without special tokens and without padding, even if the tokenizer pads."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return [token for token, real in zip(encoding.ids, encoding.attention_mask, strict=True) if real]
