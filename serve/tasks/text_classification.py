"""Text classification: one label of a text or of a pair, or any number of labels that apply. `serve.tasks.relations` is its third kind."""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import NotRequired, TypedDict

import msgspec
import numpy as np

from serve.bundle.manifest import Manifest
from serve.settings import Limits
from serve.tasks.request_fields import Abstain, ModelName, Promise, Text, TextPair, TopK, Truncate, answer_options
from serve.tasks.served_task import Datatype, Described, Endpoint, ModelFacts, ReadText, ServedTask
from serve.text.answers import SCORE_DECIMALS, AnswerOptions, sigmoid, softmax
from serve.text.inputs import TextWork, text_works
from serve.text.labels import applies

# `{"label":,"score":0.123456},` in the answer.
BYTES_BESIDE_LABEL = 28


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


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Classify one text, or each text of a list."""

    text: Text
    model: ModelName = None
    text_pair: TextPair = None
    top_k: TopK = None
    truncate: Truncate = False
    abstain: Abstain = False
    promise: Promise = None


class ClassifyResponse(TypedDict):
    """One answer for each text, in the order of the texts."""

    model: str
    variant: str
    results: list[LabelsAnswer]


class TextClassification(ServedTask):
    """A text, or a pair of texts, gets labels with their probabilities."""

    def answer_kind(self, labels: Sequence[str], kinds: Collection[str] = ()) -> str:
        of = ", relations" if "relations" in kinds else ", text pairs" if "pairs" in kinds else ""
        return ("multi-label" if "multi_label" in kinds else "single label") + of

    def does(self, model: Described) -> str:
        return "says which labels apply to a text" if model.multi_label else "gives a text its label"

    def works_of(self, request: ClassifyRequest, limits: Limits) -> list[TextWork]:
        return text_works(request.text, request.text_pair, answer_options(request), limits)

    def answer_bytes(self, manifest: Manifest) -> Callable[[AnswerOptions], int]:
        longest_first = sorted((len(msgspec.json.encode(label)) for label in manifest.labels), reverse=True)
        sums = list(accumulate((size + BYTES_BESIDE_LABEL for size in longest_first), initial=0))
        every = 0 if manifest.multi_label else len(longest_first)  # where any number may apply, mostly few do
        return lambda options: sums[min(options.top_k or every, len(longest_first))]

    def tensor_values(self, answers: Sequence[bytes]) -> dict[str, list[bytes] | np.ndarray]:
        likeliest = [msgspec.json.decode(answer, type=_Labels).labels[:1] for answer in answers]
        return {
            "label": [top[0]["label"].encode("utf-8") if top else b"" for top in likeliest],
            "score": np.asarray([top[0]["score"] if top else 0.0 for top in likeliest], dtype="<f4"),
        }

    def answer(self, read: ReadText, logits: np.ndarray, model: ModelFacts) -> LabelsAnswer:
        """The likeliest `top_k` labels; equal scores keep the order of the model's labels. Without `top_k`, all of them, or those
        that apply if any number may.

        With `abstain` or `promise` there are none if the highest probability is below the threshold.
        """
        logits, options = model.calibrated(logits), read.work.options
        probabilities, count = sigmoid(logits) if model.multi_label else softmax(logits), options.top_k
        if count is None and model.multi_label:
            count = int(applies(logits).sum())
        likeliest = np.argsort(-probabilities, kind="stable")[:count]
        answer: LabelsAnswer = {
            "labels": [
                {"label": model.labels[i], "score": round(float(probabilities[i]), SCORE_DECIMALS)} for i in likeliest
            ],
            "truncated": read.truncated,
        }
        if options.abstain or options.promise is not None:
            below = model.abstain_below if options.promise is None else model.promises[options.promise]
            answer["abstained"] = below is not None and float(probabilities.max()) < below
            if answer["abstained"]:
                answer["labels"] = []
        return answer


class _Labels(msgspec.Struct):
    labels: list[LabelScore]


LABEL_TENSORS: dict[str, Datatype] = {"label": "BYTES", "score": "FP32"}

TEXT_CLASSIFICATION = TextClassification(
    name="text-classification",
    reads_pairs=True,
    manifest_kinds=("multi_label", "relations", "pairs"),
    kind="text-classification",
    smaller_by="top_k",
    endpoint=Endpoint(
        "/v1/classify",
        "classify",
        "Classify texts",
        (ClassifyRequest,),
        ClassifyResponse,
        {"text": "Where is my parcel?", "top_k": 2},
    ),
    answer_type=LabelsAnswer,
    tensors=LABEL_TENSORS,
)
