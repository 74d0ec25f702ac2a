"""Every kind of stage of the methods, with the teacher, the student and the text that it needs: tiny, and made by code."""

from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from encoders import VOCABULARY, encoder
from tokenizers import Tokenizer
from torch import nn

from compress.data.batches import Batch
from compress.data.corpus import CorpusFile, CorpusText, Masking, Piece, tokenised
from compress.data.encoded import IGNORED
from compress.methods.catalogue import METHODS, Sizes, Stage, stages_of
from compress.models.initialise import student_of
from compress.models.shapes import Shape

PIECES = [Piece(np.random.default_rng(i).integers(5, VOCABULARY, 4 + i % 9), np.arange(4 + i % 9)) for i in range(40)]
SIZES = Sizes(4, 2, 24, 24)


def every_stage() -> list[tuple[str, int]]:
    """Method and number of each stage; of stages that compute the same, which variants of a method share, the first."""
    found: dict[str, tuple[str, int]] = {}
    for name in METHODS:
        for number, stage in enumerate(stages_of(name, SIZES)):
            found.setdefault(f"{stage.objective} {stage.trains}", (name, number))
    return [*found.values()]


EVERY_STAGE = every_stage()


def thirty_pieces(folder: Path) -> CorpusFile:
    """A corpus of pieces of 1 to 13 tokens in `folder`."""
    tokenizer = Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    drawn = np.random.default_rng(0)
    texts = [" ".join(map(str, drawn.integers(5, VOCABULARY, 1 + 5 * i % 13))) for i in range(30)]
    return tokenised(texts, tokenizer, 16, folder, fingerprint="thirty")


class TaskText:
    """The corpus with a class for each text: whether its first token is even."""

    pad_id = 0

    def __init__(self) -> None:
        self.corpus = CorpusText(PIECES, 0, 8, 0)
        self.ids = self.corpus.ids
        self.sampler = self.corpus.sampler

    def at(self, step: int) -> Batch:
        batch = self.corpus.at(step)
        targets = batch.inputs["input_ids"][:, 0] % 2
        targets[0] = IGNORED  # one that the teacher alone labels
        return Batch(batch.inputs, torch.arange(len(targets)), targets, whole_texts=True)


HALF = Shape(2, 24, 4, 48)


def models(kind: str, stage: Stage, shape: Shape = HALF) -> tuple[Any, Any]:
    """Teacher and student with the heads that the stage needs; the student knows nothing."""
    heads = {term.of for term in stage.objective.outputs}
    head = "ForMaskedLM" if "vocabulary" in heads else "ForSequenceClassification" if "classes" in heads else ""
    teacher = encoder(kind, head, seed=0)
    with torch.no_grad():  # random weights attend to everything alike; a teacher has something to say
        for name, parameter in teacher.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(60 if name.startswith("classifier") else 6)
    student, _ = student_of(teacher, shape, seed=1, new_layers=True)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if name.startswith("classifier") and parameter.ndim == 2:
                parameter.mul_(0.01)  # of the teacher's head; else both are as sure of the same class
    return teacher, student


def silence_dropout(model: nn.Module) -> None:
    """Twenty steps are few: what falls should be the loss, not luck."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def text_of(stage: Stage) -> Any:
    if any(term.of == "classes" for term in stage.objective.outputs):
        return TaskText()
    return CorpusText(PIECES, 0, 8, 0, Masking(4, VOCABULARY) if stage.objective.masks_tokens else None)
