"""One candidate in a process of its own: `python -m latency.measure.worker`, JSON lines in, JSON lines out.

    {"command": "load", "candidate": {...}, "work": {name: input_ids}, "texts": [...], "spawned_s"}
        -> {"load_ms", "first_answer_ms", "cold_start_ms" from the start of the process}
    {"command": "answers", "first", "count"}                    these texts -> [answer of each, see `serve.text.answers`]
    {"command": "run", "work": name, "seconds", "least", "most"}        rows of token ids -> as `timed_calls`
    {"command": "stream", "chosen": [index of text], "passes"}          one text at a time -> as `timed_calls`, and
        "samples": [[tokens, tokenise_ms, run_ms, decode_ms]], in whole passes over the texts
    {"command": "offline", "count", "batch_tokens"}             the first texts, sorted by length
        -> {"wall_s", "tokens", "padded_tokens", "cpu_s"}
    {"command": "serve", "at_s", "chosen", "most", "bound_s", "late_allowed"}  texts due at given moments
        -> {"latencies_ms" from the due moment, in the order of arrival, "cut_short": too many answers exceeded the bound}
    {"command": "operators", "input_ids"}                       -> as `latency.measure.operators.operators`
    {"command": "memory"}                                       -> {"steady_bytes", "peak_bytes"}, or nulls
    the end of the input (the parent has died)
        -> exit 0
    any failure
        -> {"error": message, "named": true for BadInput}, a traceback on stderr, exit 1

Each candidate has its own process because idle threads of one runtime spin, and slow other runtimes in the same process:
one model took 28 ms interleaved with others in one process and 9 ms alone (2 cores, AMD Zen 5). Between its turns a
worker blocks on a read. Modules that read the thread counts are imported only after "load" has set them.
"""

import gc
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from serve.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from latency.candidates.candidate import Call, Candidate
    from latency.candidates.end_to_end import EndToEnd, Parts, Text
    from serve.tasks import Answer

# The last is for the tokenizer, which would otherwise use every core for a batch of texts.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")

STILL_FASTER = 0.97  # a pass that takes less than this share of the fastest so far: the candidate is still warming up
SETTLED_AFTER = 3  # this many calls in a row without that end the warm-up
SETTLING_BOUND_S = 0.1
SPIN_S = 0.0003  # a sleep ends about this late, so the last part of a wait is a spin
SCORING_TOKENS = 4096  # padded tokens in a batch of texts that are scored, not timed


class Ready:
    """A loaded candidate, its workloads and its texts."""

    def __init__(self, candidate: "Candidate", call: "Call", texts: "Sequence[Text]") -> None:
        self.candidate, self.call, self.texts = candidate, call, texts
        self.rows: dict[str, Callable[[], object]] = {}
        self.end_to_end: EndToEnd | None = None

    def answers(self) -> "EndToEnd":
        """The candidate from text to answer; only for one that got texts."""
        assert self.end_to_end is not None
        return self.end_to_end


def timed_calls(calls: Sequence[Callable[[], object]], *, seconds: float, least: int, most: int) -> dict[str, Any]:
    """Times whole passes over `calls` until timed calls add up to `seconds`, with at least `least` and at most `most` calls.

    Calls are made unrecorded before, until they get no faster: the caches held another process's data, and a core that
    slept is slow for some milliseconds. `warmup` counts them. `wall_s` and `cpu_s` (of all threads of this process) include them.
    """
    with _undisturbed():
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        warmup = _settle(calls)
        samples_ns: list[int] = []
        spent_ns, budget_ns = 0, int(seconds * 1e9)
        while len(samples_ns) < least or (spent_ns < budget_ns and len(samples_ns) + len(calls) <= most):
            for call in calls:
                start_ns = time.perf_counter_ns()
                call()
                samples_ns.append(time.perf_counter_ns() - start_ns)
                spent_ns += samples_ns[-1]
        return {
            "samples_ms": [round(sample_ns / 1e6, 4) for sample_ns in samples_ns],
            "warmup": warmup,
            "wall_s": time.perf_counter() - began_s,
            "cpu_s": time.process_time() - began_cpu_s,
        }


def _settle(calls: Sequence[Callable[[], object]]) -> int:
    """Makes whole passes over `calls` until they get no faster, or up to a time limit; returns the number of calls."""
    fastest_s, still, spent_s, made = float("inf"), 0, 0.0, 0
    needed = max(1, SETTLED_AFTER // len(calls))
    while still < needed and spent_s < SETTLING_BOUND_S:
        start_s = time.perf_counter()
        for call in calls:
            call()
        took_s = time.perf_counter() - start_s
        made, spent_s = made + len(calls), spent_s + took_s
        if took_s < STILL_FASTER * fastest_s:
            fastest_s, still = took_s, 0
        else:
            still += 1
    return made


@contextmanager
def _undisturbed() -> "Iterator[None]":
    """Disables Python's garbage collector, and runs it afterwards."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(0)


@contextmanager
def _cannot_run(candidate: "Candidate", what: str) -> "Iterator[None]":
    """BadInput with the runtime's reason if a graph does not run `what`, such as one of a fixed shape."""
    try:
        yield
    except Exception as error:
        if candidate.runtime.startswith("torch") or isinstance(error, BadInput):
            raise
        raise BadInput(
            f"candidate {candidate.name!r}: {candidate.path} does not run {what} ({' '.join(str(error).split())[:300]}). Export it for "
            "any number of texts and tokens."
        ) from error


def _load(request: Mapping[str, Any]) -> tuple[Ready, dict[str, Any]]:
    """Loads the candidate and runs every workload once, so that a candidate that cannot run fails before timing."""
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(request["candidate"]["threads"])))
    import numpy as np

    from latency.candidates.candidate import Candidate, load

    candidate = Candidate.from_dict(request["candidate"])
    start_s = time.perf_counter()
    texts = [text if isinstance(text, str) else (text[0], text[1]) for text in request["texts"]]
    ready = Ready(candidate, load(candidate), texts)
    load_s = time.perf_counter() - start_s
    first_answer_s = 0.0
    if ready.texts:
        from latency.candidates.end_to_end import EndToEnd

        ready.end_to_end = EndToEnd(candidate, ready.call)
        start_s = time.perf_counter()
        with _cannot_run(candidate, "a text"):
            ready.end_to_end.one(ready.texts[0])
        first_answer_s = time.perf_counter() - start_s
    answered_s = time.monotonic()
    for name, rows in request["work"].items():
        inputs = inputs_of(np.array(rows, dtype=np.int64))
        start_s = time.perf_counter()
        with _cannot_run(candidate, " x ".join(map(str, inputs["input_ids"].shape)) + " tokens"):
            answer = ready.call(inputs)
        if not first_answer_s:
            first_answer_s, answered_s = time.perf_counter() - start_s, time.monotonic()
        if answer.shape[0] != len(rows) or not np.isfinite(answer).all():
            raise BadInput(
                f"candidate {candidate.name!r}: {candidate.path} does not answer {name} with one row of finite numbers for each text: "
                f"its answer has the shape {answer.shape}. Export it again."
            )
        ready.rows[name] = partial(ready.call, inputs)
    gc.collect()
    gc.freeze()  # the collector ignores objects that stay
    return ready, {
        "load_ms": 1e3 * load_s,
        "first_answer_ms": 1e3 * first_answer_s,
        "cold_start_ms": 1e3 * (answered_s - request["spawned_s"]),
    }


def inputs_of(input_ids: Any) -> dict[str, Any]:
    """The inputs of a model for rows without padding."""
    import numpy as np

    return {
        "input_ids": input_ids,
        "attention_mask": np.ones_like(input_ids),
        "token_type_ids": np.zeros_like(input_ids),
    }


def _stream(ready: Ready, request: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen texts one at a time, in whole passes, since a time limit would include short texts more often."""
    end_to_end = ready.answers()
    parts: list[Parts] = []

    def answer_one(text: "Text") -> None:
        parts.append(end_to_end.one(text))

    calls = [partial(answer_one, ready.texts[i]) for i in request["chosen"]]
    count = request["passes"] * len(calls)
    turn = timed_calls(calls, seconds=0.0, least=count, most=count)
    kept = parts[turn["warmup"] :]
    return {**turn, "samples": [[each.tokens, *(round(ms, 4) for ms in each[1:])] for each in kept]}


def _answers(ready: Ready, request: Mapping[str, Any]) -> "list[Answer]":
    chosen = ready.texts[request["first"] : request["first"] + request["count"]]
    return ready.answers().many(chosen, SCORING_TOKENS).answers


def _offline(ready: Ready, request: Mapping[str, Any]) -> dict[str, Any]:
    with _undisturbed():
        began_cpu_s = time.process_time()
        answered = ready.answers().many(ready.texts[: request["count"]], request["batch_tokens"])
        cpu_s = time.process_time() - began_cpu_s
    return {
        "wall_s": answered.wall_s,
        "tokens": answered.parts.tokens,
        "padded_tokens": answered.padded_tokens,
        "cpu_s": cpu_s,
    }


def _serve(ready: Ready, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answers texts that are due at given moments; waiting texts are batched, up to `most`.

    Latency counts from the due moment, even if this process starts late. The trial ends when more than `late_allowed`
    answers took longer than `bound_s`.
    """
    at_s, chosen, most = request["at_s"], request["chosen"], request["most"]
    end_to_end = ready.answers()
    latencies_ms: list[float] = []
    late = 0
    with _undisturbed():
        start_s = time.perf_counter()
        while len(latencies_ms) < len(at_s):
            first = len(latencies_ms)
            left_s = start_s + at_s[first] - time.perf_counter()
            if left_s > SPIN_S:
                time.sleep(left_s - SPIN_S)
            while time.perf_counter() < start_s + at_s[first]:
                pass
            now_s = time.perf_counter() - start_s
            due = first + 1
            while due < min(len(at_s), first + most) and at_s[due] <= now_s:
                due += 1
            end_to_end.many([ready.texts[i] for i in chosen[first:due]], batch_tokens=sys.maxsize)
            done_s = time.perf_counter() - start_s
            latencies_ms += [round(1e3 * (done_s - at), 4) for at in at_s[first:due]]
            late += sum(done_s - at > request["bound_s"] for at in at_s[first:due])
            if late > request["late_allowed"]:
                break
    return {"latencies_ms": latencies_ms, "cut_short": late > request["late_allowed"]}


def _memory(_ready: Ready, _request: Mapping[str, Any]) -> dict[str, int | None]:
    from latency.measure.machine import resident_bytes

    steady_bytes, peak_bytes = resident_bytes() or (None, None)
    return {"steady_bytes": steady_bytes, "peak_bytes": peak_bytes}


def _operators(ready: Ready, request: Mapping[str, Any]) -> object:
    import numpy as np

    from latency.measure.operators import operators

    inputs = inputs_of(np.array(request["input_ids"], dtype=np.int64))
    return operators(ready.candidate.path, inputs, ready.candidate.threads)


def _run(ready: Ready, request: Mapping[str, Any]) -> dict[str, Any]:
    limits = {key: request[key] for key in ("seconds", "least", "most")}
    return timed_calls([ready.rows[request["work"]]], **limits)


COMMANDS: dict[str, Callable[[Ready, Mapping[str, Any]], object]] = {
    "answers": _answers,
    "run": _run,
    "stream": _stream,
    "offline": _offline,
    "serve": _serve,
    "operators": _operators,
    "memory": _memory,
}


def _requests() -> Iterator[str]:
    """The lines of this process's stdin. At their end the process ends, whatever it does then: its parent has gone.

    A thread reads them, from a file of its own: one that waits for `sys.stdin` would break the exit of the interpreter.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in os.fdopen(os.dup(0), encoding="utf-8"):
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def main() -> int:
    """Answers each line of this process's stdin with one line on its stdout, until the end of the input."""
    # Ctrl-C reaches the whole process group; the parent handles it and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Native libraries may print to stdout, so stdout is redirected to stderr; only `replies` is the real one.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    ready: Ready | None = None
    try:
        for line in _requests():
            request = json.loads(line)
            reply: object
            if request["command"] == "load":
                ready, reply = _load(request)
            else:
                assert ready is not None
                reply = COMMANDS[request["command"]](ready, request)
            print(json.dumps(reply), file=replies, flush=True)
    except Exception as error:  # every failure is reported to the parent, and ends this process
        traceback.print_exc()
        named = isinstance(error, BadInput)
        message = str(error) if named else f"{type(error).__name__}: {error}"
        print(json.dumps({"error": message, "named": named}), file=replies, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
