"""Compare real tokens a second of MiniLMv2 on real text: this engine and bertdistiller, each in its own environment, in turns.

    python -m venv peer && peer/bin/pip install torch==2.13.0 bertdistiller==0.1.2
    python benchmarks/distill/against_bertdistiller.py --peer peer/bin/python --corpus text.txt --student 6x384 --tokenizer FOLDER
    python benchmarks/distill/against_bertdistiller.py --peer peer/bin/python --corpus text.txt --student 3x384-ffn1536 --teacher FOLDER

Both have the same teacher, student, texts, texts a step and threads. The first comparison is in float32 with bertdistiller's texts in
random order. The others have its batches of similar length (`group_by_length`; always so in this engine), in float32 and in bfloat16:
which is faster hangs on the processor. Without --teacher it is a 12x768 with random weights and --tokenizer's tokenizer. Prints a JSON
document.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from steps import TURN, now, print_document
from transformers import BertConfig, BertModel

from compress.data.corpus import CorpusText, chunks
from compress.data.texts import read_texts
from compress.methods.catalogue import Sizes, stages_of
from compress.models.initialise import student_of
from compress.models.pretrained import load_encoder, open_model, open_tokenizer, save_tokenizer
from compress.models.shapes import shape_of
from compress.training.loop import StageSettings
from compress.training.stage import train_stage

WAYS = (("fp32", "fp32", False), ("fp32-grouped", "fp32", True), ("bf16-grouped", "bf16", True))


class Peer:
    """bertdistiller in its own process, one step at a time."""

    def __init__(self, python: str, folder: Path, settings: dict[str, Any]) -> None:
        worker = Path(__file__).with_name("bertdistiller_worker.py")
        command = [python, str(worker), str(folder), json.dumps(settings)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def step(self) -> float:
        """Trains one step; returns its seconds per real token."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith('{"tokens"'):
                told = json.loads(line)
                return float(told["seconds"] / told["tokens"])
        raise RuntimeError(f"bertdistiller ended with {self.process.wait()}; run its worker by hand to see why")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def side_by_side(given: argparse.Namespace, folder: Path, precision: str, *, grouped: bool) -> dict[str, Any]:
    """Both in turns, in `precision`; with `grouped`, bertdistiller's batches are of similar length."""
    teacher, shape = load_encoder(folder / "teacher", seed=0), shape_of(given.student)
    sizes = Sizes(teacher.config.num_hidden_layers, shape.layers, teacher.config.hidden_size, shape.hidden)
    stage = stages_of("minilmv2", sizes)[0]
    term = stage.objective.layers[0]
    settings = {
        "threads": torch.get_num_threads(), "steps": (given.turns + 4) * TURN[given.device], "batch": given.batch,
        "group_by_length": grouped, "precision": precision, "device": given.device, "teacher_layer": term.teacher_layer,
        "student_layers": shape.layers,
        "student_width": shape.hidden, "student_heads": shape.heads, "relation_heads": term.heads,
    }  # fmt: skip
    student, _ = student_of(teacher, shape, seed=0)
    pieces = chunks(given.texts, open_tokenizer(open_model(str(folder / "teacher"))), given.tokens)
    (folder / "pieces.json").write_text(json.dumps([piece.ids.tolist() for piece in pieces]))
    text = CorpusText(pieces, 0, given.batch, 0)
    peer = Peer(given.peer, folder, settings)
    ours: list[float] = []
    theirs: list[float] = []
    began, turn = now(given.device), TURN[given.device]

    def report(done: int, _steps: int, _loss: float, _speed: float | None) -> None:
        nonlocal began
        if done % turn:
            return
        tokens = sum(map(text.sampler.tokens_at, range(done - turn, done)))
        ours.append((now(given.device) - began) / tokens)
        theirs.append(statistics.mean(peer.step() for _ in range(turn)))
        began = now(given.device)

    try:
        train_stage(
            stage, teacher, student, text,
            StageSettings((given.turns + 2) * turn, precision=str(settings["precision"]), device=given.device),
            folder=folder / "ours", report=report,
        )  # fmt: skip
    finally:
        peer.close()
    # The first two turns include set-up. On a GPU the last lacks a step, which the turn before has done.
    ours, theirs = (turns[2 : -1 if turn > 1 else None] for turns in (ours, theirs))
    half = len(ours) // 2
    spread = [
        statistics.median(b) / statistics.median(a)
        for a, b in ((ours[:half], theirs[:half]), (ours[half:], theirs[half:]))
    ]
    return {
        "tokens_per_s": 1 / statistics.median(ours),
        "bertdistiller_tokens_per_s": 1 / statistics.median(theirs),
        "ours_over_bertdistiller": statistics.median(theirs) / statistics.median(ours),
        "of_each_half": sorted(spread),
    }


def make_teacher(given: argparse.Namespace, folder: Path) -> None:
    """Writes the teacher in a form that both read: bertdistiller accepts only the architecture BertForMaskedLM."""
    opened = open_model(given.teacher or given.tokenizer)
    torch.manual_seed(0)
    model = load_encoder(opened, seed=0) if given.teacher else BertModel(BertConfig())
    model.config.architectures = ["BertForMaskedLM"]
    model.save_pretrained(folder)
    save_tokenizer(opened, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="Python of the environment with bertdistiller")
    parser.add_argument("--corpus", action="append", required=True)
    parser.add_argument("--teacher", default="")
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--student", default="6x384")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--turns", type=int, default=10, help="of one step; on a GPU of eight, whose next step begins early"
    )
    parser.add_argument(
        "--way", action="append", choices=[way for way, *_ in WAYS], help="a comparison; all without it"
    )
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    given.texts = [text for file in given.corpus for text in read_texts(Path(file))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_teacher(given, folder / "teacher")
        found = {}
        for way, precision, grouped in WAYS:
            if way not in (given.way or [way]):
                continue
            (folder / way).mkdir()
            (folder / way / "teacher").symlink_to(folder / "teacher")
            found[way] = side_by_side(given, folder / way, precision, grouped=grouped)
            print(way, json.dumps(found[way]), file=sys.stderr, flush=True)
    del given.texts
    print_document(given, found=found)


if __name__ == "__main__":
    main()
