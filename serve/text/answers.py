"""What answers of all tasks share: their options, probabilities, lengths in the caller's unit, and what a run of the model tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from serve.errors import BadInput
from serve.options import faults_of, fields_of, setting
from serve.text.spans import Aggregation

OffsetUnit = Literal["codepoints", "utf16", "utf8"]
EncodingFormat = Literal["float", "base64"]

# Six decimals keep all that float32 logits determine, and are short in JSON.
SCORE_DECIMALS = 6
# A number may be of any size; float32 holds about so many of its digits.
NUMBER_DIGITS = 7
WIDEST_VECTOR = 1_000_000  # numbers, as `MOST_LABELS`
# More labels than any model has.
MOST_LABELS = 1_000_000
# Of the name of a promise. Those of `export` have about 20.
MOST_PROMISE_CHARACTERS = 100


class Logits(NamedTuple):
    """The logits of one row of token ids: float32 in C order, little-endian."""

    shape: list[int]
    data: bytes


class TextFacts(NamedTuple):
    """Of an answered text: the rows and tokens that the model read of it, and how sure the model is; None if that is unknown."""

    rows: int
    tokens: int
    score: float | None


class Parts(NamedTuple):
    """Times of one run of the model, how many of its tokens were padding, and the facts of the texts that it completed, by index."""

    texts: int
    tokens: int
    padded_tokens: int
    tokenise_s: float
    run_s: float
    decode_s: float
    completed: Mapping[int, TextFacts] = {}


@dataclass(frozen=True)
class AnswerOptions:
    """Options of an answer; BadInput names every value that is out of range."""

    min_score: float = setting(
        0.0, help="Leave out entities, or answers to questions, with a lower score.", at_least=0, at_most=1
    )
    offsets: OffsetUnit = setting(
        "codepoints", help="Unit of `start` and `end` of an entity, or of an answer to a question."
    )
    top_k: int | None = setting(
        None, help="Number of labels, likeliest first.", at_least=1, at_most=MOST_LABELS,
        shown="all; the labels that apply, if any number may",
    )  # fmt: skip
    encoding_format: EncodingFormat = setting(
        "float", help="Form of a vector: numbers, or their float32 bytes in base64."
    )
    dimensions: int | None = setting(
        None, help="Numbers of a vector to keep, the first ones, brought to length 1 again.", at_least=1, at_most=WIDEST_VECTOR,
        shown="all",
    )  # fmt: skip
    # See `serve.text.spans.decode_spans`.
    aggregation: Aggregation = setting("first", help="How the tags of tokens become entities.")
    constrained: bool = setting(False, help="Take the likeliest tags that form a valid sequence.")
    truncate: bool = setting(False, help="Cut texts longer than the model. Without it they are read in windows.")
    abstain: bool = setting(False, help="Give no label if the highest score is below the bundle's abstain_below.")
    promise: str | None = setting(
        None, help="Give no answer below the score for which the bundle promises this, such as precision=0.95.", metavar="PROMISE",
        shown="none",
    )  # fmt: skip

    def __post_init__(self) -> None:
        wrong = faults_of(self, fields_of(AnswerOptions))
        if self.promise is not None and len(self.promise) > MOST_PROMISE_CHARACTERS:
            wrong["promise"] = (
                f"promise has {len(self.promise):,} characters; give the name of one of the model's promises"
            )
        if wrong:
            raise BadInput("; ".join(wrong.values()), field=next(iter(wrong)))


def softmax(logits: np.ndarray, dtype: DTypeLike = np.float64) -> np.ndarray:
    """Probabilities over the last axis, computed in `dtype`, same shape as `logits`."""
    # The reductions by their ufuncs: a text has few numbers, and the methods' checks take longer than the sums.
    exponentials = np.exp(logits.astype(dtype) - np.maximum.reduce(logits, axis=-1, keepdims=True))
    return np.asarray(exponentials / np.add.reduce(exponentials, axis=-1, keepdims=True))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The probability of each of `logits` on its own, float64, same shape."""
    x = logits.astype(np.float64)
    small = np.exp(-np.abs(x))  # never overflows
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small))


def confidence(logits: np.ndarray, *, multi_label: bool = False) -> float:
    """How sure a model is of its answer to one text: its mean over many texts shows whether they are like those of validation.

    It is the mean over rows of the probability of the likeliest label, or with `multi_label` of each label's likelier outcome.

    Args:
        logits: (rows, labels), divided by the temperature; a row is a text, or a word of one.
        multi_label: whether each label is decided on its own.
    """
    x = np.asarray(logits, dtype=np.float64)
    if multi_label:
        return float(sigmoid(np.abs(x)).mean())
    likeliest = 1 / np.add.reduce(np.exp(x - np.maximum.reduce(x, axis=-1, keepdims=True)), axis=-1)
    return float(np.add.reduce(likeliest, axis=None) / likeliest.size)


def length_in(text: str, unit: OffsetUnit) -> int:
    """The length of `text` in code points, UTF-16 code units (as JavaScript and Java count) or UTF-8 bytes."""
    if unit == "utf16":
        return len(text.encode("utf-16-le")) // 2
    if unit == "utf8":
        return len(text.encode("utf-8"))
    return len(text)
