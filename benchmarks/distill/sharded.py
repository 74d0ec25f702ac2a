"""Distil with a teacher that is cut over two processes (`--teacher-shard`), with a whole one in each, and in one process.

    python benchmarks/distill/sharded.py --corpus text.txt [--layers 12] [--width 768] [--texts 480] [--batch 16]

The teacher is a BERT with random weights. The command line is run under torchrun with one thread a process, the one process with
`--accumulate 2`, which computes the same parts of each batch with the same dropout. Of each: the loss of every step, real tokens per
second over the training, and the private memory of each process, as a median over the second half of its life and at its highest.
Prints a JSON document.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from small_task import make_teacher  # noqa: E402 - the tests are no package

STUDENT = "layers=3,hidden=192,heads=12,ffn=768"
EVERY_S = 0.2  # between two looks at memory


def run(
    folder: Path, name: str, processes: int, given: argparse.Namespace, *more: str, **variables: str
) -> dict[str, Any]:
    """What one training showed; see the module."""
    distill = [
        "-m", "stillroom", "distill", "--teacher", "teacher", "--corpus", "text.txt", "--out", name, "--student", STUDENT, "--batch",
        str(given.batch), "--tokens", "64", "--precision", "fp32", "--no-pack", "--device", "cpu", "--threads", "2", *more,
    ]  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*launcher, "--master-port", str(port), *distill] if processes > 1 else [sys.executable, *distill]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    began = time.monotonic()
    private: dict[int, list[int]] = {}
    with open(folder / f"{name}.log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            time.sleep(EVERY_S)
            for each in watched.children(recursive=True) if processes > 1 else [watched]:
                try:
                    private.setdefault(each.pid, []).append(each.memory_full_info().uss)
                except psutil.Error:
                    continue
    if process.returncode:
        raise SystemExit((folder / f"{name}.log").read_text()[-3000:])
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": time.monotonic() - began,
        "tokens_per_s": lines[-1]["tokens_per_s"],
        "losses": [line["loss"] for line in lines],
        "private_mb": [statistics.median(seen[len(seen) // 2 :]) / 1e6 for seen in private.values()],
        "private_peak_mb": [max(seen) / 1e6 for seen in private.values()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    for name, default in (("layers", 12), ("width", 768), ("texts", 480), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "teacher").mkdir()
        make_teacher(
            folder / "teacher", hidden_size=given.width, num_hidden_layers=given.layers, num_attention_heads=given.width // 64,
            intermediate_size=4 * given.width, initializer_range=0.05,
        )  # fmt: skip
        texts = [line for line in Path(given.corpus).read_text(encoding="utf-8").splitlines() if line.strip()]
        (folder / "text.txt").write_text("\n".join(texts[: given.texts]), encoding="utf-8")
        found = {
            "one process, --accumulate 2": run(folder, "one", 1, given, "--accumulate", "2"),
            "two processes": run(folder, "two", 2, given),
            "two processes, --teacher-shard": run(folder, "cut", 2, given, "--teacher-shard"),
            "two processes, --teacher-shard, MALLOC_MMAP_THRESHOLD_=1000000": run(
                folder, "mapped", 2, given, "--teacher-shard", MALLOC_MMAP_THRESHOLD_="1000000"
            ),
        }
    whole = found["one process, --accumulate 2"]["losses"]
    for each in found.values():
        each["largest_relative_difference"] = max(abs(a - b) / b for a, b in zip(each["losses"], whole, strict=True))
    layer_bytes = given.layers * 4 * (12 * given.width**2 + 13 * given.width)
    print(
        json.dumps(
            {"settings": vars(given), "layers_mb": layer_bytes / 1e6, "load": os.getloadavg(), **found}, indent=1
        )
    )


if __name__ == "__main__":
    main()
