"""Text regression: a number for a text or a pair of texts."""

from collections.abc import Iterator, Sequence
from typing import TypedDict

import msgspec
import numpy as np

from serve.bundle.manifest import Manifest
from serve.settings import Limits
from serve.tasks.request_fields import ModelName, Text, TextPair, Truncate, answer_options
from serve.tasks.served_task import Endpoint, ModelFacts, ServedTask, calibrated, kind_faults, logit_faults
from serve.text.inputs import TextWork, text_works
from serve.text.spans import Word
from serve.text.windows import Row

# A number may be of any size; float32 holds about so many of its digits.
NUMBER_DIGITS = 7


class NumberAnswer(TypedDict):
    """The number that a model of `text-regression` gives one text; `truncated` is true if it did not read the whole text."""

    score: float
    truncated: bool


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Give one text or pair of texts a number, or each one of a list."""

    text: Text
    model: ModelName = None
    text_pair: TextPair = None
    truncate: Truncate = False


class ScoreResponse(TypedDict):
    """One answer for each text, in the order of the texts."""

    model: str
    variant: str
    results: list[NumberAnswer]


class TextRegression(ServedTask):
    """A text, or a pair of texts, gets the model's one logit as its number."""

    def manifest_faults(self, manifest: Manifest) -> Iterator[str]:
        yield from logit_faults(self, manifest)
        yield from kind_faults(self, manifest)
        if len(manifest.labels) > 1:
            yield f"{self.name} gives a text one number, and there are {len(manifest.labels)} labels"

    def answer_kind(
        self, labels: Sequence[str], *, multi_label: bool = False, relations: bool = False, pairs: bool = False
    ) -> str:
        return "a number" + (" for text pairs" if pairs else "")

    def answer_sentence(self, manifest: Manifest) -> str:
        return "It gives a text a number."

    def works_of(self, request: ScoreRequest, limits: Limits) -> list[TextWork]:
        return text_works(request.text, request.text_pair, answer_options(request), limits)

    def tensor_values(self, answers: Sequence[bytes]) -> dict[str, list[bytes] | np.ndarray]:
        scores = [msgspec.json.decode(answer, type=_Score).score for answer in answers]
        return {"score": np.asarray(scores, dtype="<f4")}

    def answer(
        self,
        work: TextWork,
        row: Row,
        logits: np.ndarray,
        model: ModelFacts,
        *,
        truncated: bool = False,
        words: Sequence[Word] | None = None,
    ) -> NumberAnswer:
        logits, _ = calibrated(logits, work.options, model)
        return {"score": float(f"{logits[0]:.{NUMBER_DIGITS}g}"), "truncated": truncated}


class _Score(msgspec.Struct):
    score: float


TEXT_REGRESSION = TextRegression(
    name="text-regression",
    per_token=False,
    reads_pairs=True,
    labelled=True,
    manifest_kinds=("pairs",),
    kind="text-regression",
    one_text="",
    no_abstaining="gives a number, which it does for every text; leave it out",
    endpoint=Endpoint(
        "/v1/score",
        "score",
        "Give texts a number",
        (ScoreRequest,),
        ScoreResponse,
        {"text": "A man plays a guitar.", "text_pair": "Someone makes music."},
    ),
    answer_type=NumberAnswer,
    tensors={"score": "FP32"},
)
