"""The heads of transformers that answer a task, as the configuration of a checkpoint shows them. No torch before one is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve.text.labels import MULTI_LABEL, REGRESSION, SPAN_ENDS, gives_number


def _labels(config: Any) -> tuple[str, ...]:
    return tuple(config.id2label[index] for index in range(config.num_labels))


def _classes(config: Any) -> tuple[str, ...] | None:
    # Of several numbers a text no task is.
    numbers = gives_number(config.problem_type, config.num_labels) or config.problem_type == REGRESSION
    return None if numbers else _labels(config)


def _number(config: Any) -> tuple[str, ...] | None:
    return _labels(config) if gives_number(config.problem_type, config.num_labels) else None


def _span_ends(config: Any) -> tuple[str, ...] | None:
    return SPAN_ENDS if config.num_labels == len(SPAN_ENDS) else None


@dataclass(frozen=True)
class Head:
    """A kind of head: what the names of its classes end in, and how its labels are read."""

    suffix: str
    read_labels: Callable[[Any], tuple[str, ...] | None]
    spans: bool = False
    """Whether its start and end logits are made one output."""

    def labels_in(self, config: Any) -> tuple[str, ...] | None:
        """The labels of such a head in `config`, by index; None if it has none."""
        if not any(str(name).endswith(self.suffix) for name in config.architectures or []):
            return None
        return self.read_labels(config)

    @property
    def model_class(self) -> Any:
        """The class of transformers that opens models with such a head."""
        import transformers

        return getattr(transformers, f"AutoModel{self.suffix}")

    def ready(self, model: Any) -> Any:
        """`model`, with its answers in one output."""
        if not self.spans:
            return model
        from compress.models.task_heads import with_span_logits

        return with_span_logits(model)


TOKENS = Head("ForTokenClassification", _labels)
CLASSES = Head("ForSequenceClassification", _classes)
NUMBER = Head("ForSequenceClassification", _number)
SPANS = Head("ForQuestionAnswering", _span_ends, spans=True)
HEADS = (TOKENS, CLASSES, NUMBER, SPANS)


def head_of(config: Any) -> Head | None:
    """The head of a model with `config`; None if it has none for a task."""
    return next((head for head in HEADS if head.labels_in(config) is not None), None)


def stated_head(config: Any) -> Head | None:
    """The head whose class `config` names, whatever its labels are; None without one."""
    return next(
        (head for head in HEADS if any(str(name).endswith(head.suffix) for name in config.architectures or [])), None
    )


def is_multi_label(config: Any) -> bool:
    """Whether the head of a model with `config` is for texts with any number of labels."""
    return config.problem_type == MULTI_LABEL and head_of(config) is CLASSES


def names_vocabulary_head(config: Any) -> bool:
    """Whether `config` names a class with a masked-language-model head."""
    return any(str(name).endswith("ForMaskedLM") for name in config.architectures or [])
