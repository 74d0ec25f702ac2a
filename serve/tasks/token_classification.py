"""Token classification: entities of a text, with offsets in the caller's unit."""

from collections.abc import Collection, Sequence
from typing import Annotated, TypedDict

import msgspec
import numpy as np
from msgspec import Meta

from serve.settings import Limits
from serve.tasks.request_fields import ModelName, Offsets, Promise, Text, Truncate, answer_options
from serve.tasks.served_task import IN_WINDOWS, Described, Endpoint, ModelFacts, ReadText, ServedTask
from serve.text.answers import SCORE_DECIMALS, OffsetUnit, confidence, length_in, softmax
from serve.text.inputs import TextWork, text_works
from serve.text.labels import entity_labels, schemes
from serve.text.spans import Aggregation, Span, Word, decode_spans, words
from serve.text.windows import Row


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


class EntitiesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Find the entities in one text, or in each text of a list."""

    text: Text
    model: ModelName = None
    min_score: Annotated[
        float | None, Meta(description="a number from 0 (default) to 1; entities with a lower score are left out")
    ] = 0.0
    offsets: Offsets = "codepoints"
    aggregation: Annotated[
        Aggregation | None,
        Meta(
            description='"first" (default: a word gets the tag of its first token), "average" or "max" (of all its tokens), or '
            '"strict" (as "first", without incomplete entities)'
        ),
    ] = "first"
    constrained: Annotated[
        bool | None,
        Meta(description="true or false (default): true finds the likeliest tags that form a valid sequence"),
    ] = False
    truncate: Truncate = False
    promise: Promise = None


class EntitiesResponse(TypedDict):
    """One answer for each text, in the order of the texts."""

    model: str
    variant: str
    results: list[EntitiesAnswer]


class TokenClassification(ServedTask):
    """Each token gets a tag; tags of words become entities."""

    def answer_kind(self, labels: Sequence[str], kinds: Collection[str] = ()) -> str:
        return f"entities, {' and '.join(sorted(set(schemes(tuple(labels)).values())))}"

    def does(self, model: Described) -> str:
        return "finds entities in text"

    def label_names(self, labels: Sequence[str]) -> Sequence[str]:
        return entity_labels(labels)

    def works_of(self, request: EntitiesRequest, limits: Limits) -> list[TextWork]:
        return text_works(request.text, None, answer_options(request), limits)

    def words(self, text: str, row: Row) -> Sequence[Word]:
        return words(text, row.offsets, row.word_ids)

    def confidence(self, read: ReadText, logits: np.ndarray, model: ModelFacts) -> float | None:
        if not read.words:
            return None
        return confidence(model.calibrated(logits[[word.first_token for word in read.words]]))

    def answer(self, read: ReadText, logits: np.ndarray, model: ModelFacts) -> EntitiesAnswer:
        logits, options = model.calibrated(logits), read.work.options
        spans = decode_spans(
            read.words, softmax(logits), model.labels, aggregation=options.aggregation, constrained=options.constrained
        )
        least = options.min_score if options.promise is None else model.promises[options.promise]
        kept = [span for span in spans if span.score >= least]
        return {"entities": _entities(read.work.text, kept, options.offsets), "truncated": read.truncated}

    def answer_unwindowed(self, read: ReadText, logits: np.ndarray, model: ModelFacts) -> EntitiesAnswer:
        # OpenVINO's rows are padded to multiples of the vector width.
        return self.answer(read, logits[: len(read.row)], model)


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


TOKEN_CLASSIFICATION = TokenClassification(
    name="token-classification",
    per_token=True,
    kind="token-classification",
    one_text="finds entities in",
    longer_texts=IN_WINDOWS,
    no_abstaining="finds entities; use min_score instead",
    endpoint=Endpoint(
        "/v1/entities",
        "entities",
        "Find entities",
        (EntitiesRequest,),
        EntitiesResponse,
        {"text": ["Ms Keller moved to Graz", "fly to Rome"], "min_score": 0.5, "offsets": "utf16"},
    ),
    answer_type=EntitiesAnswer,
)
