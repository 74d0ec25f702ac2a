"""The graphs of bundles in onnxruntime on a GPU: how far from the CPU, whether company changes an answer, and milliseconds a call.

    python benchmarks/export/on_gpu.py BUNDLE... [--out on_gpu.json]

Each graph in fp32 and fp16 answers 32 random texts of 60 tokens together and one by one on the GPU, and together on the CPU in the
bundle's fp32. Then calls are timed, medians of 60, copies to and from the GPU included. Prints a JSON document.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from latency.measure.machine import machine_facts
from serve.bundle.runtimes import CUDA, gpu_lacks
from serve.model.session import onnxruntime_options, onnxruntime_session
from serve.tasks import open_bundle

TEXTS, TOKENS = 32, 60
SHAPES = ((1, 16), (1, 128), (8, 128), (64, 128), (256, 32))
WARM, CALLS = 10, 60


class Graph:
    """A graph on one device. It is called with token ids and gives logits."""

    def __init__(self, file: Path, provider: str) -> None:
        self.session = onnxruntime_session(file, onnxruntime_options(1), provider)

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        feeds = {node.name: given[node.name] for node in self.session.get_inputs()}
        return np.asarray(self.session.run(None, feeds)[0], dtype=np.float32)


def measured(bundle: Path) -> dict[str, Any]:
    """The results of each variant that a GPU runs."""
    opened = open_bundle(bundle)
    drawn = np.random.default_rng(0)
    ids = drawn.integers(5, 1_000, (TEXTS, TOKENS))
    expected = Graph(opened.onnx_file("fp32"), "CPUExecutionProvider")(ids)
    found: dict[str, Any] = {}
    for name, variant in opened.manifest.variants.items():
        if name == "int8" or variant.runtime != "onnxruntime":
            continue
        graph = Graph(opened.onnx_file(name), CUDA)
        together, alone = graph(ids), np.concatenate([graph(row[None]) for row in ids])
        found[name] = {
            "largest_logit": float(np.abs(expected).max()),
            "from_cpu": float(np.abs(together - expected).max()),
            "same_label": float((together.argmax(-1) == expected.argmax(-1)).mean()),
            "alone_from_together": float(np.abs(together - alone).max()),
            "ms": {},
        }
        for shape in SHAPES:
            rows = drawn.integers(5, 1_000, shape)
            times = []
            for _ in range(WARM + CALLS):
                began = time.perf_counter()
                graph(rows)
                times.append(1e3 * (time.perf_counter() - began))
            found[name]["ms"]["x".join(map(str, shape))] = statistics.median(times[WARM:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if lacks := gpu_lacks():
        sys.exit(lacks)
    text = json.dumps({"machine": machine_facts(), "bundles": {str(b): measured(b) for b in given.bundles}}, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
