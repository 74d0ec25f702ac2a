"""Numbers: a text, or a pair of texts, has a number."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from compress.data.answer_rows import Answer
from compress.data.columns import Columns
from compress.data.encoded import Encoded, encoded_texts
from compress.data.examples import Example, Splits, number_of
from compress.data.row_fields import number_in
from compress.data.rows import check_labelled, texts_of
from compress.data.task import Task
from compress.evaluation.metrics import Answers, Prediction
from compress.evaluation.numbers import PEARSON, as_numbers, check_unit, distinguishable, number_distance
from compress.models.heads import NUMBER as NUMBER_HEAD
from serve.errors import BadInput
from serve.text.answers import NUMBER_DIGITS
from serve.text.labels import NUMBER, REGRESSION

if TYPE_CHECKING:
    from compress.models.task_heads import Unit


@dataclass(frozen=True)
class TextRegression(Task):
    """Gives a text a number."""

    name = "text-regression"
    columns = ("text", "text_pair", "label")
    metric = PEARSON
    head = NUMBER_HEAD
    problem_type = REGRESSION
    share_of_rows = False
    gives = "numbers"
    answer_fields = "label"

    def example_of(self, row: dict[str, Any], columns: Columns) -> Example:
        """A text or a pair, and its number."""
        check_labelled(row, columns, self)
        text, pair = texts_of(row, columns, pairs=True)
        return Example(text, pair, number_in(row[columns.label], columns.label))

    def teacher_answer(self, row: dict[str, Any], example: Example, columns: Columns) -> Answer | None:
        """The number in the field `label`."""
        number = row.get(columns.label)
        return None if number is None else Answer(replace(example, label=number_in(number, columns.label)))

    def teacher_logits(self, answer: Answer, encoded: Encoded, index: int) -> np.ndarray | None:
        """The number, (1, 1)."""
        return np.array([[number_of(answer.example)]], dtype=np.float32)

    def certain_logits(self, encoded: Encoded, index: int) -> np.ndarray:
        """The number itself, (1, 1)."""
        return encoded.targets[index][:, None]

    def labels_in(self, examples: Iterable[Example]) -> tuple[str, ...]:
        """The one label of the models that give numbers."""
        return NUMBER

    def check_train(self, splits: Splits) -> None:
        """BadInput with one number throughout."""
        if len({example.label for example in splits.train}) < 2:
            raise BadInput(
                f"Every text of train has the number {splits.train[0].label:g}; at least 2 numbers are needed. Add texts of other numbers."
            )

    def summary(self, examples: Sequence[Example]) -> dict[str, Any]:
        """`numbers` with their `lowest`, `highest`, `mean` and `deviation`."""
        numbers = np.array([number_of(example) for example in examples])
        return {
            "numbers": {
                "lowest": float(numbers.min()),
                "highest": float(numbers.max()),
                "mean": float(numbers.mean()),
                "deviation": float(numbers.std()),
            }
        }

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer, labels: Sequence[str]) -> Encoded:
        """A row a text, whose target is its number."""
        return encoded_texts(
            self, examples, tokenizer, labels, lambda example: np.array([number_of(example)], dtype=np.float32)
        )

    def unit_of(self, encoded: Encoded) -> "Unit | None":
        from compress.models.task_heads import unit_of

        return unit_of(encoded)

    def gold_of(self, example: Example) -> Prediction:
        """The number; NaN if it is unlabelled."""
        return number_of(example)

    def predictions(self, encoded: Encoded, logits: Sequence[np.ndarray]) -> list[Prediction]:
        return [float(rows[0, 0]) for rows in logits]

    def prediction_of(self, answer: Mapping[str, Any], example: Example) -> Prediction:
        return float(answer["score"])

    def constant_predictions(self, encoded: Encoded) -> Iterator[list[Prediction]]:
        """One number throughout: all score the same."""
        yield [0.0] * len(encoded)

    def check_answers(self, named: str, gold: Answers, said: Answers) -> None:
        check_unit(named, gold, said)

    def distance(self, expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> tuple[float, float]:
        return number_distance(np.concatenate(expected)[:, 0], np.concatenate(actual)[:, 0])

    def answers_changed(self, expected: Answers, actual: Answers) -> int:
        """The texts whose numbers can be told apart."""
        return int(distinguishable(as_numbers(expected), as_numbers(actual)).sum())

    def nothing_found(self, texts: str) -> str:
        return f"gives {texts} numbers that do not rise with theirs. It was trained too little, or on another task"

    def written_answer(self, encoded: Encoded, index: int, logits: np.ndarray) -> dict[str, Any]:
        return {"label": float(f"{logits[0, 0]:.{NUMBER_DIGITS}g}")}
