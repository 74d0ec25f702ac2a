"""Text regression: a number for a text or a pair of texts."""

from collections.abc import Collection, Iterator, Sequence
from typing import TypedDict

import msgspec
import numpy as np

from serve.bundle.manifest import Manifest
from serve.settings import Limits
from serve.tasks.request_fields import ModelName, Text, TextPair, Truncate, answer_options
from serve.tasks.served_task import Described, Endpoint, ModelFacts, ReadText, ServedTask, scores_in
from serve.text.answers import NUMBER_DIGITS
from serve.text.inputs import TextWork, text_works


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
        yield from super().manifest_faults(manifest)
        if len(manifest.labels) > 1:
            yield f"{self.name} gives a text one number, and there are {len(manifest.labels)} labels"

    def answer_kind(self, labels: Sequence[str], kinds: Collection[str] = ()) -> str:
        return "a number" + (" for text pairs" if "pairs" in kinds else "")

    def does(self, model: Described) -> str:
        return f"gives a {'pair of texts' if model.pairs else 'text'} a number"

    def works_of(self, request: ScoreRequest, limits: Limits) -> list[TextWork]:
        return text_works(request.text, request.text_pair, answer_options(request), limits)

    def tensor_values(self, answers: Sequence[bytes]) -> dict[str, list[bytes] | np.ndarray]:
        return {"score": scores_in(answers)}

    def answer(self, read: ReadText, logits: np.ndarray, model: ModelFacts) -> NumberAnswer:
        logits = model.calibrated(logits)
        return {"score": float(f"{logits[0]:.{NUMBER_DIGITS}g}"), "truncated": read.truncated}


TEXT_REGRESSION = TextRegression(
    name="text-regression",
    reads_pairs=True,
    manifest_kinds=("pairs",),
    kind="text-regression",
    names_labels=False,
    hub_task="text-classification",
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
