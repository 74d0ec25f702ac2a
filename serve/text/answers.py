"""Logits -> answers: entities with offsets in the caller's unit, labels with scores, a number, or a vector."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict, get_args

import numpy as np
from numpy.typing import DTypeLike

from serve.errors import BadInput
from serve.options import setting
from serve.text.labels import applies
from serve.text.questions import Found
from serve.text.spans import Aggregation, Span, Word, decode_spans

OffsetUnit = Literal["codepoints", "utf16", "utf8"]
EncodingFormat = Literal["float", "base64"]
OFFSET_UNITS, AGGREGATIONS, ENCODING_FORMATS = map(get_args, (OffsetUnit, Aggregation, EncodingFormat))

# Six decimals keep all that float32 logits determine, and are short in JSON.
SCORE_DECIMALS = 6
# A number may be of any size; float32 holds about so many of its digits.
NUMBER_DIGITS = 7
# Of a number of a vector of length 1; shorter in JSON than all the digits of its float32.
VECTOR_DECIMALS = 7
WIDEST_VECTOR = 1_000_000  # numbers, as `MOST_LABELS`
# More labels than any model has. A bound is needed: the message to the worker process holds 64-bit integers only.
MOST_LABELS = 1_000_000
# Of the name of a promise, which goes to the worker process with each text of a request. Those of `export` have about 20.
MOST_PROMISE_CHARACTERS = 100


class Entity(TypedDict):
    """One entity. `start` and `end` (exclusive) count the unit that was asked for; `text` is the text between them."""

    label: str
    text: str
    start: int
    end: int
    score: float


class EntitiesAnswer(TypedDict):
    """The entities of one text, in order; `truncated` is true if the model did not read the whole text."""

    entities: list[Entity]
    truncated: bool


class LabelScore(TypedDict):
    """One class and its probability."""

    label: str
    score: float


class LabelsAnswer(TypedDict):
    """The classes of one text, likeliest first; `truncated` is true if the model did not read the whole text.

    A model where any number of labels may apply gives those that apply, perhaps none, each with its own probability.
    `abstained` is present if `abstain` was asked for: true means that the model is not sure enough, and there are no labels.
    """

    labels: list[LabelScore]
    truncated: bool
    abstained: NotRequired[bool]


class FoundAnswer(TypedDict):
    """The part of the context that answers the question. `start` and `end` (exclusive) count the unit that was asked for."""

    text: str
    start: int
    end: int


class QuestionAnswer(TypedDict):
    """The answer to one question; null if the context holds none, as far as the model sees.

    `score` tells how much likelier the likeliest answer is than none, from 0 to 1, also where it is not given. `truncated` is false: a
    long context is read in windows.
    """

    answer: FoundAnswer | None
    score: float
    truncated: bool


class NumberAnswer(TypedDict):
    """The number that a model of `text-regression` gives one text; `truncated` is true if it did not read the whole text."""

    score: float
    truncated: bool


class VectorAnswer(TypedDict):
    """The vector that a model of `feature-extraction` gives one text: numbers, or as `base64` their bytes in float32, little-endian.

    `tokens` are those of the text; `truncated` is true if the model did not read the whole text.
    """

    embedding: list[float] | str
    tokens: int
    truncated: bool


Answer = EntitiesAnswer | LabelsAnswer | NumberAnswer | QuestionAnswer | VectorAnswer


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
        wrong = {}
        if not 0.0 <= self.min_score <= 1.0:
            wrong["min_score"] = f"min_score is {self.min_score}; give a number from 0 to 1"
        if self.offsets not in OFFSET_UNITS:
            wrong["offsets"] = f"offsets is {self.offsets!r}; give one of {', '.join(OFFSET_UNITS)}"
        if self.aggregation not in AGGREGATIONS:
            wrong["aggregation"] = f"aggregation is {self.aggregation!r}; give one of {', '.join(AGGREGATIONS)}"
        if self.top_k is not None and not 1 <= self.top_k <= MOST_LABELS:
            wrong["top_k"] = f"top_k is {self.top_k}; give a whole number from 1 to {MOST_LABELS:,}, or leave it out"
        if self.encoding_format not in ENCODING_FORMATS:
            wrong["encoding_format"] = f"encoding_format is {self.encoding_format!r}; give float or base64"
        if self.dimensions is not None and not (type(self.dimensions) is int and 1 <= self.dimensions <= WIDEST_VECTOR):
            wrong["dimensions"] = (
                f"dimensions is {self.dimensions}; give a whole number from 1 to the model's, or leave it out"
            )
        if self.promise is not None and len(self.promise) > MOST_PROMISE_CHARACTERS:
            wrong["promise"] = (
                f"promise has {len(self.promise):,} characters; give the name of one of the model's promises"
            )
        if wrong:
            raise BadInput("; ".join(wrong.values()), field=next(iter(wrong)))


def entities_answer(
    text: str, found: Sequence[Word], logits: np.ndarray, tags: list[str], options: AnswerOptions, *, truncated: bool
) -> EntitiesAnswer:
    """The entities of `text`, whose words are `found`. `logits` has shape (tokens, tags). BadInput as in `decode_spans`."""
    spans = decode_spans(found, softmax(logits), tags, aggregation=options.aggregation, constrained=options.constrained)
    kept = [span for span in spans if span.score >= options.min_score]
    return {"entities": _entities(text, kept, options.offsets), "truncated": truncated}


def labels_answer(
    logits: np.ndarray,
    labels: list[str],
    options: AnswerOptions,
    *,
    truncated: bool,
    abstain_below: float | None = None,
) -> LabelsAnswer:
    """The classes of one text; `logits` has shape (labels,). Equal scores keep the order of the bundle's labels.

    With `options.abstain`, there are none if the highest probability is below `abstain_below`.
    """
    probabilities = softmax(logits)
    answer = _likeliest(probabilities, labels, options.top_k, truncated)
    return _or_none(answer, probabilities, abstain_below) if options.abstain else answer


def applying_labels_answer(
    logits: np.ndarray,
    labels: list[str],
    options: AnswerOptions,
    *,
    truncated: bool,
    abstain_below: float | None = None,
) -> LabelsAnswer:
    """The labels that apply to one text, or the `top_k` likeliest ones, whether they apply or not; `logits` has shape (labels,).

    It abstains as `labels_answer` does.
    """
    count = int(applies(logits).sum()) if options.top_k is None else options.top_k
    probabilities = sigmoid(logits)
    answer = _likeliest(probabilities, labels, count, truncated)
    return _or_none(answer, probabilities, abstain_below) if options.abstain else answer


def question_answer(context: str, found: Found, options: AnswerOptions, answer_from: float) -> QuestionAnswer:
    """The answer `found` in `context`, if its score is at least `answer_from` and `options.min_score`."""
    given: FoundAnswer | None = None
    if found.start < found.end and found.score >= max(answer_from, options.min_score):
        start = length_in(context[: found.start], options.offsets)
        text = context[found.start : found.end]
        given = {"text": text, "start": start, "end": start + length_in(text, options.offsets)}
    return {"answer": given, "score": round(found.score, SCORE_DECIMALS), "truncated": False}


def number_answer(logits: np.ndarray, *, truncated: bool) -> NumberAnswer:
    """The number of one text, which is its logit; `logits` has shape (1,)."""
    return {"score": float(f"{logits[0]:.{NUMBER_DIGITS}g}"), "truncated": truncated}


def vector_answer(
    vector: np.ndarray, tokens: int, options: AnswerOptions, *, normalised: bool, truncated: bool
) -> VectorAnswer:
    """The vector of one text, of shape (width,), or its first `options.dimensions` numbers.

    A vector that was cut is brought to length 1, and with `normalised` every one: the mean of windows has another length.
    """
    kept = vector[: options.dimensions].astype(np.float64)
    of_length_1 = normalised or options.dimensions is not None
    if of_length_1:
        kept = kept / max(float(np.linalg.norm(kept)), 1e-12)
    if options.encoding_format == "base64":
        return {
            "embedding": base64.b64encode(kept.astype("<f4").tobytes()).decode(),
            "tokens": tokens,
            "truncated": truncated,
        }
    if of_length_1:
        numbers = np.round(kept, VECTOR_DECIMALS).tolist()
    else:
        numbers = [float(f"{number:.{NUMBER_DIGITS}g}") for number in kept.tolist()]
    return {"embedding": numbers, "tokens": tokens, "truncated": truncated}


def _likeliest(probabilities: np.ndarray, labels: list[str], count: int | None, truncated: bool) -> LabelsAnswer:
    likeliest = np.argsort(-probabilities, kind="stable")[:count]
    return {
        "labels": [{"label": labels[i], "score": round(float(probabilities[i]), SCORE_DECIMALS)} for i in likeliest],
        "truncated": truncated,
    }


def _or_none(answer: LabelsAnswer, probabilities: np.ndarray, abstain_below: float | None) -> LabelsAnswer:
    abstained = abstain_below is not None and float(probabilities.max()) < abstain_below
    return {**answer, "labels": [] if abstained else answer["labels"], "abstained": abstained}


def softmax(logits: np.ndarray, dtype: DTypeLike = np.float64) -> np.ndarray:
    """Probabilities over the last axis, computed in `dtype`, same shape as `logits`."""
    exponentials = np.exp(logits.astype(dtype) - logits.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The probability of each of `logits` on its own, float64, same shape."""
    x = logits.astype(np.float64)
    small = np.exp(-np.abs(x))  # never overflows
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small))


def _entities(text: str, spans: list[Span], unit: OffsetUnit) -> list[Entity]:
    # Spans are ordered and do not overlap, so each character is counted once.
    entities: list[Entity] = []
    position = counted = 0
    for span in spans:
        start = counted + length_in(text[position : span.start], unit)
        end = start + length_in(text[span.start : span.end], unit)
        position, counted = span.end, end
        entities.append(
            {
                "label": span.label,
                "text": text[span.start : span.end],
                "start": start,
                "end": end,
                "score": round(span.score, SCORE_DECIMALS),
            }
        )
    return entities


def length_in(text: str, unit: OffsetUnit) -> int:
    """The length of `text` in code points, UTF-16 code units (as JavaScript and Java count) or UTF-8 bytes."""
    if unit == "utf16":
        return len(text.encode("utf-16-le")) // 2
    if unit == "utf8":
        return len(text.encode("utf-8"))
    return len(text)
