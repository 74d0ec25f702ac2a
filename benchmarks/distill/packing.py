"""Measure what packed rows change: fill, steps, tokens a second in turns, and what a student has learned after one epoch.

    python benchmarks/distill/packing.py --corpus text.txt [--teacher FOLDER] [--held-out more.txt]

Three equal students train by MiniLMv2: on 32 pieces a step, on 32 packed rows, and on as many packed rows as have the tokens of 32
pieces. They take turns of about 4,000 tokens, so that other work on the machine slows all of them. With --held-out each trains for
one epoch instead, and the loss on those texts, unpacked, is given before and after. Prints a JSON document.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from steps import print_document

from compress.data.corpus import CorpusText, chunks
from compress.data.encoded import pad_id_of
from compress.data.texts import read_texts
from compress.losses.outputs import total
from compress.methods.catalogue import Stage, chain_of
from compress.methods.objectives import Projections
from compress.models.initialise import student_of
from compress.models.precision import computing, weights_in
from compress.models.pretrained import load_encoder, open_model, open_tokenizer
from compress.models.shapes import shape_of
from compress.training.loop import StageSettings
from compress.training.stage import rows_in_use, step_losses, train_stage
from stillroom.verbs.demo import teacher_folder

TURN = 4_000  # tokens


class Learner:
    """A student that trains on one of the texts."""

    def __init__(self, opened: Any, shape: Any, stage: Stage, text: CorpusText, precision: str) -> None:
        self.teacher = load_encoder(opened, seed=0).eval()
        self.student = student_of(self.teacher, shape, seed=0)[0]
        self.stage, self.text, self.precision = stage, text, precision
        self.maps = Projections(stage.objective, self.teacher.config, self.student.config)
        self.speeds: list[float] = []
        self.real = self.positions = self.done = 0
        self.steps_per_epoch = text.sampler.steps_per_epoch

    def begin(self, stack: ExitStack) -> None:
        stack.enter_context(weights_in(self.teacher, self.precision))
        self.remap = stack.enter_context(rows_in_use(self.student.train(), self.text.ids, self.text.pad_id))
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-5, fused=True)

    def turn(self) -> None:
        """Train for about `TURN` tokens."""
        began, tokens = time.perf_counter(), 0
        while tokens < TURN:
            batch = self.text.at(self.done)
            with computing(torch.device("cpu"), self.precision):
                loss = self.loss(batch, self.remap)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
            self.done += 1
            tokens += int((batch.inputs["attention_mask"] > 0).sum())
            self.positions += batch.inputs["attention_mask"].numel()
        self.real += tokens
        self.speeds.append(tokens / (time.perf_counter() - began))

    def loss(self, batch: Any, remap: Any = None) -> torch.Tensor:
        return total(step_losses(self.stage.objective, self.teacher, self.student, batch, self.maps, remap))

    def loss_on(self, text: CorpusText) -> float:
        self.student.eval()
        with torch.no_grad():
            return statistics.fmean(self.loss(text.at(i)).item() for i in range(text.sampler.steps_per_epoch))

    def epoch(self) -> None:
        settings = StageSettings(self.steps_per_epoch, precision=self.precision, device="cpu")
        with tempfile.TemporaryDirectory() as folder:
            train_stage(
                self.stage, self.teacher, self.student, self.text, settings, folder=Path(folder),
                projections=self.maps,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--held-out", default="")
    parser.add_argument("--teacher", default="", help="all-MiniLM-L6-v2 of the demo by default")
    parser.add_argument("--student", default="3x384")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--pieces", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    opened, shape = open_model(given.teacher or str(teacher_folder())), shape_of(given.student)
    tokenizer = open_tokenizer(opened)
    ((stage,),) = chain_of("minilmv2", (shape,), opened.config, start="spread")

    def text_of(file: str, batch: int, row_tokens: int = 0) -> CorpusText:
        pieces = chunks(read_texts(Path(file)), tokenizer, 128)[: given.pieces]
        return CorpusText(pieces, pad_id_of(tokenizer), batch, 0, None, row_tokens)

    apart, packed = text_of(given.corpus, 32), text_of(given.corpus, 32, 128)
    mean = float(apart.lengths.mean())
    texts = {
        "apart": apart,
        "packed": packed,
        "packed, tokens of 32 pieces": text_of(given.corpus, round(mean / 4), 128),
    }
    learners = {name: Learner(opened, shape, stage, text, given.precision) for name, text in texts.items()}
    found: dict[str, Any] = {
        "pieces": len(apart.pieces),
        "mean_tokens": mean,
        "fill": float(packed.rows.tokens.mean()) / 128,
    }
    for name, learner in learners.items():
        found[name] = {"steps_per_epoch": learner.steps_per_epoch, "tokens_per_step": learner.text.tokens_per_step}
    if given.held_out:
        held = text_of(given.held_out, 32)
        for name, learner in learners.items():
            found[name]["loss_before"] = learner.loss_on(held)
            learner.epoch()
            found[name]["loss_after"] = learner.loss_on(held)
    else:
        in_turns(learners, given.minutes, found)
    print_document(given, found=found)


def in_turns(learners: dict[str, Learner], minutes: float, found: dict[str, Any]) -> None:
    """Adds speeds, and their ratio to the first learner's turn by turn, to `found`; the first turn of each is left out."""
    with ExitStack() as stack:
        for learner in learners.values():
            learner.begin(stack)
        began = time.monotonic()
        while time.monotonic() - began < 60 * minutes:
            for learner in learners.values():
                learner.turn()
    first = next(iter(learners.values())).speeds[1:]
    for name, learner in learners.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(learner.speeds[1:], first, strict=True))
        found[name] |= {
            "tokens_per_s": statistics.median(learner.speeds[1:]),
            "padded_share": 1 - learner.real / learner.positions,
            "ratio": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
            "pairs": len(ratios),
        }


if __name__ == "__main__":
    main()
