"""What the floors below `compress.tasks` know of a task: they are given this object, and never ask for its name. No torch."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from serve.tasks import task_named
from serve.tasks.served_task import ServedTask

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from compress.data.answer_rows import Answer
    from compress.data.columns import Columns
    from compress.data.encoded import Encoded
    from compress.data.examples import Example, Splits
    from compress.evaluation.metrics import Answers, Metric, Prediction
    from compress.models.heads import Head
    from compress.models.task_heads import Unit
    from serve.bundle.manifest import TaskName


class Task(ABC):
    """A task: what its rows hold, how a model learns and answers it, and how answers are scored.

    What has a body or a value here holds for most tasks; the files of `compress.tasks` say the rest.
    """

    @property
    @abstractmethod
    def name(self) -> "TaskName":
        """As settings and manifests have it."""

    @property
    def serving(self) -> ServedTask:
        """What a bundle of it does."""
        return task_named(self.name)

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The fields of `Columns` that its rows are read from."""

    @property
    @abstractmethod
    def metric(self) -> "Metric":
        """How its answers are scored."""

    @property
    @abstractmethod
    def head(self) -> "Head | None":
        """The head of its models; None for an encoder."""

    @property
    def multi_label(self) -> bool:
        """Whether any number of labels may apply to a text."""
        return False

    @property
    def problem_type(self) -> str | None:
        """What a new head has as `problem_type` in config.json."""
        return None

    # Of its data.

    @property
    def names_labels(self) -> bool:
        """Whether an answer is made of labels, which have names and probabilities; otherwise `gives` says what it is."""
        return self.serving.names_labels

    gives: str = "labels"
    """What its answers are, in the plural, for messages."""

    labels_words: bool = False
    """Whether each word has a label of its own, so that words and tags are read too."""

    has_kinds: bool = False
    """Whether its labels are of several kinds: one a text or any number, of texts, pairs or relations."""

    has_contexts: bool = False
    """Whether each row has a context, which is read in windows and which several rows may share."""

    @property
    def per_token(self) -> bool:
        """Whether its model has logits for each token, and not for each text."""
        return self.serving.per_token

    table_fault: str = ""
    """Why a table cannot hold its rows; empty if it can."""

    answer_fields: str = ""
    """The fields of a teacher's answer in a file, as messages name them; empty where no file has answers."""

    def needed_columns(self, columns: "Columns", names: Container[str]) -> list[str]:
        """The fields of `Columns` that rows with `names` need: one text or two, and the label."""
        text, *pair = columns.needed_texts()
        return [text, "label", *pair]

    @abstractmethod
    def example_of(self, row: dict[str, Any], columns: "Columns") -> "Example":
        """The example of one row. ValueError describes the fault of a row."""

    def labels_in(self, examples: "Iterable[Example]") -> tuple[str, ...]:
        """The labels of `examples`, sorted; those of the model's outputs where answers are no labels."""
        return tuple(sorted(self.label_counts(examples)))

    def label_counts(self, examples: "Iterable[Example]") -> Counter[str]:
        """How often each label occurs in `examples`; for answers that are no labels, how often each kind of them does."""
        return Counter()

    def model_labels(self, names: Iterable[str]) -> tuple[str, ...]:
        """The labels of a new head, by index, for the labels `names` of data."""
        return tuple(names)

    def answer_labels(self, labels: Sequence[str]) -> tuple[str, ...]:
        """The labels of answers that a head with `labels` gives."""
        return tuple(labels)

    def label_faults(self, labels: Sequence[str]) -> list[str]:
        """Why the labels of a head cannot be read or served."""
        return []

    def check_train(self, splits: "Splits") -> None:
        """Check that train has enough of what is learned. Raises BadInput: it has too few labels, numbers or answers."""
        return None

    def label_warnings(self, examples: "Sequence[Example]") -> list[str]:
        """Warnings about the spelling of labels, and about texts with two of them."""
        return []

    def text_warnings(self, encoded: "Encoded", examples: "Sequence[Example]", where: str) -> list[str]:
        """Warnings about `examples` of the split or file `where` that no model can get right."""
        return []

    def summary(self, examples: "Sequence[Example]") -> dict[str, Any]:
        """What a summary of the inputs says of the answers in train beside the counts of labels, as JSON."""
        return {}

    def with_multi_label(self, multi_label: bool) -> "Task":
        """This task for texts that have one label or any number, where it has both kinds."""
        return self

    # Of training.

    @abstractmethod
    def encode(self, examples: "Sequence[Example]", tokenizer: "Tokenizer", labels: Sequence[str]) -> "Encoded":
        """Tokenised `examples` with their targets; `labels` are those of a head by index, and other labels give no target."""

    def unit_of(self, encoded: "Encoded") -> "Unit | None":
        """The unit of the numbers that are learned; None where labels are."""
        return None

    # Of scores.

    @abstractmethod
    def gold_of(self, example: "Example") -> "Prediction":
        """The correct answer to `example`."""

    @abstractmethod
    def predictions(self, encoded: "Encoded", logits: "Sequence[np.ndarray]") -> "list[Prediction]":
        """The answers that serving gives from each text's `logits` (rows, labels)."""

    @abstractmethod
    def prediction_of(self, answer: Mapping[str, Any], example: "Example") -> "Prediction":
        """A server's answer to the text of `example`."""

    @abstractmethod
    def constant_predictions(self, encoded: "Encoded") -> "Iterator[list[Prediction]]":
        """The answers of models that give every text the same one, of which the best sets the level of chance."""

    def with_threshold(
        self, encoded: "Encoded", examples: "Sequence[Example]", logits: "Sequence[np.ndarray]"
    ) -> "Encoded":
        """`encoded` with the score from which an answer is given, chosen on `logits`; as it is where each text gets an answer."""
        return encoded

    def check_answers(self, named: str, gold: "Answers", said: "Answers") -> None:
        """Check a teacher's answers for what its score does not show. Raises BadInput: they cannot be right."""
        return None

    # Of int8.

    def distance(self, expected: "Sequence[np.ndarray]", actual: "Sequence[np.ndarray]") -> tuple[float, float]:
        """Mean divergence of each text's `actual` logits from `expected` ones, and the share of rows whose answer differs."""
        import numpy as np

        from compress.evaluation.metrics import distance

        return distance(np.concatenate(expected), np.concatenate(actual), multi_label=self.multi_label)

    def answers_changed(self, expected: "Answers", actual: "Answers") -> int:
        """The texts whose answer differs."""
        return sum(ours != theirs for ours, theirs in zip(actual, expected, strict=True))

    share_of_rows: bool = True
    """Whether a variant without labelled texts is judged by the share of rows with fp32's answer, and not by the metric against it."""

    def nothing_found(self, texts: str) -> str:
        """What a model does that scores 0 on `texts`, and what may be wrong."""
        return f"finds none of the labels of {texts}. It was trained for other labels, or too little"

    # Of a teacher that is asked. ValueError where none can be.

    def teacher_answer(self, row: dict[str, Any], example: "Example", columns: "Columns") -> "Answer | None":
        """A teacher's answer in a row, whose text is that of `example`; None if it has none. ValueError describes a fault."""
        raise ValueError(f"answers of {self.name} are not read from files")

    def teacher_logits(self, answer: "Answer", encoded: "Encoded", index: int) -> "np.ndarray | None":
        """Logits (rows, labels) of text `index` by a teacher's answer; None where it does not reach to the last word."""
        raise ValueError(f"answers of {self.name} are not read from files")

    def certain_logits(self, encoded: "Encoded", index: int) -> "np.ndarray":
        """Logits (rows, labels) by which the labels of text `index` are certain; a row without one leaves all of them alike."""
        raise ValueError(f"answers of {self.name} are not read from files")

    def written_answer(self, encoded: "Encoded", index: int, logits: "np.ndarray") -> dict[str, Any]:
        """The fields of a row of answers, from a model's logits (rows, labels), float64, of text `index`."""
        raise ValueError(f"answers of {self.name} are not written to files")

    def instructions(self) -> str:
        """What a language model is told to do, with a place for the names of the labels."""
        raise ValueError(f"{self.name} is not asked of a language model")

    def read_reply(self, reply: dict[str, Any], example: "Example", labels: Sequence[str]) -> dict[str, Any]:
        """The fields of a row of answers, from the JSON object that a language model answers. ValueError tells it what is wrong."""
        raise ValueError(f"{self.name} is not asked of a language model")
