"""Compare our timings with those of other tools on the same model, shape and number of threads, in turns.

    python benchmarks/latency/against_others.py BUNDLE --checkpoint TEACHER --optimum /path/to/venv/bin/python

With optimum-benchmark (`pip install optimum-benchmark[onnxruntime]` in its own environment): the checkpoint in torch, and the bundle's
fp32 graph in onnxruntime; each round is a new process of theirs and a turn of ours. With onnxruntime: the time of each `Run` by its
profiler, and our time of the same call.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime as ort

from latency.candidates.candidate import Candidate
from latency.measure.interleave import Worker, Workload, start_workers, timing_environment
from latency.measure.statistics import paired_ratio
from latency.measure.worker import inputs_of
from serve.model.session import onnxruntime_options
from serve.tasks import open_bundle

WORKER = Path(__file__).with_name("optimum_benchmark_worker.py")
SECONDS = 2.0


def theirs(python: Path, backend: str, model: Path, task: str, tokens: int) -> list[float]:
    """Latencies in ms by optimum-benchmark."""
    ended = subprocess.run(
        [python, WORKER, backend, str(model), task, "1", str(tokens), str(SECONDS)],
        capture_output=True,
        text=True,
        check=False,
        env={**timing_environment(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
    )
    if ended.returncode:
        sys.exit(f"optimum-benchmark failed:\n{ended.stderr[-2000:]}")
    latencies_ms: list[float] = json.loads(ended.stdout.strip().splitlines()[-1])
    return latencies_ms


def clocks(graph: Path, inputs: dict[str, np.ndarray], calls: int) -> tuple[list[float], list[float]]:
    """The time in ms of the same calls by onnxruntime's profiler and by ours."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime_options(1)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        feeds = {node.name: inputs[node.name] for node in session.get_inputs()}
        ours_ms = []
        for _ in range(calls):
            start_ns = time.perf_counter_ns()
            session.run(None, feeds)
            ours_ms.append((time.perf_counter_ns() - start_ns) / 1e6)
        events = json.loads(Path(session.end_profiling()).read_text())
    return [event["dur"] / 1e3 for event in events if event["name"] == "model_run"], ours_ms


def in_turns(
    rounds: int, worker: Worker, rows: Workload, other: Callable[[], list[float]]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Turns of ours and of the other tool, in alternating order."""
    ours, others = [], []
    for i in range(rounds):
        order: list[Literal["ours", "other"]] = ["ours", "other"] if i % 2 else ["other", "ours"]
        for who in order:
            if who == "ours":
                ours.append(np.array(worker.run(rows, seconds=SECONDS, least=10, most=10_000)["samples_ms"]))
            else:
                others.append(np.array(other()))
    return ours, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--optimum", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--lengths", default="16,128")
    given = parser.parse_args()
    bundle = open_bundle(given.bundle)
    graph, task = bundle.onnx_file("fp32"), bundle.manifest.task
    for tokens in map(int, given.lengths.split(",")):
        rows = Workload("rows", 1, tokens, np.random.default_rng(0).integers(1000, 20_000, size=(1, tokens)))
        for backend, candidate, model in (
            ("torch", Candidate("torch", "torch", "fp32", given.checkpoint, 1), given.checkpoint),
            ("onnxruntime", Candidate("onnxruntime", "onnxruntime", "fp32", graph, 1), bundle.path),
        ):
            with start_workers([candidate], [rows]) as workers:
                other = lambda b=backend, m=model, t=tokens: theirs(given.optimum, b, m.absolute(), task, t)  # noqa: E731
                ours, others = in_turns(given.rounds, workers[candidate.name], rows, other)
            say(f"{backend} fp32, 1 x {tokens}, optimum-benchmark", others, ours)
        their_clock, our_clock = clocks(graph, inputs_of(rows.input_ids), 400)
        pairs = [[np.array([x]) for x in each[50:]] for each in (their_clock, our_clock)]
        say(f"onnxruntime fp32, 1 x {tokens}, its profiler's clock", *pairs)


def say(what: str, others: list[np.ndarray], ours: list[np.ndarray]) -> None:
    found, low, high = paired_ratio(others, ours)
    medians = [float(np.median(np.concatenate(each))) for each in (others, ours)]
    print(
        f"{what}: {medians[0]:.3f} ms, ours {medians[1]:.3f} ms, ratio {found:.4f} [{low:.4f}, {high:.4f}]", flush=True
    )


if __name__ == "__main__":
    main()
