"""Labels of texts: one a text, or any number; of a text, of a pair, or of the relation of two marked parts of a text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from compress.data.answer_rows import Answer, probability_in
from compress.data.columns import Columns
from compress.data.encoded import IGNORED, Encoded, encoded_texts
from compress.data.examples import Example, Splits, classes_of
from compress.data.label_checks import spelling_warnings
from compress.data.row_fields import label_of
from compress.data.rows import check_labelled, labels_of, unlabelled_example
from compress.data.task import Task
from compress.data.teacher_labels import LEAST, with_the_rest
from compress.evaluation.metrics import ACCURACY, MICRO_F1, Metric, Prediction
from compress.models.heads import CLASSES
from compress.tasks.labels import certain, known, name_faults, written
from serve.errors import BadInput
from serve.text.answers import softmax
from serve.text.labels import MULTI_LABEL, applies

ONE_LABEL = """You label texts. The labels are:
{labels}

Answer with one JSON object and nothing else: {"label": "..."}, where the label is one of those above, written exactly so."""
SEVERAL_LABELS = """You label texts. Any number of these labels may apply to a text, also none:
{labels}

Answer with one JSON object and nothing else: {"label": ["...", "..."]}, with the labels that apply, written exactly so."""


@dataclass(frozen=True)
class TextClassification(Task):
    """Gives a text its label, or with `multi_label` all that apply."""

    multi_label: bool = False

    name = "text-classification"
    columns = ("text", "text_pair", "label")
    head = CLASSES
    has_kinds = True
    answer_fields = "labels or label"

    @property
    def metric(self) -> Metric:
        """Accuracy, or micro F1 of labels that apply."""
        return MICRO_F1 if self.multi_label else ACCURACY

    @property
    def problem_type(self) -> str | None:
        """That of a head with any number of labels."""
        return MULTI_LABEL if self.multi_label else None

    def with_multi_label(self, multi_label: bool) -> Task:
        return replace(self, multi_label=multi_label)

    def example_of(self, row: dict[str, Any], columns: Columns) -> Example:
        """A text, a pair, or a text with head and tail, and its label or labels."""
        check_labelled(row, columns, self)
        example = unlabelled_example(row, columns)
        return replace(example, label=labels_of(row[columns.label], columns.label))

    def teacher_answer(self, row: dict[str, Any], example: Example, columns: Columns) -> Answer | None:
        """The answer in the fields `labels` or `label`."""
        label, given = row.get(columns.label), row.get("labels")
        if isinstance(label, dict):
            label, given = None, label
        if columns.label == "labels":
            given = given if isinstance(given, dict) else None
        if isinstance(given, list) and label is None:
            label, given = given, None
        if given is not None:
            if not isinstance(given, dict):
                raise ValueError(
                    f"`labels` is {type(given).__name__}; an object with the probability of each label is needed"
                )
            told = {
                label_of(name, "labels"): probability_in(value, f"that of {name}")
                for name, value in given.items()
                if value is not None
            }
            if not told:
                raise ValueError("`labels` is empty; the probability of at least 1 label is needed")
            likeliest = max(told, key=lambda name: told[name])
            if isinstance(label, str) and label != likeliest:
                raise ValueError(
                    f"`{columns.label}` is {label!r}, and by `labels` {likeliest!r} is the likeliest; give one of them"
                )
            return Answer(replace(example, label=likeliest), told)
        return None if label is None else Answer(replace(example, label=labels_of(label, columns.label)))

    def teacher_logits(self, answer: Answer, encoded: Encoded, index: int) -> np.ndarray | None:
        """Logits (1, labels) whose softmax, or with several labels whose sigmoid, are the probabilities of `answer`."""
        given = answer.labels or dict.fromkeys(classes_of(answer.example), 1.0)
        found = np.array([given.get(name, 0.0) for name in encoded.labels], dtype=np.float64)
        if not self.multi_label:
            found = with_the_rest(found, np.array([name not in given for name in encoded.labels]))
        of_class: np.ndarray = np.clip(found, LEAST, 1 - LEAST)
        logits: np.ndarray = np.log(of_class) - np.log1p(-of_class) if self.multi_label else np.log(of_class)
        return logits[None].astype(np.float32)

    def certain_logits(self, encoded: Encoded, index: int) -> np.ndarray:
        targets = encoded.targets[index]
        if self.multi_label:
            sure = np.float32(np.log(1 - LEAST) - np.log(LEAST))
            return np.where(targets == 1, sure, np.where(targets == 0, -sure, 0)).astype(np.float32)
        return certain(targets, len(encoded.labels))

    def label_counts(self, examples: Iterable[Example]) -> Counter[str]:
        """How many texts have each label."""
        return Counter(name for example in examples for name in classes_of(example))

    def label_faults(self, labels: Sequence[str]) -> list[str]:
        """Labels that are there twice or have no name."""
        return name_faults(labels)

    def check_train(self, splits: Splits) -> None:
        """BadInput without a label, or with one alone where each text has one."""
        names = splits.labels(self)
        if self.multi_label and not names:
            raise BadInput("No text of train has a label; at least 1 is needed. Label some texts.")
        if not self.multi_label and len(names) < 2:
            raise BadInput(f"train has only the class {names[0]!r}; at least 2 are needed. Add texts of another class.")

    def label_warnings(self, examples: Sequence[Example]) -> list[str]:
        return spelling_warnings(examples, self.label_counts(examples))

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer, labels: Sequence[str]) -> Encoded:
        """A row a text, whose target is the index of its label, or which labels apply."""
        index = {label: i for i, label in enumerate(labels)}

        def target_of(example: Example) -> np.ndarray:
            if self.multi_label:
                return _several(example, index)
            known = index.get(example.label, IGNORED) if isinstance(example.label, str) else IGNORED
            return np.array([known], dtype=np.int64)

        return encoded_texts(self, examples, tokenizer, labels, target_of)

    def gold_of(self, example: Example) -> Prediction:
        """The label, or the set of those that apply."""
        return frozenset(example.label) if isinstance(example.label, tuple) else str(example.label or "")

    def predictions(self, encoded: Encoded, logits: Sequence[np.ndarray]) -> list[Prediction]:
        """The likeliest label, or those that apply."""
        if self.multi_label:
            return [frozenset(encoded.labels[i] for i in np.flatnonzero(applies(rows[0]))) for rows in logits]
        return [encoded.labels[int(rows[0].argmax())] for rows in logits]

    def prediction_of(self, answer: Mapping[str, Any], example: Example) -> Prediction:
        labels = answer["labels"]
        return frozenset(each["label"] for each in labels) if self.multi_label else str(labels[0]["label"])

    def constant_predictions(self, encoded: Encoded) -> Iterator[list[Prediction]]:
        """For each label, the answers of a model that always gives it.

        If any number of labels may apply, the answers are the most frequent label, the two most frequent, and so on, because
        these score best among constant answers of their size.
        """
        if not self.multi_label:
            for label in encoded.labels:
                yield [label] * len(encoded)
            return
        there = (np.concatenate(encoded.targets) == 1).sum(axis=0)
        often = [encoded.labels[i] for i in np.argsort(-there, kind="stable")]
        for size in range(1, len(often) + 1):
            yield [frozenset(often[:size])] * len(encoded)

    def instructions(self) -> str:
        """To give one label, or all that apply."""
        return SEVERAL_LABELS if self.multi_label else ONE_LABEL

    def read_reply(self, reply: dict[str, Any], example: Example, labels: Sequence[str]) -> dict[str, Any]:
        """The label, or the list of those that apply."""
        label = reply.get("label")
        if self.multi_label:
            if not isinstance(label, list):
                raise ValueError("`label` is not a list of labels")
            return {"label": sorted({known(each, labels) for each in label})}
        return {"label": known(label, labels)}

    def written_answer(self, encoded: Encoded, index: int, logits: np.ndarray) -> dict[str, Any]:
        probabilities = 1 / (1 + np.exp(-logits[0])) if self.multi_label else softmax(logits)[0]
        return {"labels": written(probabilities, encoded.labels)}


def _several(example: Example, index: dict[str, int]) -> np.ndarray:
    """The labels that apply, (1, labels): 1 for each that does, otherwise 0; `IGNORED` for all if the label is unknown."""
    applies = np.full((1, len(index)), IGNORED if example.label is None else 0, dtype=np.float32)
    names = example.label if isinstance(example.label, tuple) else ()
    applies[0, [index[name] for name in names if name in index]] = 1
    return applies
