"""How sure a model is of its answer to one text: one number, whose mean over many texts shows whether they are like those of validation."""

import numpy as np

from serve.text.answers import sigmoid


def confidence(logits: np.ndarray, *, multi_label: bool = False) -> float:
    """The mean over rows of the probability of the likeliest label, or with `multi_label` of each label's likelier outcome.

    Args:
        logits: (rows, labels), divided by the temperature; a row is a text, or a word of one.
        multi_label: whether each label is decided on its own.
    """
    x = np.asarray(logits, dtype=np.float64)
    if multi_label:
        return float(sigmoid(np.abs(x)).mean())
    return float((1 / np.exp(x - x.max(axis=-1, keepdims=True)).sum(axis=-1)).mean())
