"""A fine-tuned model of transformers as the one that answers."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from compress.data.examples import Example
from compress.evaluation.predictions import shared_row_logits
from compress.models.answering import AnsweringModel

SHARD_TEXTS = 1_024  # the most work that a kill loses

Answers = list[tuple[int, dict[str, Any]]]


def ask_model(teacher: AnsweringModel, texts: Sequence[Example], missing: Sequence[int]) -> Iterator[Answers]:
    """The answers to the `missing` of `texts`, a shard at a time: the probability of each label or of each word's tags, or a number.

    Several processes compute a share each, and the main one gets all answers; the others get empty shards.
    """
    for start in range(0, len(missing), SHARD_TEXTS):
        shard = missing[start : start + SHARD_TEXTS]
        encoded = teacher.task.encode([texts[index] for index in shard], teacher.tokenizer, teacher.labels)
        logits = shared_row_logits(teacher.model, encoded)
        rows = zip(shard, logits or (), strict=logits is not None)
        yield [
            (index, teacher.task.written_answer(encoded, i, of_text.astype(np.float64)))
            for i, (index, of_text) in enumerate(rows)
        ]
