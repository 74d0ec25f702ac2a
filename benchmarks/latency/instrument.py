"""Check the false and true positives of the timings: comparisons of an encoder with itself, and with one of 5 % more work.

    python benchmarks/latency/instrument.py --equal 400 --more 100
    python benchmarks/latency/instrument.py --equal 400 --more 100 --loaded
    python benchmarks/latency/instrument.py --equal 0 --more 0 --alone 20

Two encoders with random weights, of 20 and 21 layers, run as ONNX files in onnxruntime. Like `stillroom profile`, every comparison
starts new processes and runs until the ratio is known to within 2 %, or for `--seconds`. The result is how often the 95 % interval
excludes equality. For an encoder and itself that is a false positive; for the two encoders, in the right direction, a true positive.
The median ratio shows how much time the layer adds. `--loaded` keeps one core busy with another process throughout.

`--alone N` compares the ratio of 60 layers to 20 when the two take turns with the ratio when each has the machine to itself. An
instrument that lets idle threads spin gets them wrong by a factor of three.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from export.graph.exporter import export_graph
from latency.candidates.candidate import Candidate
from latency.measure.interleave import StoppingRule, measure, start_workers
from latency.measure.machine import machine_facts
from latency.measure.statistics import Ratio, ratio
from latency.measure.workloads import Workload

LAYERS = 20
WIDTH = 64
TOKENS = 16


def encoder(folder: Path, layers: int) -> Path:
    """An ONNX file of a BERT of `layers` layers."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        num_labels=2,
    )
    checkpoint = folder / f"layers-{layers}"
    BertForSequenceClassification(config).save_pretrained(checkpoint)
    export_graph(checkpoint, folder / f"{layers}.onnx", 64)
    return folder / f"{layers}.onnx"


def in_turns_and_alone(a: Path, b: Path, patience: StoppingRule) -> tuple[float, float]:
    """The ratio of `a`'s median time to `b`'s: taking turns, and one after the other."""
    workload, candidates = (
        work(0),
        [Candidate(name, "onnxruntime", "fp32", file, 1) for name, file in (("a", a), ("b", b))],
    )
    with start_workers(candidates, [workload]) as workers:
        first, second = (row.p50_ms for row in measure(workers, workload, patience=patience))
        alone = [measure({name: worker}, workload, patience=patience)[0].p50_ms for name, worker in workers.items()]
    return first / second, alone[0] / alone[1]


def work(seed: int) -> Workload:
    """One text of random token ids."""
    input_ids = np.random.default_rng(seed).integers(5, 1000, size=(1, TOKENS))
    return Workload(f"batch 1 x {TOKENS} tokens", 1, TOKENS, input_ids)


def compared(a: Path, b: Path, patience: StoppingRule, seed: int) -> tuple[Ratio, dict[str, object]]:
    """The ratio of `a`'s time to `b`'s, each in its own process."""
    workload = work(seed)
    candidates = [Candidate("a", "onnxruntime", "fp32", a, 1), Candidate("b", "onnxruntime", "fp32", b, 1)]
    with start_workers(candidates, [workload]) as workers:
        first, second = measure(workers, workload, patience=patience, seed=seed)
    return ratio(first, second), dict(first.conditions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--equal", type=int, default=400)
    parser.add_argument("--more", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=StoppingRule.seconds)
    parser.add_argument("--alone", type=int, default=0)
    parser.add_argument("--loaded", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    patience = StoppingRule(seconds=given.seconds)
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        equal, more = encoder(folder, LAYERS), encoder(folder, LAYERS + 1)
        if given.loaded:
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        machine = machine_facts()
        # In random order, so that changes of the machine's speed affect both kinds.
        kinds = np.random.default_rng(0).permutation(["equal"] * given.equal + ["more"] * given.more)
        began_s = time.monotonic()
        for i, kind in enumerate(kinds):
            found, conditions = compared(more if kind == "more" else equal, equal, patience, seed=i)
            rows.append({"kind": str(kind), **found._asdict(), **conditions})
            if (i + 1) % 10 == 0 or i + 1 == len(kinds):
                say(rows, time.monotonic() - began_s)
        alone = []
        if given.alone:
            deep = encoder(folder, 3 * LAYERS)
            alone = [in_turns_and_alone(deep, equal, StoppingRule(seconds=1.5, tight=0.01)) for _ in range(given.alone)]
            shares = [turns / lonely for turns, lonely in alone]
            print(
                f"ratio in turns by the ratio alone: median {np.median(shares):.3f}, from {min(shares):.3f} to {max(shares):.3f}"
            )
    if given.json:
        found = {"machine": machine, "loaded": given.loaded, "comparisons": rows, "in_turns_and_alone": alone}
        given.json.write_text(json.dumps(found, indent=1))


def say(rows: list[dict[str, object]], seconds: float) -> None:
    """Prints the results so far on one line."""
    parts = []
    for kind in ("equal", "more"):
        own = [row for row in rows if row["kind"] == kind]
        if not own:
            continue
        claimed = sum(row["low"] > 1 if kind == "more" else not row["low"] <= 1 <= row["high"] for row in own)  # type: ignore[operator]
        halves = [(row["high"] - row["low"]) / 2 / row["ratio"] for row in own]  # type: ignore[operator]
        middle = np.median([float(str(row["ratio"])) for row in own])
        parts.append(
            f"{kind}: {claimed} of {len(own)} claimed ({claimed / len(own):.1%}), median ratio {middle:.4f}, "
            f"half-width {np.median(halves):.2%}"
        )
    print(f"{seconds:6.0f} s  {'; '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
