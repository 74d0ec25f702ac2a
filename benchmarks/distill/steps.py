"""Compare time and memory of a step of MiniLMv2: this engine and a textbook implementation, in one process, in turns.

    python benchmarks/distill/steps.py --student 6x384 --tokens 128,256,512
    python benchmarks/distill/steps.py --teacher FOLDER --student 3x384 --corpus text.txt --precision bf16 --tokens 256
    python benchmarks/distill/steps.py --device cuda --precision bf16 --textbook-precision bf16 --tokens 512 --tokens-per-step 32768

The textbook implementation does what public ones do: it computes all of both models, projects queries, keys and values again from
hidden states, and holds relations whole. Its texts come in random order and are padded to the longest of their batch. `--precision`
is that of this engine, `--textbook-precision` that of the textbook. On a CPU its relations are compared text by text, and on a GPU
those of a batch at once, whichever is faster there. Without --corpus every text has --tokens tokens and nothing is padded; without
--teacher the teacher is a 12x768 with random weights. Both read the same texts with the same learning rate, and their losses of
one batch are compared.

Times are of whole steps, optimiser included, in turns of one step (on a GPU of 8, since this engine starts the next step before
it looks at the loss of the last): the ratio of the medians, textbook over ours, and the smallest and largest ratio of a pair. Memory is
the peak of a separate process, above weights and the optimiser's two moments; on a GPU that of the GPU.
"""

import argparse
import copy
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel

from compress.data.batches import to_device
from compress.data.corpus import CorpusText, Piece, chunks
from compress.data.texts import read_texts
from compress.methods.catalogue import Sizes, Stage, stages_of
from compress.methods.objectives import Projections
from compress.models.precision import autocast
from compress.models.pretrained import load_encoder, open_model, open_tokenizer
from compress.models.shapes import shape_of
from compress.runs.hardware import same_bits
from compress.training.loop import StageSettings
from compress.training.stage import step_losses, train_stage

LEARNING_RATE = 1e-4
TURN = {"cpu": 1, "cuda": 8}


@dataclass
class Measured:
    """The inputs of both implementations."""

    teacher: Any
    student: Callable[[], Any]  # makes a new one, the same each time
    stage: Stage
    text: CorpusText

    @property
    def layers(self) -> tuple[int, int, int]:
        """Teacher's layer, student's, and relation heads."""
        term = self.stage.objective.layers[0]
        return term.teacher_layer, term.student_layer, term.heads


def opened(given: argparse.Namespace, tokens: int) -> Measured:
    """Models and texts."""
    torch.manual_seed(0)
    if given.teacher:
        opened = open_model(given.teacher)
        teacher = load_encoder(opened, seed=0)
    else:
        teacher = BertModel(BertConfig())
    shape, config = shape_of(given.student), teacher.config
    stage = stages_of("minilmv2", Sizes(config.num_hidden_layers, shape.layers, config.hidden_size, shape.hidden))[0]

    def student() -> Any:
        torch.manual_seed(1)
        small = BertConfig(
            vocab_size=config.vocab_size, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, intermediate_size=shape.ffn,
        )  # fmt: skip
        return BertModel(small)

    if given.corpus:
        texts = [text for file in given.corpus for text in read_texts(Path(file))]
        pieces = chunks(texts, open_tokenizer(opened), tokens)
    else:
        generator = np.random.default_rng(0)
        drawn = generator.integers(1000, config.vocab_size, (512, tokens))
        pieces = [Piece(ids, np.arange(tokens)) for ids in drawn]
    batch = max(1, given.tokens_per_step // round(np.mean([len(piece.ids) for piece in pieces])))
    return Measured(teacher.eval(), student, stage, CorpusText(pieces, 0, batch, 0))


class Textbook:
    """A student in a textbook implementation. `step` returns the number of its real tokens."""

    def __init__(self, on: Measured, device: torch.device, precision: str) -> None:
        # A copy of the teacher, since this engine converts its teacher to the precision of the training.
        self.teacher, self.student = copy.deepcopy(on.teacher).to(device), on.student().train().to(device)
        self.device, self.precision = device, precision
        self.layers, self.text = on.layers, on.text
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=LEARNING_RATE)
        self.order = np.random.default_rng(0).permutation(len(self.text.pieces))
        self.divergence = nn.KLDivLoss(reduction="sum")

    def step(self, number: int) -> int:
        """Train on the texts of step `number`, in random order."""
        start = number * self.text.batch
        chosen = [self.text.pieces[i] for i in np.take(self.order, range(start, start + self.text.batch), mode="wrap")]
        width = max(len(piece.ids) for piece in chosen)
        ids, mask = np.zeros((2, len(chosen), width), dtype=np.int64)
        for row, piece in enumerate(chosen):
            ids[row, : len(piece.ids)], mask[row, : len(piece.ids)] = piece.ids, 1
        self.optimizer.zero_grad()
        self.loss(torch.from_numpy(ids).to(self.device), torch.from_numpy(mask).to(self.device)).backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        return int(mask.sum())

    def loss(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The sum of the three relations' divergences."""
        teacher_layer, student_layer, heads = self.layers
        with autocast(self.device, self.precision):
            with torch.no_grad():
                theirs = self._relations(self.teacher, teacher_layer, ids, mask, heads)
            ours = self._relations(self.student, student_layer, ids, mask, heads)
        compared = self._at_once if self.device.type == "cuda" else self._text_by_text
        return sum(
            (compared(a, b, mask) for a, b in zip(theirs, ours, strict=True)), torch.zeros((), device=self.device)
        )

    def _text_by_text(self, theirs: Tensor, ours: Tensor, mask: Tensor) -> Tensor:
        whole = torch.zeros(())
        for row, n in enumerate(mask.sum(dim=1).tolist()):
            target = functional.softmax(theirs[row, :, :n, :n], dim=-1)
            found = functional.log_softmax(ours[row, :, :n, :n], dim=-1)
            whole = whole + self.divergence(found, target) / (ours.shape[1] * n * len(mask))
        return whole

    @staticmethod
    def _at_once(theirs: Tensor, ours: Tensor, mask: Tensor) -> Tensor:
        absent = (mask == 0)[:, None, None, :]
        lowest = torch.finfo(ours.dtype).min
        target = functional.softmax(theirs.float().masked_fill_(absent, lowest), dim=-1)
        found = functional.log_softmax(ours.float().masked_fill(absent, lowest), dim=-1)
        a_query = functional.kl_div(found, target, reduction="none").sum(dim=-1).mean(dim=1)  # (batch, tokens)
        return ((a_query * mask).sum(dim=1) / mask.sum(dim=1)).mean()

    @staticmethod
    def _relations(model: Any, layer: int, ids: Tensor, mask: Tensor, heads: int) -> list[Tensor]:
        states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states[layer - 1]
        attention = model.encoder.layer[layer - 1].attention.self
        found = []
        for projection in (attention.query, attention.key, attention.value):
            x = projection(states)
            x = x.view(*x.shape[:2], heads, -1).permute(0, 2, 1, 3)
            found.append(x @ x.transpose(-1, -2) / x.shape[-1] ** 0.5)
        return found


def in_turns(on: Measured, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds per real token of both, in turns by step."""
    textbook = Textbook(on, torch.device(given.device), given.textbook_precision)
    apart = first_losses(on, textbook)
    ours: list[float] = []
    theirs: list[float] = []
    began, turn = 0.0, TURN[given.device]

    def report(done: int, _steps: int, _loss: float, _speed: float | None) -> None:
        nonlocal began
        if done % turn:
            return
        steps = range(done - turn, done)
        ours.append((now(given.device) - began) / sum(map(on.text.sampler.tokens_at, steps)))
        began = now(given.device)
        tokens = sum(map(textbook.step, steps))
        theirs.append((now(given.device) - began) / tokens)
        began = now(given.device)

    began = now(given.device)
    with tempfile.TemporaryDirectory() as folder:
        train(on, given, (given.turns + 2) * turn, Path(folder), report)
    # The first turn includes set-up. On a GPU the last one lacks a step, which the turn before has done.
    ours, theirs = ours[1:-1], theirs[1:-1]
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        "texts_per_step": on.text.batch,
        "tokens_per_s": 1 / statistics.median(ours),
        "textbook_tokens_per_s": 1 / statistics.median(theirs),
        "textbook_over_ours": statistics.median(theirs) / statistics.median(ours),
        "of_each_pair": [min(ratios), max(ratios)],
        "difference_of_first_loss": apart,
    }


def train(on: Measured, given: argparse.Namespace, steps: int, folder: Path, report: Any = None) -> None:
    """Trains with this engine."""
    settings = StageSettings(
        steps, precision=given.precision, learning_rate=LEARNING_RATE, checkpoint_every_s=1e9, device=given.device
    )
    train_stage(on.stage, on.teacher, on.student(), on.text, settings, folder=folder, report=report)


def now(device: str) -> float:
    """The time in seconds when `device` has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def first_losses(on: Measured, textbook: Textbook) -> float:
    """The relative difference of the two losses of one batch without dropout, both in float32."""
    on_cpu, student = on.text.at(0), on.student().eval().to(textbook.device)
    batch = to_device(on_cpu, textbook.device)
    precision, textbook.precision = textbook.precision, "fp32"
    on.teacher.to(textbook.device)
    maps = Projections(on.stage.objective, on.teacher.config, student.config)
    with torch.no_grad():
        ours = sum(step_losses(on.stage.objective, on.teacher, student, on_cpu, maps, None).values()).item()
        textbook.student.eval()
        theirs = textbook.loss(batch.inputs["input_ids"], batch.inputs["attention_mask"]).item()
        textbook.student.train()
    textbook.precision = precision
    return abs(ours - theirs) / theirs


def most_memory(given: argparse.Namespace, tokens: int, way: str) -> int:
    """Peak memory in bytes of three steps in this process, above weights and moments."""
    on = opened(given, tokens)
    size = sum(parameter.nbytes for parameter in on.student().parameters())
    weights = sum(parameter.nbytes for parameter in on.teacher.parameters()) + 3 * size
    before = resident("VmRSS") - sum(parameter.nbytes for parameter in on.teacher.parameters())
    if way == "textbook":
        textbook = Textbook(on, torch.device(given.device), given.textbook_precision)
        on.teacher = textbook.teacher  # frees the other copy
        for number in range(3):
            textbook.step(number)
    else:
        with tempfile.TemporaryDirectory() as folder:
            train(on, given, 3, Path(folder))
    if given.device == "cuda":
        return torch.cuda.max_memory_allocated() - weights
    return resident("VmHWM") - before - weights


def resident(field: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at most (VmHWM)."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def print_document(given: argparse.Namespace, **found: Any) -> None:
    """Prints the settings, facts about the machine, and what was found, as JSON."""
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": platform.processor()}
    machine |= {"gpu": torch.cuda.get_device_name()} if getattr(given, "device", "cpu") == "cuda" else {}
    print(json.dumps({"settings": vars(given), "machine": machine, **found}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="")
    parser.add_argument("--student", default="6x384")
    parser.add_argument("--corpus", action="append", default=[])
    parser.add_argument("--tokens", default="128,256,512")
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--textbook-precision", default="fp32")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=7, help="that are counted")
    parser.add_argument("--same-bits", action="store_true", help="in torch's deterministic mode, as the commands train")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--memory-of", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.corpus and not given.teacher:
        parser.error("--corpus needs the teacher's tokenizer: give --teacher too")
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.same_bits:
        same_bits(torch.get_num_threads())
    lengths = [int(length) for length in given.tokens.split(",")]
    if given.memory_of:
        print(most_memory(given, lengths[0], given.memory_of))
        return
    found = {}
    for tokens in lengths:
        found[tokens] = in_turns(opened(given, tokens), given)
        command = [sys.executable, __file__, *sys.argv[1:], "--tokens", str(tokens), "--memory-of"]
        memory = {way: int(subprocess.check_output([*command, way], text=True)) for way in ("ours", "textbook")}
        found[tokens] |= {f"{way}_bytes": size for way, size in memory.items()}
        found[tokens]["ours_over_textbook_bytes"] = memory["ours"] / memory["textbook"]
        print(tokens, json.dumps(found[tokens]), file=sys.stderr, flush=True)
    print_document(given, tokens=found)


if __name__ == "__main__":
    main()
