"""Heads that differ from transformers' own: those of numbers while they train, and those of models that answer questions.

Numbers of any unit are learned as numbers of mean 0 and deviation 1. An optimiser's step moves a weight by about the learning rate,
whatever the unit of what it learns; and half precision has steps of 8 near 2,000. So the last map of the head gives standard numbers in
training, and those of the data before and after. Models that answer questions give their logits under one name, as those of the other
tasks do.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from compress.data.encoded import Encoded


@dataclass(frozen=True)
class Unit:
    """The mean and the standard deviation of the numbers of a data set."""

    mean: float = 0.0
    deviation: float = 1.0

    def standard(self, numbers: np.ndarray) -> np.ndarray:
        """`numbers` in deviations from the mean, float32, same shape."""
        return ((numbers.astype(np.float64) - self.mean) / self.deviation).astype(np.float32)

    def texts(self, encoded: Encoded) -> Encoded:
        """`encoded` with its targets in this unit."""
        return replace(encoded, targets=[self.standard(target) for target in encoded.targets])

    def soft(self, logits: Sequence[np.ndarray]) -> list[np.ndarray]:
        """A teacher's numbers, (1, 1) of each text, in this unit."""
        return [self.standard(rows) for rows in logits]


def unit_of(encoded: Encoded) -> Unit:
    """The unit of the numbers of `encoded`."""
    numbers = np.concatenate(encoded.targets).astype(np.float64)
    return Unit(float(np.nanmean(numbers)), float(np.nanstd(numbers)) or 1.0)


@contextmanager
def standardised(unit: Unit, *models: Any) -> Iterator[None]:
    """Context in which the models' heads give numbers in `unit`; afterwards they give those of the data again."""
    for model in models:
        _rescale(model, 1 / unit.deviation, -unit.mean / unit.deviation)
    try:
        yield
    finally:
        for model in models:
            _rescale(model, unit.deviation, unit.mean)


def start_head(model: Any, train: Encoded) -> None:
    """Let the new head of `model` give numbers with the mean and the deviation of those of `train`, in place; if it learns numbers."""
    if unit := train.task.unit_of(train):
        _rescale(model, unit.deviation, unit.mean)


def _rescale(model: Any, factor: float, shift: float) -> None:
    last = [part for part in model.modules() if isinstance(part, nn.Linear) and part.out_features == 1][-1]
    with torch.no_grad():
        # In float64, so that a mean far from 0 costs no digits on the way back.
        last.weight.copy_((last.weight.double() * factor).to(last.weight.dtype))
        last.bias.copy_((last.bias.double() * factor + shift).to(last.bias.dtype))


@dataclass
class SpanLogits(ModelOutput):  # type: ignore[misc]  # transformers gives it no type
    """The `logits` of each token, (texts, tokens, 2): of an answer's start and of its end; the rest as transformers gives it."""

    logits: Tensor
    start_logits: Any = None
    end_logits: Any = None
    hidden_states: Any = None
    attentions: Any = None


def with_span_logits(model: Any) -> Any:
    """`model`, a `...ForQuestionAnswering` of transformers, whose outputs have both of its logits as `logits`.

    Its class is replaced by one of the same name, so that it is saved, and copied to a student, as before.
    """
    kind = type(model)
    if kind not in _MADE:
        _MADE[kind] = _of(kind)
    model.__class__ = _MADE[kind]
    return model


# By the class of transformers, and by itself: one class for each, so that two models of one kind have one class.
_MADE: dict[type, type] = {}


def _of(kind: Any) -> type:
    """The class for `kind`."""

    @functools.wraps(kind.forward)  # who asks for its arguments finds those of transformers
    def forward(self: Any, *inputs: Any, **named: Any) -> SpanLogits:
        said = kind.forward(self, *inputs, **{**named, "return_dict": True})
        logits = torch.stack([said.start_logits, said.end_logits], dim=-1)
        return SpanLogits(logits, said.start_logits, said.end_logits, said.hidden_states, said.attentions)

    made = type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})
    _MADE[made] = made
    return made
