"""What the tests of several processes run in each of them: trainings of a tiny student on plain text, in float64, and readings of a
teacher that is cut over the processes beside a whole copy of it.

    main([FOLDER, "NAME:METHOD:DROPOUT[:shard]", ...])

Each training ends in `FOLDER/NAME-PROCESS.json`, with its checkpoints in `FOLDER/NAME`; the readings in `FOLDER/readings-PROCESS.json`:
by family and precision, how far apart the two are and what share of the layers' bytes is held.
"""

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encoders import SIZES, VOCABULARY, encoder, inputs
from torch import nn

from compress import distributed
from compress.data.corpus import CorpusText, Masking, Piece
from compress.methods.catalogue import Sizes, stages_of
from compress.methods.objectives import Projections
from compress.models.activations import Activations, Part, read, shard_layers
from compress.models.families import layers_of
from compress.models.initialise import student_of
from compress.models.precision import computing, weights_in
from compress.models.shapes import Shape
from compress.training.loop import StageSettings, Validation
from compress.training.stage import train_stage

# Batches of 8, and at the end of an epoch one of 1: fewer texts than processes.
PIECES = [Piece(np.random.default_rng(i).integers(5, VOCABULARY, 4 + i % 9), np.arange(4 + i % 9)) for i in range(33)]
STEPS = 12
# The families that differ most: in the names of their layers, in biases of attention that layers share, in windows of attention.
READ = [
    *((kind, "fp32") for kind in ("bert", "distilbert", "mpnet", "modernbert")),
    ("bert", "bf16"),
    ("modernbert", "bf16"),
]
CPU = torch.device("cpu")
LAST = SIZES["num_hidden_layers"]
WANTED = (
    [Part("queries", 2)],
    [Part(of, 3) for of in ("queries", "keys", "values")],
    [Part("scores", 2), Part("hidden", 2)],
    [Part("hidden", 0)],
    [Part("hidden", LAST)],
    [Part("hidden", number) for number in range(LAST + 1)],
)


def bytes_held(model: nn.Module) -> int:
    """Bytes of the layers' weights that this process holds."""
    return sum(
        getattr(weight, "_local_tensor", weight).untyped_storage().nbytes() for weight in layers_of(model).parameters()
    )


def numbers(found: Activations) -> list[torch.Tensor]:
    """All that was read, in a fixed order."""
    scores = [dots.scores() for _, dots in sorted(found.scores.items())]
    words = [found.words.vectors] if found.words else []
    output = [] if found.output is None else [found.output[0]]
    return [*(value for _, value in sorted(found.parts.items())), *scores, *words, *output]


def compared(kind: str, precision: str) -> dict[str, Any]:
    """The largest difference of what is read of a whole and of a cut model, and the largest share that is held after a reading."""
    whole = encoder(kind, "ForMaskedLM")
    sharded = copy.deepcopy(whole)
    shard_layers(sharded, CPU, precision)
    apart, shares = 0.0, []
    readings: list[dict[str, Any]] = [{"wanted": wanted} for wanted in WANTED]
    readings += [
        {"wanted": [Part("values", 1)], "output": True},
        {"wanted": [], "output": True, "rows": torch.tensor([1, 3])},
    ]
    with torch.no_grad(), weights_in(whole, precision), computing(CPU, precision):
        full = bytes_held(whole)
        for reading in readings:
            ours, theirs = (numbers(read(model, inputs(), **reading)) for model in (whole, sharded))
            assert len(ours) == len(theirs) > 0, (reading, len(ours), len(theirs))
            apart = max(apart, *(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)))
            shares.append(bytes_held(sharded) / full)
    return {"apart": apart, "held": max(shares)}


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
    own: dict[str, Any] = {"folder": folder, "projections": maps, "validation": validation}
    report = report if held is None else look
    progress = train_stage(stage, teacher, student, text, settings, report=report, **own)
    return student, progress


def main(arguments: Sequence[str]) -> int:
    for job in arguments[1:]:
        name, method, dropout, *shard = job.split(":")
        folder = Path(arguments[0]) / (name if distributed.main() else "nothing is written here")
        held: list[float] = []
        found = summary(*trained(folder, method, float(dropout), shard=bool(shard), held=held)) | {"held": held}
        Path(arguments[0], f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(found))
    readings = {f"{kind} {precision}": compared(kind, precision) for kind, precision in READ}
    Path(arguments[0], f"readings-{os.environ['RANK']}.json").write_text(json.dumps(readings))
    return 0


def summary(student: nn.Module, progress: Any) -> dict[str, Any]:
    """What of a training is compared: its curves, as numbers in a row, and the norm of each parameter."""
    return {
        "steps": [step for step, _ in progress.loss + progress.validation],
        "curves": [value for _, value in progress.loss + progress.validation],
        "norms": [float(parameter.detach().norm()) for parameter in student.parameters()],
        "best_step": progress.best_step,
    }
