"""The head of a model that gives numbers, while it trains: numbers of any unit are learned as numbers of mean 0 and deviation 1.

An optimiser's step moves a weight by about the learning rate, whatever the unit of what it learns; and half precision has steps of 8 near
2,000. So the last map of the head gives standard numbers in training, and those of the data before and after.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

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
    if train.task == "text-regression":
        unit = unit_of(train)
        _rescale(model, unit.deviation, unit.mean)


def _rescale(model: Any, factor: float, shift: float) -> None:
    last = [part for part in model.modules() if isinstance(part, nn.Linear) and part.out_features == 1][-1]
    with torch.no_grad():
        # In float64, so that a mean far from 0 costs no digits on the way back.
        last.weight.copy_((last.weight.double() * factor).to(last.weight.dtype))
        last.bias.copy_((last.bias.double() * factor + shift).to(last.bias.dtype))
