"""Measure the time that a teacher cache saves and its rounding error: training steps with the teacher and with its cache, in turns.

    python benchmarks/distill/cache.py --teacher FOLDER --student 3x384 --corpus text.txt
    python benchmarks/distill/cache.py --student 6x384 --corpus text.txt --tokenizer FOLDER

Without --teacher the teacher is a 12x768 with random weights and the tokenizer of --tokenizer. Two equal students train on the same
batches of MiniLMv2, in turns by step; the time includes reading from the disk. Prints a JSON document: bytes per token, the errors
of values and loss by rounding, seconds per token of writing and of training with the teacher and with the cache, and the number of
epochs after which the cache has saved more time than it cost.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from steps import print_document
from transformers import BertConfig, BertModel

from compress.data.corpus import CorpusText, tokenised
from compress.data.texts import read_texts
from compress.losses.outputs import total
from compress.methods.catalogue import Sizes, stages_of
from compress.methods.objectives import Projections
from compress.models.initialise import student_of
from compress.models.precision import computing, weights_in
from compress.models.pretrained import load_encoder, open_model, open_tokenizer
from compress.models.shapes import shape_of
from compress.training.stage import step_losses
from compress.training.teacher_cache import CachedTeacherText, teacher_cache


class Learner:
    """A student and the text that it is trained on."""

    def __init__(self, teacher: Any, student: Any, text: Any, stage: Any, precision: str) -> None:
        self.teacher, self.student, self.text, self.stage, self.precision = (
            teacher,
            student.train(),
            text,
            stage,
            precision,
        )
        self.maps = Projections(stage.objective, teacher.config, student.config)
        self.optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=True)

    def step(self, number: int) -> tuple[float, float]:
        """Trains one step; returns seconds per real token, and the loss."""
        began = time.perf_counter()
        batch = self.text.at(number)
        torch.manual_seed(number)
        with computing(torch.device("cpu"), self.precision):
            loss = total(step_losses(self.stage.objective, self.teacher, self.student, batch, self.maps, None))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return (time.perf_counter() - began) / int(batch.inputs["attention_mask"].sum()), loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="")
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--student", default="3x384")
    parser.add_argument("--corpus", action="append", required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pieces", type=int, default=400)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    opened = open_model(given.teacher or given.tokenizer)
    torch.manual_seed(0)
    teacher = (load_encoder(opened, seed=0) if given.teacher else BertModel(BertConfig())).eval()
    shape, config = shape_of(given.student), teacher.config
    stage = stages_of("minilmv2", Sizes(config.num_hidden_layers, shape.layers, config.hidden_size, shape.hidden))[0]
    texts = [text for file in given.corpus for text in read_texts(Path(file))][: given.pieces]
    with tempfile.TemporaryDirectory() as name, weights_in(teacher, given.precision):
        folder = Path(name)
        pieces = tokenised(texts, open_tokenizer(opened), given.tokens, folder / "text", fingerprint="benchmark")
        parts = sorted(stage.objective.teacher_parts())
        cache = teacher_cache(
            folder / "cache", lambda: teacher, pieces, parts, pad_id=0, precision=given.precision, identity={}
        )
        live = CorpusText(pieces, 0, given.batch, 0)
        students = [student_of(teacher, shape, seed=0)[0] for _ in range(2)]
        learners = [
            Learner(teacher, student, text, stage, given.precision)
            for student, text in zip(students, (live, CachedTeacherText(live, cache)), strict=True)
        ]
        taken = [[learner.step(step) for learner in learners] for step in range(given.steps)][2:]
    asked, kept = (statistics.median(pair[i][0] for pair in taken) for i in range(2))
    written = cache.about["seconds"] / cache.about["tokens"]
    ratios = sorted(pair[0][0] / pair[1][0] for pair in taken)
    losses = [[pair[i][1] for pair in taken] for i in range(2)]
    found = {
        "bytes_per_token": cache.about["bytes_per_token"],
        "relative_error": cache.about["relative_error"],
        "largest_relative_difference_of_loss": max(abs(b / a - 1) for a, b in zip(*losses, strict=True)),
        "last_loss": {"teacher": losses[0][-1], "cache": losses[1][-1]},
        "seconds_per_million_tokens": {"writing": 1e6 * written, "with teacher": 1e6 * asked, "with cache": 1e6 * kept},
        "teacher_over_cache": asked / kept,
        "quartiles_of_pairs": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "epochs_until_it_has_paid": written / (asked - kept) if asked > kept else None,
    }
    print_document(given, found=found)
    print(f"{asked / kept:.2f} times as fast", file=sys.stderr)


if __name__ == "__main__":
    main()
