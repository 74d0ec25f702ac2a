"""What the test of several processes runs in each of them: trainings of a tiny student on plain text, in float64.

    python trained_together.py FOLDER NAME:METHOD:DROPOUT[:shard] ...

Each ends in `FOLDER/NAME-PROCESS.json`; its checkpoints are in `FOLDER/NAME`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encoders import VOCABULARY, encoder
from joined import be_patient
from sharded_together import bytes_held
from torch import nn

from compress import distributed
from compress.data.corpus import CorpusText, Masking, Piece
from compress.methods.catalogue import Sizes, stages_of
from compress.methods.objectives import Projections
from compress.models.initialise import student_of
from compress.models.shapes import Shape
from compress.training.loop import StageSettings, Validation
from compress.training.stage import train_stage

# Batches of 8, and at the end of an epoch one of 1: fewer texts than processes.
PIECES = [Piece(np.random.default_rng(i).integers(5, VOCABULARY, 4 + i % 9), np.arange(4 + i % 9)) for i in range(33)]
STEPS = 12


def trained(
    folder: Path,
    method: str,
    dropout: float,
    *,
    accumulate: int = 1,
    report: Any = None,
    shard: bool = False,
    held: list[float] | None = None,
) -> tuple[nn.Module, Any]:
    """The student and its progress after the first stage of `method`. `held` gets the share of the bytes of the teacher's layers
    that this process holds after each step."""
    stage = stages_of(method, Sizes(4, 2, 24, 24))[0]
    masks = stage.objective.masks_tokens
    teacher = encoder("bert", "ForMaskedLM" if masks else "", seed=0).double()
    student, _ = student_of(teacher, Shape(2, 24, 4, 48), seed=1, new_layers=True)
    student.double()
    with torch.no_grad():
        if not distributed.main():  # the start of the main one counts
            dict(student.named_parameters())[next(n for n, _ in student.named_parameters() if "layer.0." in n)].add_(
                1.0
            )
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    maps = Projections(stage.objective, teacher.config, student.config).double()
    text = CorpusText(PIECES, 0, 8, 0, Masking(4, VOCABULARY) if masks else None)

    def validation(_remap: Any) -> Validation:
        return Validation(
            4, lambda: -float(next(student.parameters()).detach().norm()) if distributed.main() else 1 / 0
        )

    whole = bytes_held(teacher)

    def look(*_: Any) -> None:
        assert held is not None
        held.append(bytes_held(teacher) / whole)

    settings = StageSettings(
        STEPS, learning_rate=3e-3, checkpoint_every_s=0, accumulate=accumulate, teacher_shard=shard
    )
    progress = train_stage(
        stage,
        teacher,
        student,
        text,
        settings,
        folder=folder,
        projections=maps,
        validation=validation,
        report=report if held is None else look,
    )
    return student, progress


def main() -> None:
    be_patient()
    for job in sys.argv[2:]:
        name, method, dropout, *shard = job.split(":")
        folder = Path(sys.argv[1]) / (name if distributed.main() else "nothing is written here")
        held: list[float] = []
        found = summary(*trained(folder, method, float(dropout), shard=bool(shard), held=held)) | {"held": held}
        Path(sys.argv[1], f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(found))


def summary(student: nn.Module, progress: Any) -> dict[str, Any]:
    """What of a training is compared: its curves, as numbers in a row, and the norm of each parameter."""
    return {
        "steps": [step for step, _ in progress.loss + progress.validation],
        "curves": [value for _, value in progress.loss + progress.validation],
        "norms": [float(parameter.detach().norm()) for parameter in student.parameters()],
        "best_step": progress.best_step,
    }


if __name__ == "__main__":
    main()
