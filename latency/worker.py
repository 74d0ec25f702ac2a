"""One candidate in a process of its own: `python -m latency.worker`, JSON lines in, JSON lines out.

    {"command": "load", "candidate": {...}, "work": {name: input_ids}}
        -> {"loaded": true}
    {"command": "run", "work": name, "seconds", "least", "most", "untimed"}
        -> {"samples_ms": [...], "wall_s", "cpu_s"}
    {"command": "quit"}, or the end of the input, which means that the parent has died
        -> exit 0
    whatever fails
        -> {"error": message, "named": is it one of our own errors}, a traceback on stderr, exit 1

A process of its own, because the idle threads of one runtime spin and slow the other where two share a process: one
model took 28 ms interleaved with others in one process and 9 ms alone (2 cores, AMD Zen 5). Between its turns a worker
blocks on a read. Nothing that reads the thread counts is imported before "load" has set them.
"""

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, TypedDict

from serve.errors import BadInput

Work = dict[str, Callable[[], object]]  # by the workload's name, one call of the model on it

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Visit(TypedDict):
    """What one turn of one candidate brought."""

    samples_ms: list[float]
    wall_s: float  # of the turn, untimed calls and the collection of garbage included
    cpu_s: float  # all threads of this process, over the same time


def timed_calls(call: Callable[[], object], *, seconds: float, least: int, most: int, untimed: int) -> Visit:
    """Calls `call` until `seconds` of timed calls have passed: `least` times whatever that takes, `most` at the most.

    The first `untimed` calls are not kept: caches belonged to another process until now. The collector of garbage runs
    before and never during.
    """
    # From before the collection, which is work of ours (0.2 s with torch loaded) and not another's.
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    gc.collect()
    gc.disable()
    try:
        for _ in range(untimed):
            call()
        samples_ns: list[int] = []
        spent_ns, budget_ns = 0, int(seconds * 1e9)
        while len(samples_ns) < least or (spent_ns < budget_ns and len(samples_ns) < most):
            start_ns = time.perf_counter_ns()
            call()
            samples_ns.append(time.perf_counter_ns() - start_ns)
            spent_ns += samples_ns[-1]
        return Visit(
            samples_ms=[round(sample_ns / 1e6, 4) for sample_ns in samples_ns],
            wall_s=time.perf_counter() - began_s,
            cpu_s=time.process_time() - began_cpu_s,
        )
    finally:
        gc.enable()


def _load(request: dict[str, object]) -> Work:
    """Loads the candidate and answers every workload once, so that what cannot run fails before anything is timed."""
    described = request["candidate"]
    assert isinstance(described, dict)
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(described["threads"])))
    import numpy as np

    from latency.candidates import Candidate, load

    candidate = Candidate(**{**described, "path": Path(described["path"])})
    model = load(candidate)
    work: Work = {}
    packed = request["work"]
    assert isinstance(packed, dict)
    for name, rows in packed.items():
        input_ids = np.array(rows, dtype=np.int64)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": np.ones_like(input_ids),
            "token_type_ids": np.zeros_like(input_ids),
        }
        answer = model(inputs)
        if answer.shape[0] != len(input_ids) or not np.isfinite(answer).all():
            raise ValueError(f"its answer to {name} is not one finite row per text: shape {answer.shape}")
        work[name] = partial(model, inputs)
    return work


def _answer_all(requests: IO[str], replies: IO[str]) -> None:
    """Answers each line of `requests` with one line, until `quit` or the end."""
    work: Work = {}
    for line in requests:
        request = json.loads(line)
        reply: object
        if request["command"] == "load":
            work = _load(request)
            reply = {"loaded": True}
        elif request["command"] == "run":
            limits = {key: request[key] for key in ("seconds", "least", "most", "untimed")}
            reply = timed_calls(work[request["work"]], **limits)
        else:
            return
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> int:
    """Runs the worker on this process's own stdin and stdout."""
    # Ctrl-C reaches the whole process group; the parent decides, and closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Native libraries print where they like: what they write to stdout goes to stderr, and only we hold the real one.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        _answer_all(sys.stdin, replies)
    except Exception as error:  # the edge of a process: any failure is told to the parent, and ends us
        traceback.print_exc()
        named = isinstance(error, BadInput)
        message = str(error) if named else f"{type(error).__name__}: {error}"
        replies.write(json.dumps({"error": message, "named": named}) + "\n")
        replies.flush()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
