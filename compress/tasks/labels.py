"""What tasks share whose answers are labels."""

from collections.abc import Sequence

import numpy as np

from compress.data.encoded import IGNORED
from compress.data.teacher_labels import LEAST
from serve.bundle.manifest import label_faults

LEAST_TOLD = 1e-5  # smaller probabilities are left out: a reader shares what is left to 1 among them
DIGITS = 6


def name_faults(labels: Sequence[str]) -> list[str]:
    """Why a head's `labels` cannot be read or served: one is there twice, or has no name."""
    faults = list(label_faults(labels))
    unnamed = [i for i, label in enumerate(labels) if not any(c.isprintable() and not c.isspace() for c in label)]
    return [*faults, *([f"the label of number {unnamed[0]} has an empty name"] if unnamed else [])]


def certain(targets: np.ndarray, labels: int) -> np.ndarray:
    """Logits (rows, labels) by which `targets` (rows,) are certain; a row without one leaves all labels alike."""
    logits = np.full((len(targets), labels), np.log(LEAST), dtype=np.float32)
    for row, target in enumerate(targets):
        logits[row, slice(None) if target == IGNORED else target] = 0.0
    return logits


def written(probabilities: np.ndarray, labels: Sequence[str]) -> dict[str, float]:
    """The probabilities by label, the largest first; those below `LEAST_TOLD` are left out, but never the largest."""
    order = np.argsort(-probabilities, kind="stable")
    return {
        labels[i]: float(f"{probabilities[i]:.{DIGITS}g}")
        for rank, i in enumerate(order.tolist())
        if not rank or probabilities[i] >= LEAST_TOLD
    }
