"""Sentence vectors: a text has a vector, and what counts is how near texts lie to each other. No labels teach it."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from compress.data.columns import Columns
from compress.data.encoded import IGNORED, Encoded, encoded_texts
from compress.data.examples import Example
from compress.data.task import Task
from compress.evaluation.metrics import Answers, Prediction
from compress.evaluation.vectors import SIMILARITY, nearest, vector_distance

NO_LABELS = "vectors have no labels"


@dataclass(frozen=True)
class FeatureExtraction(Task):
    """Gives a text a vector, which is its model's one row of logits."""

    name = "feature-extraction"
    columns = ("text",)
    metric = SIMILARITY
    head = None
    share_of_rows = False
    gives = "similarities"

    def needed_columns(self, columns: Columns, names: Container[str]) -> list[str]:
        return ["text"]

    def example_of(self, row: dict[str, Any], columns: Columns) -> Example:
        """ValueError: rows have no labels."""
        raise ValueError(NO_LABELS)

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer, labels: Sequence[str]) -> Encoded:
        """A row a text, without a target."""
        return encoded_texts(self, examples, tokenizer, labels, lambda _: np.array([IGNORED], dtype=np.int64))

    def gold_of(self, example: Example) -> Prediction:
        """ValueError: a text has no right vector."""
        raise ValueError(NO_LABELS)

    def predictions(self, encoded: Encoded, logits: Sequence[np.ndarray]) -> list[Prediction]:
        return [rows[0] for rows in logits]

    def prediction_of(self, answer: Mapping[str, Any], example: Example) -> Prediction:
        return np.asarray(answer["embedding"], dtype=np.float32)

    def constant_predictions(self, encoded: Encoded) -> Iterator[list[Prediction]]:
        """None: one vector throughout ranks nothing."""
        return iter(())

    def distance(self, expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> tuple[float, float]:
        return vector_distance(np.concatenate(expected), np.concatenate(actual))  # type: ignore[arg-type]

    def answers_changed(self, expected: Answers, actual: Answers) -> int:
        """The texts whose nearest text is another."""
        theirs, ours = (nearest(cast(Sequence[np.ndarray], each), 1) for each in (expected, actual))
        return int((theirs != ours).any(axis=-1).sum())

    def nothing_found(self, texts: str) -> str:
        return (
            f"ranks no similarities of {texts}. These are too few (half of --texts checks), or all get the same vector"
        )
