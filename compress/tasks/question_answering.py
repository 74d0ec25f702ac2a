"""Questions: the answer is a part of a context, which is read in windows, or there is none."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from tokenizers import Encoding, Tokenizer

from compress.data.columns import Columns
from compress.data.encoded import Encoded, pad_id_of
from compress.data.examples import Example, Splits
from compress.data.row_fields import text_of
from compress.data.rows import answer_place, answers_in
from compress.data.task import Task
from compress.evaluation.metrics import Acceptable, Prediction
from compress.evaluation.questions import ANSWER_F1, best_answer_from, given, said_of, span_distance
from compress.models.heads import SPANS
from serve.errors import BadInput
from serve.text.labels import SPAN_ENDS
from serve.text.questions import MOST_ANSWER_TOKENS, QuestionRow, question_rows
from serve.wording import counted

# Whole encodings, of which training keeps only windows, are held for so many questions at a time.
QUESTIONS_AT_ONCE = 1000


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """Answers a question from a context; a row of logits is a token of a window over it."""

    name = "question-answering"
    columns = ("question", "context", "answers")
    metric = ANSWER_F1
    head = SPANS
    gives = "places of answers"
    has_contexts = True
    table_fault = "is a table, whose cells cannot hold answers; save it as JSON lines, parquet or SQuAD's JSON"

    def needed_columns(self, columns: Columns, names: Container[str]) -> list[str]:
        """A question, its context and its answers."""
        return [*self.columns]

    def example_of(self, row: dict[str, Any], columns: Columns) -> Example:
        """The question of a row, with its context and its answers."""
        if columns.missing([*row], self):
            raise ValueError(columns.fault_of_row(row, self))
        question, context = text_of(row, columns.question), text_of(row, columns.context)
        answers = answers_in(row[columns.answers], columns.answers)
        places = [answer_place(each, context, columns.answers) for each in answers]
        return Example(question, context, answers=tuple(dict.fromkeys(places)))

    def labels_in(self, examples: Iterable[Example]) -> tuple[str, ...]:
        """The start and the end of an answer."""
        return SPAN_ENDS

    def label_counts(self, examples: Iterable[Example]) -> Counter[str]:
        """How many questions have an answer, and how many none."""
        return Counter("an answer" if example.answers else "no answer" for example in examples)

    def check_train(self, splits: Splits) -> None:
        """BadInput without an answer."""
        if not any(example.answers for example in splits.train):
            raise BadInput("No question of train has an answer; at least 1 is needed. Add questions with answers.")

    def text_warnings(self, encoded: Encoded, examples: Sequence[Example], where: str) -> list[str]:
        """About answers that no decoder can find: they are too long, or begin or end inside a word that a window cuts."""
        assert encoded.owners is not None
        held = {
            int(owner)
            for owner, rows in zip(encoded.owners, encoded.targets, strict=True)
            if rows[1:, 1].any() and rows[1:, 2].argmax() - rows[1:, 1].argmax() < MOST_ANSWER_TOKENS
        }
        lost = sum(bool(example.answers) and place not in held for place, example in enumerate(examples))
        if not lost:
            return []
        return [
            f"{counted(lost, f'answer in {where} is', f'answers in {where} are')} in no window whole, or longer than "
            f"{MOST_ANSWER_TOKENS} tokens, and cannot be found."
        ]

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer, labels: Sequence[str]) -> Encoded:
        """The windows over the contexts of `examples`."""
        truncation = tokenizer.truncation
        tokenizer.no_truncation()  # a window is cut from all of a context
        max_length = truncation["max_length"] if truncation else None
        of_window: list[tuple[int, QuestionRow]] = []
        try:
            for first in range(0, len(examples), QUESTIONS_AT_ONCE):
                batch = examples[first : first + QUESTIONS_AT_ONCE]
                encodings: list[Encoding] = tokenizer.encode_batch([example.text_or_pair for example in batch])
                for owner, (example, encoding) in enumerate(zip(batch, encodings, strict=True), first):
                    rows = question_rows(encoding, example.text_pair or "", max_length or max(1, len(encoding)))
                    of_window += [(owner, row) for row in rows]
        finally:
            if truncation:
                tokenizer.enable_truncation(**truncation)
        contexts = [examples[owner].text_pair or "" for owner, _ in of_window]
        return Encoded(
            self,
            tuple(labels),
            contexts,
            [row for _, row in of_window],  # type: ignore[misc]  # rows have the attributes of encodings
            [np.asarray(row.ids) for _, row in of_window],
            [row.places for _, row in of_window],
            [_span_targets(examples[owner], row) for owner, row in of_window],
            0,
            pad_id_of(tokenizer),
            owners=np.array([owner for owner, _ in of_window], dtype=np.int64),
        )

    def gold_of(self, example: Example) -> Prediction:
        """The texts that each answer the question."""
        return Acceptable(example.answer_texts, example.language)

    def predictions(self, encoded: Encoded, logits: Sequence[np.ndarray]) -> list[Prediction]:
        """One answer for all windows of a context; it is empty for none."""
        return list(given(said_of(encoded, logits), encoded.answer_from))

    def prediction_of(self, answer: Mapping[str, Any], example: Example) -> Prediction:
        """The text of an answer; empty for none."""
        return str(answer["answer"]["text"]) if answer["answer"] else ""

    def constant_predictions(self, encoded: Encoded) -> Iterator[list[Prediction]]:
        """No answer to any question."""
        assert encoded.owners is not None
        yield [""] * len(np.unique(encoded.owners))

    def with_threshold(self, encoded: Encoded, examples: Sequence[Example], logits: Sequence[np.ndarray]) -> Encoded:
        """`encoded` with the score from which answers to `examples` are best given."""
        right = [cast(Acceptable, self.gold_of(example)) for example in examples]
        return replace(encoded, answer_from=best_answer_from(right, said_of(encoded, logits)))

    def distance(self, expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> tuple[float, float]:
        return span_distance(expected, actual)

    def nothing_found(self, texts: str) -> str:
        return f"answers none of {texts} with a right word. It was trained too little, or on other questions"


def _span_targets(example: Example, row: QuestionRow) -> np.ndarray:
    """The targets of one window, (rows, 3): those of the first answer that it holds whole, or the first row for none.

    A window of a question whose answers are unknown has no start and no end.
    """
    targets = np.zeros((1 + row.last - row.first, 3), dtype=np.int8)
    targets[0, 0] = 1
    if example.answers is None:
        return targets
    starts, ends, firsts, lasts = row.words.T
    for start, end in example.answers:
        at_start = np.flatnonzero((starts <= start) & (start < ends))
        at_end = np.flatnonzero((starts < end) & (end <= ends))
        if len(at_start) and len(at_end):
            targets[1 + firsts[at_start[0]], 1] = targets[1 + lasts[at_end[0]], 2] = 1
            return targets
    targets[0, 1:] = 1
    return targets
