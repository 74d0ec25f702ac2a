"""Measure the effect of `--fuse` on this CPU: the kernels, the difference of the logits, and the time relative to the plain graph.

    python benchmarks/export/joined.py [--shapes 3x384,12x768] [--sizes 1x16,1x64,8x64] [--seconds 20] [--threads 1]

The models are BERTs with random weights. Both sessions take turns in one process. The ratio is the median over turns of joined
time over plain time; above 1 is slower. The exit code is 1 if logits differ by more than 1e-4.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import torch
from transformers import BertConfig, BertForTokenClassification

from export.graph.exporter import export_graph, quiet, write_model
from export.graph.fusions import joined
from serve.model.session import onnxruntime_options, onnxruntime_session

TOKENS = 128


def graphs(folder: Path, layers: int, width: int) -> tuple[dict[str, Path], str]:
    """The files of the plain and the joined graph, and the numbers of their nodes and kernels."""
    torch.manual_seed(0)
    shape = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    model = BertForTokenClassification(BertConfig(**shape, num_attention_heads=12, max_position_embeddings=TOKENS))
    with quiet(), torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # new biases are all equal, and would be merged into one constant
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder)
    files = {name: folder / f"{name}.onnx" for name in ("plain", "joined")}
    info = export_graph(folder, files["plain"], TOKENS)
    plain = onnx.load(files["plain"])
    graph, kernels = joined(plain, info.shapes)
    write_model(graph, files["joined"])
    return files, f"{len(plain.graph.node)} nodes, joined {len(graph.graph.node)}: {kernels}"


def inputs(batch: int, tokens: int) -> dict[str, np.ndarray]:
    """A batch of texts of different lengths."""
    mask = np.arange(tokens) < np.linspace(tokens, tokens / 2, batch)[:, None]
    ids = np.random.default_rng(0).integers(5, 30_000, (batch, tokens)) * mask
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": np.zeros_like(ids)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="3x384,12x768")
    parser.add_argument("--sizes", default="1x16,1x64,8x64")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    shapes, sizes = (
        [tuple(map(int, one.split("x"))) for one in text.split(",")] for text in (given.shapes, given.sizes)
    )
    farthest = 0.0
    for layers, width in shapes:
        with tempfile.TemporaryDirectory() as folder:
            files, told = graphs(Path(folder), layers, width)
            print(f"{layers}x{width}: {told}, {[file.stat().st_size for file in files.values()]} bytes")
            options = onnxruntime_options(given.threads)
            sessions = {name: onnxruntime_session(file, options) for name, file in files.items()}
        for batch, tokens in sizes:
            feeds = inputs(batch, tokens)
            logits = {
                name: session.run(None, feeds)[0][feeds["attention_mask"] == 1] for name, session in sessions.items()
            }
            difference = float(np.abs(logits["joined"] - logits["plain"]).max())
            farthest = max(farthest, difference)
            times: dict[str, list[float]] = {name: [] for name in sessions}
            end = time.perf_counter() + given.seconds
            while time.perf_counter() < end:
                for name in random.sample(list(sessions), len(sessions)):
                    start = time.perf_counter()
                    sessions[name].run(None, feeds)
                    times[name].append(time.perf_counter() - start)
            ratio = statistics.median(j / p for j, p in zip(times["joined"], times["plain"], strict=True))
            plain_ms = statistics.median(times["plain"]) * 1000
            print(
                f"  {batch} x {tokens}: plain {plain_ms:.2f} ms, ratio {ratio:.2f}, logits differ by {difference:.1e}"
            )
    return int(farthest > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
