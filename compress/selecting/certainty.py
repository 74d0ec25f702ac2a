"""How sure a fine-tuned model is of its answers to texts."""

from collections.abc import Callable, Sequence

import numpy as np

from compress.data.examples import Example
from compress.evaluation.predictions import row_logits
from compress.models.answering import AnsweringModel
from serve.text.answers import softmax


def margins(
    model: AnsweringModel, texts: Sequence[Example], advance: Callable[[int], None] | None = None
) -> np.ndarray:
    """How far the likeliest answer leads the second, (texts,), float32, 0 to 1; small where the model wavers.

    Of a class it is the difference of the two largest probabilities (margin sampling: Scheffer and others, 2001). Where any number
    of labels may apply it is the smallest distance of a label's probability from an even chance, doubled. Of entities it is the
    mean over the words of a text.
    """
    encoded = model.task.encode(texts, model.tokenizer, model.labels)
    logits = row_logits(model.model, encoded, advance=advance)
    if model.multi_label:
        return np.array([np.abs(2 / (1 + np.exp(-rows[0])) - 1).min() for rows in logits], dtype=np.float32)
    found = []
    for rows in logits:
        first_two = np.sort(softmax(rows), axis=1)[:, -2:]
        # A text without words has nothing to be unsure of.
        found.append((first_two[:, -1] - first_two[:, 0]).mean() if len(rows) else 1.0)
    return np.array(found, dtype=np.float32)
