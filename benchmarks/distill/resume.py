"""Check that a training that is killed at a random moment and started again ends with the same bits. It uses SIGKILL on a real process.

    python benchmarks/distill/resume.py [--method M]... [--kills 2] [--steps 40] [--seed 0]

All stages of each method are trained on tiny random models, in the folders that `stillroom` uses: once without a break, and once
killed `--kills` times and then trained to the end. `--seed` draws the moments of the kills within the time of the first training. A
checkpoint is written after every step. The SHA-256 of every stage's weights and its losses in `metrics.jsonl` are compared. The exit
code is 1 if any differ.
"""

import argparse
import hashlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import accelerate  # noqa: F401 - what a training imports when it begins
from safetensors import safe_open
from safetensors.torch import load_file

sys.path[:0] = [
    str(Path(__file__).parents[2]),
    str(Path(__file__).parents[2] / "tests" / "compress"),
    str(Path(__file__).parents[2] / "tests" / "compress" / "training"),
]
import every_stage as tests  # noqa: E402 - the tests are no package

from compress.methods.catalogue import METHODS, Stage, stages_of  # noqa: E402
from compress.runs.hardware import same_bits  # noqa: E402
from compress.runs.resumable_stages import TRAINING, Workdir  # noqa: E402
from compress.training.checkpoint import own_tensors, put_tensors, write_safetensors  # noqa: E402
from compress.training.loop import CHECKPOINT, StageSettings  # noqa: E402
from compress.training.metrics import METRICS  # noqa: E402
from compress.training.stage import train_stage  # noqa: E402

WEIGHTS = "student.safetensors"


def train(method: str, root: Path, steps: int) -> None:
    """Trains every stage of `method`, each in a folder of `root`; skips finished stages and resumes an unfinished one."""
    work, before = Workdir(root), None
    for number, stage in enumerate(stages_of(method, tests.SIZES), 1):
        make = partial(trained, stage=stage, before=before, steps=steps)
        before = work.stage(f"{number}-{stage.name}", "the same", make)


def trained(folder: Path, stage: Stage, before: Path | None, steps: int) -> None:
    teacher, student = tests.models("bert", stage)
    if before:  # the layers of the previous stage, with this stage's head
        learned, own = load_file(before / WEIGHTS), own_tensors(student)
        put_tensors(student, {name: learned.get(name, value) for name, value in own.items()})
    settings = StageSettings(steps, learning_rate=3e-3, checkpoint_every_s=0)
    train_stage(stage, teacher, student, tests.text_of(stage), settings, folder=folder / TRAINING)
    write_safetensors(folder / WEIGHTS, own_tensors(student))


def results(root: Path) -> dict[str, str]:
    """SHA-256 of each stage's weights, and the losses in its log."""
    found = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        found[f"{folder.name} weights"] = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
        lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
        found[f"{folder.name} losses"] = str([(line["step"], line["loss"], line["terms"]) for line in lines])
    return found


def stands_at(root: Path) -> str:
    """The stage in which a training was killed, and the step of its checkpoint."""
    folder = next(root.glob("*.partial"), None)
    if folder is None:
        return "between stages"
    checkpoint = folder / TRAINING / CHECKPOINT
    if not checkpoint.is_file():
        return f"{folder.stem} before a checkpoint"
    with safe_open(checkpoint, framework="pt") as file:
        return f"{folder.stem} after step {json.loads(file.metadata()['progress'])['step']}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    chance = random.Random(given.seed)
    same_bits(1)
    tests.models("bert", stages_of("mlm", tests.SIZES)[0])
    # Forked processes need not import again what this process has imported, by the line above too.
    forked = multiprocessing.get_context("fork")
    print(f"torch {version('torch')}, transformers {version('transformers')}, {given.steps} steps a stage\n")
    print("| method | stages | seconds | killed in | weights | losses |\n|---|---:|---:|---|---|---|")
    failed = kills = 0
    for method in given.method or METHODS:
        with tempfile.TemporaryDirectory() as folder:
            whole, broken = Path(folder) / "whole", Path(folder) / "broken"

            def start(root: Path, method: str = method) -> multiprocessing.process.BaseProcess:
                root.mkdir(exist_ok=True)
                process = forked.Process(target=train, args=(method, root, given.steps))
                process.start()
                return process

            def end(process: multiprocessing.process.BaseProcess, method: str = method) -> None:
                process.join()
                if process.exitcode:
                    raise RuntimeError(f"{method} ended with {process.exitcode}; its traceback is above")

            started = time.monotonic()
            end(start(whole))
            took_s = time.monotonic() - started
            moments = []
            for _ in range(given.kills):
                process = start(broken)
                process.join(chance.random() * took_s / given.kills)
                process.kill()
                process.join()
                kills += process.exitcode < 0
                moments.append(stands_at(broken) if process.exitcode < 0 else "not killed: it was finished")
            end(start(broken))
            expected, found = results(whole), results(broken)
            alike = [
                all(expected[name] == found.get(name) for name in expected if name.endswith(what))
                for what in ("weights", "losses")
            ]
            failed += not all(alike)
            said = " | ".join("the same" if same else "DIFFER" for same in alike)
            stages = len(stages_of(method, tests.SIZES))
            print(f"| {method} | {stages} | {took_s:.1f} | {'; '.join(moments)} | {said} |", flush=True)
    print(f"\n{kills} kills; {failed} methods ended with other bits")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
