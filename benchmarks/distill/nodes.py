"""Train on two nodes without a shared folder, and kill one of them at random moments.

    python benchmarks/distill/nodes.py [--kills 10] [--seed 0] [--only losses bundle kills elastic]

As root the nodes are two network namespaces joined by a pair of virtual interfaces, and neither sees the other's folder. Models are tiny
and random, torch has one thread. What is checked:

- losses: `distill` on two nodes against one process, dropout off: the losses of the first 20 steps, in float32.
- bundle: every phase of `run` on two nodes against one process that computes the same parts of each batch one after the other: scores,
  and the SHA-256 of weights and graphs.
- kills: the same `run`, whose process on one of the nodes is killed with SIGKILL, then started again on both, `--kills` times; and once
  more, going on with one node. How long the other process lived, what it said, and the SHA-256 at the end.
- elastic: a node's launcher and process are killed under `torchrun --nnodes 1:2`; the other goes on by itself.

Prints a JSON document. Exit code 1 if anything differs or a message is missing.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from small_task import examples, make_teacher, write_splits  # noqa: E402 - the tests are no package

STUDENT = "layers=2,hidden=32,heads=4,ffn=48"
DISTILL = [
    "distill", "--teacher", "teacher", "--corpus", "text.txt", "--out", "small", "--method", "minilmv2", "--student", STUDENT,
    "--epochs", "2", "--batch", "16", "--precision", "fp32", "--no-pack",
]  # fmt: skip
RUN = [
    "run", "--teacher", "teacher", "--task", "token-classification", "--data", "data", "--out", "bundle", "--student", STUDENT,
    "--augment", "1", "--teacher-epochs", "40", "--teacher-patience", "40", "--teacher-learning-rate", "0.003",
    "--student-learning-rate", "0.003",
    "--student-epochs", "40", "--batch", "16", "--precision", "fp32", "--latency-seconds", "1", "--teacher-gate", "0", "--gate", "0",
    "--checkpoint-seconds", "0.5",
]  # fmt: skip
COMPARED = ("model.safetensors", "onnx/model.onnx", "onnx/model_quantized.onnx")
ADDRESS = ("10.77.0.1", "10.77.0.2")
LATEST_S = 45.0  # after both processes are there, until which one is killed
ENDS_S = 120.0  # longest wait for a launcher to end once a process was killed; those of stillroom have 30 s


class Nodes:
    """Two nodes with a folder each."""

    def __init__(self, work: Path) -> None:
        self.folders = [work / "0", work / "1"]
        self.apart = os.geteuid() == 0
        (work / "empty").mkdir()
        for folder in self.folders:
            (folder / "tmp").mkdir(parents=True)

    def command(self, node: int, launch: Sequence[str], verb: Sequence[str]) -> list[str]:
        """What starts the launcher of `node`; `launch` are the arguments of torchrun."""
        started = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "stillroom", *verb]
        if not self.apart:
            return started
        hidden = f'mount --bind {self.folders[0].parent / "empty"} {self.folders[1 - node]}; exec "$@"'
        return [
            "/usr/sbin/ip",
            "netns",
            "exec",
            f"stillroom-{node}",
            "unshare",
            "--mount",
            "bash",
            "-c",
            hidden,
            "_",
            *started,
        ]

    def start(self, node: int, launch: Sequence[str], verb: Sequence[str]) -> subprocess.Popen[bytes]:
        folder = self.folders[node]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), "HF_HUB_OFFLINE": "1",
            **({"GLOO_SOCKET_IFNAME": f"veth-{node}"} if self.apart else {}),
        }  # fmt: skip
        with (folder / "log").open("wb") as log:
            return subprocess.Popen(
                self.command(node, launch, verb), cwd=folder, env=environment, stdout=log, stderr=log
            )

    def start_both(self, verb: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        """Both launchers, with a port that is new each time."""
        address = ADDRESS[0] if self.apart else "127.0.0.1"
        launch = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", address, "--master-port", str(free_port())]
        return [self.start(node, [*launch, "--node-rank", str(node)], verb) for node in range(2)]

    def said(self, node: int) -> list[str]:
        """The lines that stillroom's messages begin with."""
        lines = (self.folders[node] / "log").read_text(errors="replace").splitlines()
        return [line for line in lines if line.startswith("stillroom: ")]


@contextmanager
def network(apart: bool) -> Iterator[None]:
    """Context with the two network namespaces."""

    def ip(*words: str) -> None:
        subprocess.run(["/usr/sbin/ip", *words], check=True)

    if not apart:
        yield
        return
    for node in range(2):
        ip("netns", "add", f"stillroom-{node}")
    try:
        ip(
            "link",
            "add",
            "veth-0",
            "netns",
            "stillroom-0",
            "type",
            "veth",
            "peer",
            "name",
            "veth-1",
            "netns",
            "stillroom-1",
        )
        for node, address in enumerate(ADDRESS):
            within = ("-n", f"stillroom-{node}")
            ip(*within, "addr", "add", f"{address}/24", "dev", f"veth-{node}")
            for device in ("lo", f"veth-{node}"):
                ip(*within, "link", "set", device, "up")
        yield
    finally:
        for node in range(2):
            ip("netns", "del", f"stillroom-{node}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def process_of(launcher: subprocess.Popen[bytes]) -> psutil.Process | None:
    """The process that `launcher` started for stillroom, once it is there."""
    try:
        children = psutil.Process(launcher.pid).children(recursive=True)
        return next(
            (
                each
                for each in children
                if "stillroom" in each.cmdline() and "torch.distributed.run" not in each.cmdline()
            ),
            None,
        )
    except psutil.Error:
        return None


def alone(folder: Path, verb: Sequence[str]) -> None:
    """`verb` in one process of its own."""
    command = [sys.executable, "-m", "stillroom", *verb]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


def finish(nodes: Nodes, verb: Sequence[str]) -> float:
    """`verb` on both nodes to its end; the seconds that it took."""
    started = time.monotonic()
    codes = [launcher.wait() for launcher in nodes.start_both(verb)]
    if codes != [0, 0]:
        raise RuntimeError(f"the nodes ended with {codes}; see {[str(folder / 'log') for folder in nodes.folders]}")
    return time.monotonic() - started


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def hashes(bundle: Path) -> dict[str, str]:
    return {name: hashlib.sha256((bundle / name).read_bytes()).hexdigest() for name in COMPARED}


def scores(bundle: Path) -> dict[str, float]:
    return {row["name"]: row["metric"] for row in json.loads((bundle / "report.json").read_text())["summary"]}


def clear(nodes: Nodes) -> None:
    for folder in nodes.folders:
        for path in folder.glob("bundle*"):
            shutil.rmtree(path)


def compared_losses(nodes: Nodes, one: Path) -> dict[str, Any]:
    finish(nodes, DISTILL)
    alone(one, DISTILL)
    ours, theirs = losses(nodes.folders[0] / "small"), losses(one / "small")
    apart = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "steps": len(ours),
        "largest_relative_first_20": max(apart[:20]),
        "largest_relative": max(apart),
        "right": max(apart[:20]) < 1e-6,
    }


def compared_bundle(nodes: Nodes, one: Path) -> dict[str, Any]:
    clear(nodes)
    seconds = finish(nodes, RUN)
    alone(one, [*RUN, "--accumulate", "2"])
    bundles = (nodes.folders[0] / "bundle", one / "bundle")
    same = [hashes(bundle) for bundle in bundles]
    left = sorted(path.name for path in nodes.folders[1].glob("bundle*"))
    return {
        "seconds": round(seconds, 1), "scores": [scores(bundle) for bundle in bundles], "hashes": same[0], "left_on_node_1": left,
        "right": same[0] == same[1] and not left,
    }  # fmt: skip


def stands_at(work: Path) -> str:
    """The stage that a run works on."""
    stages = sorted(work.glob("*.partial"), key=lambda path: path.stat().st_mtime) if work.is_dir() else []
    return stages[-1].stem if stages else "between stages"


def killed(nodes: Nodes, node: int, after_s: float) -> dict[str, Any]:
    """Start both nodes, kill the process of `node` so long after both were there, and tell how the other one ended."""
    launchers = nodes.start_both(RUN)
    while not all(process_of(launcher) for launcher in launchers):
        time.sleep(0.05)
    time.sleep(after_s)
    stage = stands_at(nodes.folders[0] / "bundle.work")
    victim, other = (process_of(launchers[each]) for each in (node, 1 - node))
    row: dict[str, Any] = {"node": node, "after_s": round(after_s, 1), "stage": stage}
    if victim is None:
        row["found"] = "the process had ended: only the main process works"
        node, victim = 0, process_of(launchers[0])
        other = None
    if victim:
        victim.send_signal(signal.SIGKILL)
    at = time.monotonic()
    if other:
        psutil.wait_procs([other], timeout=ENDS_S)  # it may have work of its own
        row["lived_s"] = round(time.monotonic() - at, 1)
    codes = [launcher.wait(timeout=600) for launcher in launchers]
    row["launchers_s"] = round(time.monotonic() - at, 1)
    row["said"] = nodes.said(1 - node) if other else []
    if codes[1 - node] == 0:
        row["found"] = "the training was over: the other process went on to its end"
    row["right"] = other is None or codes[1 - node] == 0 or (row["lived_s"] <= 30 and len(row["said"]) == 1)
    return row


def with_kills(nodes: Nodes, kills: int, chance: random.Random, expected: dict[str, str]) -> dict[str, Any]:
    clear(nodes)
    rows = []
    for _ in range(kills):
        rows.append(killed(nodes, chance.randrange(2), chance.uniform(0, LATEST_S)))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finish(nodes, RUN)
    found = hashes(nodes.folders[0] / "bundle")
    return {"kills": rows, "hashes": found, "right": found == expected and all(row["right"] for row in rows)}


def on_one_node(nodes: Nodes, expected: dict[str, str]) -> dict[str, Any]:
    clear(nodes)
    row = killed(nodes, 1, 20.0)
    alone(nodes.folders[0], RUN)
    found = hashes(nodes.folders[0] / "bundle")
    return row | {"hashes": found, "right": row["right"] and found == expected}


def elastic(nodes: Nodes, expected: dict[str, str]) -> dict[str, Any]:
    """Node 1 is killed as a whole; the launcher of node 0 starts its process again by itself."""
    clear(nodes)
    end = f"{ADDRESS[0] if nodes.apart else '127.0.0.1'}:{free_port()}"
    launch = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "3",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        end,
    ]
    own = []
    for node in range(2):
        # Which node has the store is found by the host's name, which the two namespaces share.
        conf = ["--rdzv-conf", f"last_call_timeout=5,is_host={1 - node}"]
        own.append([*launch, *conf, *(["--local-addr", ADDRESS[node]] if nodes.apart else [])])
    launchers = [nodes.start(node, own[node], RUN) for node in range(2)]
    while not all(process_of(launcher) for launcher in launchers):
        if any(launcher.poll() is not None for launcher in launchers):
            return {"code": [launcher.wait() for launcher in launchers], "right": False}
        time.sleep(0.05)
    while not (nodes.folders[0] / "bundle.work" / "processes.json").is_file():
        time.sleep(0.05)
    time.sleep(10)
    stage = stands_at(nodes.folders[0] / "bundle.work")
    for process in [*psutil.Process(launchers[1].pid).children(recursive=True), psutil.Process(launchers[1].pid)]:
        process.send_signal(signal.SIGKILL)
    at = time.monotonic()
    code = launchers[0].wait()
    launchers[1].wait()
    found = hashes(nodes.folders[0] / "bundle") if code == 0 else {}
    log = (nodes.folders[0] / "log").read_text(errors="replace").splitlines()
    on = [line.strip() for line in log if "goes on" in line]
    return {
        "stage": stage, "code": code, "seconds": round(time.monotonic() - at, 1), "said": nodes.said(0), "goes_on": on, "hashes": found,
        "right": code == 0 and found == expected,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=["losses", "bundle", "kills", "elastic"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nodes-") as scratch:
        work = Path(scratch)
        nodes = Nodes(work)
        one = work / "one"
        one.mkdir()
        make_teacher(one / "teacher", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        (one / "text.txt").write_text("\n".join(str(row["text"]) for row in examples(400, 0)))
        write_splits(one / "data", examples, (240, 400, 60))
        for folder in nodes.folders:
            shutil.copytree(one, folder, dirs_exist_ok=True)
        document: dict[str, Any] = {"apart": nodes.apart, "seed": given.seed}
        with network(nodes.apart):
            if "losses" in given.only:
                document["losses"] = compared_losses(nodes, one)
            document["bundle"] = compared_bundle(nodes, one)
            expected = document["bundle"]["hashes"]
            print(json.dumps(document), file=sys.stderr, flush=True)
            if "kills" in given.only:
                document["kills"] = with_kills(nodes, given.kills, random.Random(given.seed), expected)
                document["one_node"] = on_one_node(nodes, expected)
            if "elastic" in given.only:
                document["elastic"] = elastic(nodes, expected)
    print(json.dumps(document, indent=1))
    return 0 if all(found.get("right", True) for found in document.values() if isinstance(found, dict)) else 1


if __name__ == "__main__":
    sys.exit(main())
