"""The training schedules of the papers, by name.

A paper's batch may not fit into memory; `accumulate` (`compress.training.stage.StageSettings`) computes it in parts. "Ours" in a
comment marks a number that the paper does not give.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from serve.errors import BadInput


@dataclass(frozen=True)
class Schedule:
    """The schedule of a training: `steps` in all, with linear warm-up over the share `warmup`, then linear decay to 0."""

    steps: int
    learning_rate: float
    warmup: float = 0.06
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)

    def rate(self, step: int) -> float:
        """The learning rate of step `step` (from 0)."""
        warm = max(1, math.ceil(self.steps * self.warmup))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        return self.learning_rate * max(0.0, (self.steps - step) / max(1, self.steps - warm))


@dataclass(frozen=True)
class Preset:
    """One schedule: linear warm-up, then linear decay, by AdamW with dropout 0.1. Either steps or epochs are given."""

    source: str
    use: Literal["distillation", "fine-tuning"]
    batch: int  # sequences a step
    tokens: int  # the longest sequence
    learning_rate: float  # the peak
    steps: int = 0
    epochs: float = 0.0
    warmup_steps: int = 0
    warmup: float = 0.0  # as a share of all steps, if the paper gives a share
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01

    def schedule(self, steps_per_epoch: int) -> Schedule:
        """The schedule for a text of `steps_per_epoch` steps at this preset's batch."""
        steps = self.steps or max(1, round(self.epochs * steps_per_epoch))
        warmup = self.warmup_steps / steps if self.warmup_steps else self.warmup
        return Schedule(steps, self.learning_rate, warmup, self.weight_decay, betas=self.betas)


# MiniLM, section 4.1 of the long version: English, from BERT-base. Students other than 6x768.
_MINILM = Preset("MiniLM, section 4.1", "distillation", 256, 512, 3e-4, steps=400_000, warmup_steps=4_000)
# The comparative analysis, appendix B. It gives no weight decay: 0.01, AdamW's default, is ours. It does not say whether 32 is
# the batch of each of its 30 GPUs or of all together.
_COMPARED = Preset(
    "comparative analysis, appendix B",
    "distillation",
    32,
    256,
    5e-4,
    epochs=7,
    warmup=0.05,
    betas=(0.9, 0.98),
    weight_decay=0.01,
)
# MiniLM, appendix B of the long version. The paper chose the rate by validation, from 2e-5, 3e-5, 4e-5 and 5e-5, and for XNLI and
# MLQA from 3e-5 to 6e-5; the lowest is here. Warm-up, betas and weight decay of fine-tuning are ours.
_FINE_TUNED = Preset("MiniLM, appendix B", "fine-tuning", 32, 128, 2e-5, epochs=3, warmup=0.06)
# The comparative analysis, appendix D: one rate and batch for all tasks. Length, warm-up, betas and decay are ours.
_COMPARED_FINE_TUNED = replace(_FINE_TUNED, source="comparative analysis, appendix D", learning_rate=2e-5)

PRESETS: dict[str, Preset] = {
    # Distillation on plain text.
    "minilm": _MINILM,  # section 4.1
    "minilm-6x768": replace(_MINILM, batch=1024, learning_rate=5e-4),  # section 4.1
    # Section 4.1, from the authors' own teacher. The paper names the second beta for twelve layers; for six it is ours.
    "minilm-own-teacher-12x384": replace(_MINILM, batch=2048, learning_rate=6e-4, betas=(0.9, 0.98)),
    "minilm-own-teacher-6x384": replace(_MINILM, batch=512, learning_rate=4e-4, betas=(0.9, 0.98)),
    "minilm-multilingual-12x384": replace(_MINILM, steps=1_000_000),  # section 4.1
    "minilm-multilingual-6x384": replace(_MINILM, batch=512, learning_rate=6e-4),  # section 4.1, with an assistant
    "minilmv2": _COMPARED,  # appendix B, attention transfer: MiniLMv2 and DirectMiniLM
    "minilmv2-multilingual": replace(_COMPARED, learning_rate=8e-4),  # appendix B
    "hidden-states": _COMPARED,  # appendix B
    "output-distribution": replace(_COMPARED, epochs=3, learning_rate=3e-4),  # appendix B, after hidden states
    # Fine-tuning on a task.
    "glue": _FINE_TUNED,  # MiniLM, appendix B: 3 to 5 epochs
    "glue-small": replace(_FINE_TUNED, epochs=10),  # MiniLM, appendix B: up to 10 for CoLA, RTE and MRPC
    "squad2": replace(_FINE_TUNED, tokens=384, learning_rate=6e-5),  # MiniLM, appendix B
    "xnli": replace(_FINE_TUNED, batch=128, learning_rate=3e-5, epochs=5),  # MiniLM, appendix
    "mlqa": replace(_FINE_TUNED, tokens=512, learning_rate=3e-5),  # MiniLM, appendix
    # MiniLM, appendix: students of six layers; those of twelve have 3e-5 and 1e-4, and 30 epochs on XSum. Label smoothing is 0.1.
    "question-generation": replace(_FINE_TUNED, tokens=512, learning_rate=8e-5, epochs=25),
    "xsum": replace(_FINE_TUNED, batch=64, tokens=512, learning_rate=1.5e-4, epochs=50),
    "compared-glue": _COMPARED_FINE_TUNED,  # appendix D
    "compared-cola": replace(_COMPARED_FINE_TUNED, epochs=6),  # appendix D; 10 for multilingual students
    "compared-xnli": replace(_COMPARED_FINE_TUNED, epochs=5),  # appendix D
}


def preset_of(name: str, use: str) -> Preset:
    """The preset of that name for `use`, distillation or fine-tuning.

    Raises:
        BadInput: there is none; the message lists the known ones.
    """
    fit = [known for known, preset in PRESETS.items() if preset.use == use]
    if name not in fit:
        raise BadInput(f"--schedule {name} is not a schedule of {use}. Give one of {', '.join(fit)}.")
    return PRESETS[name]
