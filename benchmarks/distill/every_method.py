"""Every method as its user gets it: `stillroom run --method M` on a few texts of snips, a bundle each, and one kill and resume each.

    python benchmarks/distill/every_method.py --data snips --teacher T --work FOLDER [--method M]... [--kill] --out every_method.json

600 texts of train, 300 of validation and 400 of test are drawn with seed 0. The teacher is fine-tuned on them once, for 20 epochs;
it is the teacher of every run, so that its head is used as it is. Students train for 8 epochs, methods on plain text read 60,000
tokens of train before. With `--kill` each run is made a second time, killed with SIGKILL once a student has a checkpoint, and
given again: the weights of both bundles, and of every stage of both, must be equal. What is finished in --work is not made again.
The exit code is 1 if a run fails or weights differ.
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from latency.measure.machine import machine_facts

METHODS = (
    "minilm", "minilmv2", "directminilm", "hidden-states", "output-distribution", "tinybert", "xtremedistil", "distilbert", "mlm-kd",
    "soft-labels", "labels", "xtremedistil-printed",
)  # fmt: skip
TEXTS = {"train": 600, "validation": 300, "test": 400}
TASK = "token-classification"
SHOWN = ("teacher", "undistilled", "student", "int8")


def drawn(data: Path, folder: Path) -> Path:
    """`TEXTS` of each split of `data`, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in TEXTS.items():
        rows = (data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        random.Random(0).shuffle(rows)
        (folder / f"{split}.jsonl").write_text("\n".join(rows[:count]) + "\n", encoding="utf-8")
    return folder


def command(method: str, teacher: Path, data: Path, out: Path) -> list[str]:
    """The run of `method`."""
    return [
        sys.executable, "-m", "stillroom", "run", "--teacher", str(teacher), "--task", TASK, "--data", str(data), "--student", "3x384",
        "--out", str(out), "--method", method, "--student-epochs", "8", "--distill-tokens", "60000", "--latency-seconds", "1",
        "--teacher-gate", "0", "--gate", "0", "--threads", "1", "--checkpoint-seconds", "5", "--json",
    ]  # fmt: skip


def made(asked: list[str], out: Path) -> dict[str, Any]:
    """The document of the run, made or found."""
    done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(asked)} ended with {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def weights(out: Path) -> dict[str, str]:
    """The digests of the weights of a bundle and of each of its stages, by their place."""
    files = [out / "model.safetensors", *sorted(out.with_name(f"{out.name}.work").glob("*/model.safetensors"))]
    return {file.parent.name.removeprefix(out.name): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def killed(asked: list[str], out: Path) -> str:
    """Starts the run, kills it once a student has a checkpoint, and says in which stage that was; empty if the bundle is there."""
    if out.exists():
        return ""
    work = out.with_name(f"{out.name}.work")
    process = subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        begun = [*work.glob("distil*.partial/training/checkpoint.safetensors")]
        begun += work.glob("undistilled.partial/training/checkpoint.safetensors")
        if begun:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return begun[0].parents[1].name.removesuffix(".partial")
        time.sleep(0.02)
    sys.exit(f"{' '.join(asked)} ended with {process.returncode} before it could be killed")


def main() -> int:
    """Run every method; 1 if weights differ."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--data", type=Path, required=True)
    reader.add_argument("--teacher", required=True)
    reader.add_argument("--work", type=Path, required=True)
    reader.add_argument("--method", action="append", choices=METHODS)
    reader.add_argument("--kill", action="store_true")
    reader.add_argument("--out", type=Path, required=True)
    given = reader.parse_args()
    machine = machine_facts()
    data, teacher = drawn(given.data, given.work / "data"), given.work / "teacher"
    if not teacher.exists():
        tune = ["finetune", "--model", given.teacher, "--task", TASK, "--data", str(data), "--out", str(teacher)]
        tune += ["--learning-rate", "2e-4", "--epochs", "20"]
        subprocess.run([sys.executable, "-m", "stillroom", *tune], check=True)
    rows, differ = [], []
    for method in given.method or METHODS:
        out = given.work / method
        asked = command(method, teacher, data, out)
        row = made(asked, out) | {"method": method}  # the run's own method is `labels` where labels alone shipped
        if given.kill:
            again = given.work / f"{method}-killed"
            asked = command(method, teacher, data, again)
            row["killed_in"] = killed(asked, again)
            made(asked, again)
            row["same_weights"] = weights(again) == weights(out)
            differ += [] if row["same_weights"] else [method]
        choice = json.loads((out / "report.json").read_text(encoding="utf-8"))["choice"]
        kept = {key: row.get(key) for key in ("method", *SHOWN, "minutes", "killed_in", "same_weights")}
        rows.append(kept | {"choice": choice})
        print(json.dumps(kept), flush=True)
        given.out.write_text(
            json.dumps({"machine": machine, "texts": TEXTS, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    print(f"weights differ: {', '.join(differ)}" if differ else f"{len(rows)} bundles")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
