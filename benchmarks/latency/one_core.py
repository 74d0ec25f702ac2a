"""Compare the threads that `serve` chooses with onnxruntime's default, in a container with one core of CPU time.

    python benchmarks/latency/one_core.py BUNDLE [--variant int8] [--tokens 16,128] [--pauses-ms 0,5] [--seconds 45] [--json F]

It makes a control group with a quota of one core, which needs root and a writable cgroup file system (otherwise exit code 2). In the
group, one process runs for each way to run the same file, one text a call: as served, with onnxruntime's default options, and with
these but without idle threads that spin. They take turns, with pauses in which the quota is refilled. Prints percentiles of a call,
the number of throttled periods of 100 ms, and the p99 of each way over that of the first, with a 95 % interval over turns. The exit
code is 1 if the answers differ.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "tests" / "serve")]
from limited_group import inside, limited_group  # noqa: E402 - the tests are no package

from latency.measure.machine import busy_core_seconds, machine_facts  # noqa: E402
from latency.measure.workloads import from_texts  # noqa: E402
from serve.bundle.cpu import read_cores, why  # noqa: E402
from serve.model.session import open_graph  # noqa: E402
from serve.tasks import open_bundle  # noqa: E402
from serve.text.tokenizer import load_tokenizer  # noqa: E402

WAYS = ["as served", "default", "default, not spinning"]
TEXTS = [
    "please book a table for two in Oslo tomorrow at seven",
    "play the second album of that band from the nineties",
]
TURNS = 7
REST_S = 0.2  # two periods of the quota
UNTIMED = 3  # first calls of each turn, while the caches still hold data of another process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--variant", help="default: the bundle's own")
    parser.add_argument("--tokens", default="16,128")
    parser.add_argument("--pauses-ms", default="0,5", help="pauses between the calls; 0 for none")
    parser.add_argument("--seconds", type=float, default=45.0, help="of calls, in total")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exits, so that the group is removed
    bundle = open_bundle(given.bundle)
    tokenizer = load_tokenizer(bundle.path, bundle.manifest.max_length)
    onnx_file = bundle.onnx_file(given.variant or bundle.manifest.default_variant)
    rows = {n: from_texts(TEXTS, tokenizer, 1, n).input_ids.tolist() for n in map(int, given.tokens.split(","))}
    cells = [(tokens, float(pause_ms)) for tokens in rows for pause_ms in given.pauses_ms.split(",")]
    seconds = given.seconds / (len(cells) * len(WAYS) * TURNS)
    document: dict[str, Any] = {"machine": machine_facts(), "file": onnx_file.name, "cells": []}
    began_s, busy_before_s = time.perf_counter(), busy_core_seconds() or 0.0
    with limited_group(1.0) as group:
        if group is None:
            print("a control group with a quota of CPU time could not be made; run this as root", file=sys.stderr)
            return 2
        with ExitStack() as stack:
            command = [sys.executable, str(Path(__file__).absolute()), "--inside", str(onnx_file.absolute())]
            processes = {way: stack.enter_context(started(inside(group, [*command, way]))) for way in WAYS}
            document["threads"] = {way: told(process)["threads"] for way, process in processes.items()}
            for cell in cells:
                document["cells"].append(timed(processes, group, rows[cell[0]], cell, seconds))
    busy_s, wall_s = (busy_core_seconds() or 0.0) - busy_before_s, time.perf_counter() - began_s
    document["other_load_cores"] = round((busy_s - own_cpu_s()) / wall_s, 2)
    print(json.dumps(document["machine"]))
    print(f"other processes used {document['other_load_cores']} cores of this machine on average")
    print(onnx_file.name, *(f"{way}: {threads}" for way, threads in document["threads"].items()), sep="\n")
    for cell in document["cells"]:
        show(cell)
    if given.json:
        given.json.write_text(json.dumps(document))
    if largest := max(cell["largest_difference"] for cell in document["cells"]):
        print(f"the answers differ by up to {largest:.3g}")
        return 1
    print("the answers are equal, bit for bit")
    return 0


def timed(
    processes: dict[str, "subprocess.Popen[str]"],
    group: Path,
    rows: list[list[int]],
    cell: tuple[int, float],
    seconds: float,
) -> dict[str, Any]:
    """The times of one number of tokens and one pause: {"tokens", "pause_ms", "ways": {way: {"turns_ms", ...}}, ...}."""
    tokens, pause_ms = cell
    ways: dict[str, dict[str, Any]] = {way: {"turns_ms": [], "throttled": 0, "periods": 0} for way in processes}
    answers = {}
    for turn in range(TURNS):
        for way in random.Random(turn).sample(WAYS, len(WAYS)):
            time.sleep(REST_S)
            before = counted(group)
            said = asked(processes[way], {"rows": rows, "pause_s": pause_ms / 1000, "seconds": seconds})
            after = counted(group)
            ways[way]["turns_ms"].append(said["calls_ms"])
            ways[way]["throttled"] += after["nr_throttled"] - before["nr_throttled"]
            ways[way]["periods"] += after["nr_periods"] - before["nr_periods"]
            answers[way] = np.array(said["answer"])
    differences = [float(np.abs(answer - answers[WAYS[0]]).max()) for answer in answers.values()]
    return {"tokens": tokens, "pause_ms": pause_ms, "ways": ways, "largest_difference": max(differences)}


def own_cpu_s() -> float:
    """Core-seconds of this process and of its ended child processes."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def show(cell: dict[str, Any]) -> None:
    pause = f"{cell['pause_ms']:g} ms between calls" if cell["pause_ms"] else "back to back"
    print(f"\n1 x {cell['tokens']} tokens, {pause}")
    served_ms = cell["ways"][WAYS[0]]["turns_ms"]
    for way, row in cell["ways"].items():
        calls_ms = np.concatenate(row["turns_ms"])
        p50, p90, p99 = np.percentile(calls_ms, [50, 90, 99])
        low, high = p99_ratio_interval(row["turns_ms"], served_ms)
        ratio = p99 / np.percentile(np.concatenate(served_ms), 99)
        print(
            f"{way:22s} p50 {p50:7.2f}  p90 {p90:7.2f}  p99 {p99:7.2f}  max {calls_ms.max():7.2f} ms of {len(calls_ms):5d} calls  "
            f"throttled {row['throttled']:3d} of {row['periods']:3d} periods  p99 ratio {ratio:5.2f} [{low:.2f}, {high:.2f}]"
        )


def p99_ratio_interval(
    turns_ms: Sequence[Sequence[float]], served_ms: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """The 95 % interval of the ratio of p99, by a paired bootstrap over turns."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(2000):
        picks = rng.integers(len(turns_ms), size=len(turns_ms))
        one, served = (np.concatenate([turns[i] for i in picks]) for turns in (turns_ms, served_ms))
        drawn.append(np.percentile(one, 99) / np.percentile(served, 99))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def counted(group: Path) -> dict[str, int]:
    """The kernel's counters of the group, such as `nr_periods` and `nr_throttled`."""
    return {name: int(count) for name, count in map(str.split, (group / "cpu.stat").read_text().splitlines())}


def started(command: Sequence[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def asked(process: "subprocess.Popen[str]", request: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return told(process)


def told(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a process in the group ended with status {process.wait()}")
    said: dict[str, Any] = json.loads(line)
    return said


def answer_inside(onnx_file: Path, way: str) -> None:
    """The process in the group: reads requests from stdin, a line each, and prints the times, until stdin ends."""
    inputs, run, threads = opened(onnx_file, way)
    print(json.dumps({"threads": threads}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        input_ids = np.array(request["rows"], dtype=np.int64)  # (1, tokens)
        columns = {"attention_mask": np.ones_like(input_ids), "token_type_ids": np.zeros_like(input_ids)}
        feeds = {name: columns.get(name, input_ids) for name in inputs}
        for _ in range(UNTIMED):
            answer = run(feeds)
        calls_ms, ends_s = [], time.perf_counter() + request["seconds"]
        while time.perf_counter() < ends_s:
            began_s = time.perf_counter()
            answer = run(feeds)
            calls_ms.append(round((time.perf_counter() - began_s) * 1000, 4))
            if request["pause_s"]:
                time.sleep(request["pause_s"])
        print(json.dumps({"calls_ms": calls_ms, "answer": answer.tolist()}), flush=True)


def opened(onnx_file: Path, way: str) -> tuple[tuple[str, ...], Callable[[dict[str, np.ndarray]], np.ndarray], str]:
    """The graph's inputs, the function from feeds to logits, and a description of its threads."""
    import onnxruntime as ort

    if way == WAYS[0]:
        cores = read_cores()
        graph = open_graph(onnx_file, cores.chosen, "onnxruntime")
        return graph.inputs, lambda feeds: graph.run(feeds, "logits"), why(cores)
    options = ort.SessionOptions()
    if way == WAYS[2]:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    threads_before = threads_here()
    session = ort.InferenceSession(str(onnx_file), options, providers=["CPUExecutionProvider"])
    threads = threads_here() - threads_before + 1  # the calling thread computes too
    names = tuple(node.name for node in session.get_inputs())
    return names, lambda feeds: session.run(["logits"], feeds)[0], f"{threads} threads"


def threads_here() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        answer_inside(Path(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main())
