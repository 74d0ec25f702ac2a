"""The forms of text-embeddings-inference (TEI), which LangChain, LlamaIndex, Haystack and LiteLLM speak.

https://huggingface.github.io/text-embeddings-inference/
"""

from collections.abc import Sequence
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import numpy as np
from msgspec import Meta

from serve.errors import BadInput, TooLarge
from serve.http.forms.form import Form
from serve.settings import Limits
from serve.tasks.feature_extraction import FEATURE_EXTRACTION
from serve.tasks.request_fields import Direction, Text, Truncate
from serve.tasks.served_task import Endpoint
from serve.tasks.text_classification import TEXT_CLASSIFICATION, LabelScore
from serve.tasks.text_regression import TEXT_REGRESSION
from serve.text.answers import AnswerOptions, sigmoid
from serve.text.inputs import TextWork, text_works
from serve.workers.served_model import ServedModel


class TeiRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of every request."""

    truncate: Truncate = False
    truncation_direction: Direction = None


class EmbedRequest(TeiRequest, forbid_unknown_fields=True, kw_only=True):
    """Give one text, or each text of a list, its vector."""

    inputs: Text
    normalize: Annotated[bool | None, Meta(description="true (default) or false: true gives vectors the length 1")] = (
        True
    )
    dimensions: Annotated[
        int | None, Meta(description="a whole number from 1, how many numbers to keep; default: all")
    ] = None


class PredictRequest(TeiRequest, forbid_unknown_fields=True, kw_only=True):
    """Classify one text or pair of texts, or each one of a list of lists."""

    inputs: Annotated[
        str | list[str | list[str]],
        Meta(
            description="a string; a list of two strings, a pair; or a list of lists of a string or two, one for each text"
        ),
    ]
    raw_scores: Annotated[bool | None, Meta(description="false; /v2 gives logits")] = False


class RerankRequest(TeiRequest, forbid_unknown_fields=True, kw_only=True):
    """Order texts by how well they go with a query, the best first."""

    query: Annotated[str, Meta(description="a string, the first text of each pair")]
    texts: Annotated[list[str], Meta(description="a list of strings")]
    raw_scores: Annotated[
        bool | None,
        Meta(
            description="true or false (default): true gives the model's numbers, false their logistic function, from 0 to 1"
        ),
    ] = False
    top_n: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="a whole number from 1, how many texts to give; default: all"),
    ] = None
    return_text: Annotated[bool | None, Meta(description="true or false (default): true repeats each text")] = False


class Rank(TypedDict):
    """The text with this place in `texts`."""

    index: int
    score: float
    text: NotRequired[str]


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw


def _embed_works(asked: EmbedRequest, model: ServedModel, limits: Limits) -> list[TextWork]:
    # A vector that is cut, also to all its numbers, gets the length 1.
    dimensions = asked.dimensions or (model.manifest.vector_width if asked.normalize is not False else None)
    options = AnswerOptions(dimensions=dimensions, truncate=bool(asked.truncate))
    return text_works(asked.inputs, None, options, limits, field="inputs")


def _embed_response(asked: EmbedRequest, model: ServedModel, answers: Sequence[bytes]) -> object:
    return [msgspec.json.decode(answer, type=_Vector).embedding for answer in answers]


def _is_batch(inputs: str | list[str | list[str]]) -> bool:
    return isinstance(inputs, list) and not all(isinstance(each, str) for each in inputs)


def _predict_works(asked: PredictRequest, model: ServedModel, limits: Limits) -> list[TextWork]:
    if asked.raw_scores:
        raise BadInput("raw_scores is true; leave it out: /v2 gives logits", field="raw_scores")
    items: list[Any] = list(asked.inputs) if _is_batch(asked.inputs) else [asked.inputs]
    items = [[item] if isinstance(item, str) else item for item in items]
    if wrong := next((item for item in items if len(item) not in {1, 2}), None):
        raise BadInput(
            f"inputs has a list of {len(wrong)} strings, and a text is one string or a pair of two; give several texts as a list of "
            "lists",
            field="inputs",
        )
    if not all(items):
        raise BadInput("inputs has an empty list; give each text as a list of one string or two", field="inputs")
    options = AnswerOptions(top_k=len(model.manifest.labels), truncate=bool(asked.truncate))
    pairs = [item[1] if len(item) == 2 else "" for item in items]
    return text_works([item[0] for item in items], pairs if any(pairs) else None, options, limits, field="inputs")


def _predict_response(asked: PredictRequest, model: ServedModel, answers: Sequence[bytes]) -> object:
    labels = [msgspec.json.decode(answer)["labels"] for answer in answers]
    return labels if _is_batch(asked.inputs) else labels[0]


def _rerank_works(asked: RerankRequest, model: ServedModel, limits: Limits) -> list[TextWork]:
    if len(asked.query) * len(asked.texts) > max(limits.body_bytes, len(asked.query)):
        raise TooLarge(
            f"query has {len(asked.query):,} characters for each of {len(asked.texts):,} texts; this server takes "
            f"{limits.body_bytes:,} in all: send fewer texts at once",
            field="query",
        )
    # A pair that is too long is always cut.
    return text_works([asked.query] * len(asked.texts), asked.texts, AnswerOptions(), limits, field="texts")


def _rerank_response(asked: RerankRequest, model: ServedModel, answers: Sequence[bytes]) -> object:
    numbers = np.asarray([msgspec.json.decode(answer)["score"] for answer in answers])
    scores = numbers if asked.raw_scores else sigmoid(numbers)
    order = np.argsort(-numbers, kind="stable").tolist()[: asked.top_n]
    ranks: list[Rank] = [{"index": index, "score": float(scores[index])} for index in order]
    if asked.return_text:
        for rank in ranks:
            rank["text"] = asked.texts[rank["index"]]
    return ranks


FORMS = (
    Form(
        Endpoint(
            "/embed",
            "embed",
            "Give texts their vectors, in TEI's form",
            (EmbedRequest,),
            list[list[float]],
            {"inputs": ["A man plays a guitar.", "Someone makes music."]},
        ),
        (FEATURE_EXTRACTION,),
        _embed_works,
        _embed_response,
    ),
    Form(
        Endpoint(
            "/predict",
            "predict",
            "Classify texts, in TEI's form",
            (PredictRequest,),
            list[LabelScore | list[LabelScore]],
            {"inputs": [["Where is my parcel?"], ["I paid twice"]]},
        ),
        (TEXT_CLASSIFICATION,),
        _predict_works,
        _predict_response,
    ),
    Form(
        Endpoint(
            "/rerank",
            "rerank",
            "Order texts by a model of numbers of pairs, in TEI's form",
            (RerankRequest,),
            list[Rank],
            {"query": "Who plays music?", "texts": ["A man plays a guitar.", "A dog sleeps."]},
        ),
        (TEXT_REGRESSION,),
        _rerank_works,
        _rerank_response,
    ),
)


TASKS = tuple(task for form in FORMS for task in form.tasks)


def info(model: ServedModel, limits: Limits) -> dict[str, object]:
    """What `GET /info` says of the first model of one of `TASKS`, and of the server's limits."""
    manifest = model.manifest
    kind: dict[str, object] = {"embedding": {}}
    if model.task is not FEATURE_EXTRACTION:
        labels = {str(index): label for index, label in enumerate(manifest.labels)}
        by_label = {label: index for index, label in enumerate(manifest.labels)}
        name = "reranker" if model.task is TEXT_REGRESSION else "classifier"
        kind = {name: {"id2label": labels, "label2id": by_label}}
    return {
        "model_id": manifest.name,
        "model_sha": manifest.digest,
        "model_dtype": model.variant,
        "model_type": kind,
        "max_concurrent_requests": limits.queued_texts,
        "max_input_length": manifest.max_length,
        "max_batch_tokens": limits.batch_tokens,
        "max_client_batch_size": limits.texts,
        "auto_truncate": False,
    }
