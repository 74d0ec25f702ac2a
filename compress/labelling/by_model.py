"""A fine-tuned model of transformers as the one that answers."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from compress.data.encoded import Encoded, encode
from compress.data.examples import Example
from compress.evaluation.predictions import shared_row_logits
from compress.models.answering import AnsweringModel
from serve.tasks.text_regression import NUMBER_DIGITS
from serve.text.answers import softmax
from serve.text.spans import words

SHARD_TEXTS = 1_024  # the most work that a kill loses
LEAST_TOLD = 1e-5  # smaller probabilities are left out: a reader shares what is left to 1 among them
DIGITS = 6

Answers = list[tuple[int, dict[str, Any]]]


def ask_model(teacher: AnsweringModel, texts: Sequence[Example], missing: Sequence[int]) -> Iterator[Answers]:
    """The answers to the `missing` of `texts`, a shard at a time: the probability of each label or of each word's tags, or a number.

    Several processes compute a share each, and the main one gets all answers; the others get empty shards.
    """
    for start in range(0, len(missing), SHARD_TEXTS):
        shard = missing[start : start + SHARD_TEXTS]
        encoded = encode(
            [texts[index] for index in shard],
            teacher.tokenizer,
            teacher.task,
            teacher.labels,
            multi_label=teacher.multi_label,
        )
        logits = shared_row_logits(teacher.model, encoded)
        rows = zip(shard, logits or (), strict=logits is not None)
        yield [(index, _fields(encoded, i, of_text.astype(np.float64))) for i, (index, of_text) in enumerate(rows)]


def _fields(encoded: Encoded, index: int, logits: np.ndarray) -> dict[str, Any]:
    if encoded.task == "text-regression":
        return {"label": float(f"{logits[0, 0]:.{NUMBER_DIGITS}g}")}
    if encoded.task == "text-classification":
        probabilities = 1 / (1 + np.exp(-logits[0])) if encoded.multi_label else softmax(logits)[0]
        return {"labels": _told(probabilities, encoded.labels)}
    encoding = encoded.encodings[index]
    places = words(encoded.texts[index], encoding.offsets, encoding.word_ids)
    return {
        "words": [
            {"start": word.start, "end": word.end, "tags": _told(probabilities, encoded.labels)}
            for word, probabilities in zip(places, softmax(logits), strict=True)
        ]
    }


def _told(probabilities: np.ndarray, labels: Sequence[str]) -> dict[str, float]:
    """The probabilities by label, the largest first; those below `LEAST_TOLD` are left out, but never the largest."""
    order = np.argsort(-probabilities, kind="stable")
    return {
        labels[i]: float(f"{probabilities[i]:.{DIGITS}g}")
        for rank, i in enumerate(order.tolist())
        if not rank or probabilities[i] >= LEAST_TOLD
    }
