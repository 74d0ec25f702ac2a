"""`stillroom distill` in two processes."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from processes import started
from repository import ROOT
from safetensors.torch import load_file
from small_task import examples, make_teacher

import compress
from compress import Event

# In float32, in which two halves of a batch add up to the whole as closely as this asks.
STUDENT = "layers=2,hidden=32,heads=4,ffn=48"
SETTINGS = {"method": "distilbert", "student": STUDENT, "epochs": 1.0, "batch": 16, "precision": "fp32"}


FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]


def environment(scratch: Path) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": str(ROOT)}


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped_and_make_the_same_student(tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n".join(str(row["text"]) for row in examples(65, 0)))
    one = compress.distill(str(teacher), [corpus], tmp_path / "one", **SETTINGS)

    def stop(event: Event) -> None:
        if event.text == "distilbert" and event.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # the head of the teacher and the start of the student are finished
        compress.distill(str(teacher), [corpus], tmp_path / "two", progress=stop, **SETTINGS)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "stillroom", "distill"]
    command += ["--teacher", str(teacher), "--corpus", str(corpus), "--out", str(tmp_path / "two"), "--json"]
    command += FLAGS
    done = subprocess.run(
        [sys.executable, *command], env=environment(scratch), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoint"] == str(tmp_path / "two")  # one of them speaks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "scratch", "teacher", "text.txt", "two"]
    assert [path.name for path in scratch.iterdir() if not path.name.startswith("torchelastic")] == []
    assert losses(tmp_path / "two") == pytest.approx(losses(one), abs=1e-5)
    expected = load_file(one / "model.safetensors")
    for name, value in load_file(tmp_path / "two" / "model.safetensors").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_two_nodes_in_folders_of_their_own_make_the_student_of_one_process_with_the_same_parts(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    verb = ["distill", "--teacher", "teacher", "--corpus", "text.txt", "--out", "small", "--threads", "1", "--json"]
    verb += FLAGS
    folders = [tmp_path / name for name in ("0", "1", "alone")]
    for folder in folders:
        make_teacher(folder / "teacher")
        (folder / "tmp").mkdir()
        (folder / "text.txt").write_text("\n".join(str(row["text"]) for row in examples(65, 0)))
    launch = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    commands = [
        [*launch, "--master-port", str(port), "--node-rank", str(node), "-m", "stillroom", *verb] for node in range(2)
    ]
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                started([sys.executable, *command], cwd=folder, env=environment(folder / "tmp"), stdout=subprocess.PIPE, text=True)
            )
            for folder, command in zip(folders, commands, strict=False)
        ]  # fmt: skip
        (said, _), (other, _) = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert json.loads(said)["checkpoint"] == str(folders[0] / "small")
    assert other == ""
    assert sorted(path.name for path in folders[1].iterdir()) == ["teacher", "text.txt", "tmp"]
    one = [sys.executable, "-m", "stillroom", *verb, "--accumulate", "2"]
    subprocess.run(one, cwd=folders[2], env=environment(folders[2] / "tmp"), check=True, capture_output=True)
    weights = [(folder / "small" / "model.safetensors").read_bytes() for folder in (folders[0], folders[2])]
    assert weights[0] == weights[1]  # with dropout, which follows from the number of the part
