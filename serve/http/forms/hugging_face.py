"""Hugging Face's inference form, which `InferenceClient` of huggingface_hub speaks: `{"inputs": ...}` to a model's address.

https://huggingface.co/docs/inference-providers/tasks/index
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from serve.errors import BadInput
from serve.http.forms.form import Form
from serve.settings import Limits
from serve.tasks import SERVED_TASKS
from serve.tasks.feature_extraction import FEATURE_EXTRACTION
from serve.tasks.question_answering import QUESTION_ANSWERING
from serve.tasks.relations import RELATIONS
from serve.tasks.request_fields import Direction, Truncate
from serve.tasks.served_task import Endpoint
from serve.tasks.text_regression import TEXT_REGRESSION
from serve.tasks.token_classification import TOKEN_CLASSIFICATION
from serve.text.answers import AnswerOptions
from serve.text.inputs import TextWork, as_texts, check_limits
from serve.workers.served_model import ServedModel


class Parameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a task."""

    top_k: int | None = None
    aggregation_strategy: Literal["simple", "first", "average", "max"] | None = None
    truncation: bool | None = None


class InferenceRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Ask a model of any task but relations. The fields beside the first three are those of vectors."""

    inputs: Annotated[
        str | dict[str, str | list[str]] | list[str | dict[str, str | list[str]]],
        Meta(
            description='a string, for models of two texts {"text", "text_pair"} or {"question", "context"}, or a list of these; '
            'for similarities {"source_sentence", "sentences"}'
        ),
    ]
    parameters: Annotated[
        Parameters | None, Meta(description="an object that may have top_k, aggregation_strategy and truncation")
    ] = None
    options: Annotated[dict[str, Any] | None, Meta(description="an object, which is not used")] = None
    normalize: Annotated[bool | None, Meta(description="true or false (default): true gives vectors the length 1")] = (
        False
    )
    dimensions: Annotated[
        int | None, Meta(description="a whole number from 1, how many numbers of a vector to keep")
    ] = None
    truncate: Truncate = None
    truncation_direction: Direction = None


SIMILARITY = {"source_sentence", "sentences"}
TASKS = tuple(task for task in SERVED_TASKS if task is not RELATIONS)


def works_of(asked: InferenceRequest, model: ServedModel, limits: Limits) -> list[TextWork]:
    """The texts of a request; of similarities the source is the first."""
    options, inputs = options_of(asked, model), asked.inputs
    if model.task is FEATURE_EXTRACTION and isinstance(inputs, dict) and inputs.keys() == SIMILARITY:
        source, sentences = inputs["source_sentence"], as_texts(inputs["sentences"], "inputs")
        if not isinstance(source, str):
            raise BadInput("inputs: source_sentence is a list; give a string", field="inputs")
        check_limits([source], "inputs", limits)
        check_limits(sentences, "inputs", limits)
        return [TextWork(text, None, options) for text in [source, *sentences]]
    items = inputs if isinstance(inputs, list) else [inputs]
    names = model.task.text_fields
    texts: list[str] = []
    pairs: list[str | None] = []
    for item in items:
        two = item if isinstance(item, dict) else {names[0]: item, names[1]: None}
        text, pair = two.get(names[0]), two.get(names[1])
        if two.keys() != set(names) or not isinstance(text, str) or isinstance(pair, list):
            raise BadInput(
                f"inputs: {model.manifest.name!r} is for {model.task.kind}; give a string or an object of two strings, {names[0]} and "
                f"{names[1]}, or post to {model.task.endpoint.path}",
                field="inputs",
            )
        texts.append(text)
        pairs.append(pair)
    check_limits(as_texts(texts, "inputs"), "inputs", limits)
    check_limits([pair for pair in pairs if pair is not None], "inputs", limits)
    return [TextWork(text, pair, options) for text, pair in zip(texts, pairs, strict=True)]


def options_of(asked: InferenceRequest, model: ServedModel) -> AnswerOptions:
    """The options of a request. BadInput for one that the model's task has not."""
    parameters = asked.parameters or Parameters()
    strategy = parameters.aggregation_strategy
    # Where the field of the request, the option's name and its value differ.
    given: dict[str, tuple[str, Any]] = {
        "parameters.top_k": ("top_k", parameters.top_k),
        "parameters.aggregation_strategy": ("aggregation", "first" if strategy == "simple" else strategy),
        "parameters.truncation": ("truncate", parameters.truncation),
        "truncate": ("truncate", asked.truncate),
        "normalize": ("dimensions", model.manifest.vector_width if asked.normalize else None),
        "dimensions": ("dimensions", asked.dimensions),
    }
    options: dict[str, Any] = {}
    for field, (name, value) in given.items():
        if value is None:
            continue
        if name not in model.task.option_names and not (name == "truncate" and value is False):
            raise BadInput(
                f"{field}: {model.manifest.name!r} is for {model.task.kind}, which has no such option; leave it out, or see "
                f"{model.task.endpoint.path}",
                field=field,
            )
        options[name] = value
    return AnswerOptions(**options)


def response(asked: InferenceRequest, model: ServedModel, answers: Sequence[bytes]) -> object:
    """An element for each text of a list; of one text, that element, but a list of it where a text has a list of labels."""
    decoded = [msgspec.json.decode(answer) for answer in answers]
    if isinstance(asked.inputs, dict) and asked.inputs.keys() == SIMILARITY:
        vectors = np.asarray([answer["embedding"] for answer in decoded])
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return (vectors[1:] @ vectors[0]).tolist()
    shown = [_element(model, answer) for answer in decoded]
    nested = isinstance(asked.inputs, list) or "labels" in decoded[0] or model.task is TEXT_REGRESSION
    return shown if nested else shown[0]


def _element(model: ServedModel, answer: dict[str, Any]) -> object:
    if model.task is TOKEN_CLASSIFICATION:
        return [
            {
                "entity_group": each["label"],
                "score": each["score"],
                "word": each["text"],
                "start": each["start"],
                "end": each["end"],
            }
            for each in answer["entities"]
        ]
    if model.task is FEATURE_EXTRACTION:
        return answer["embedding"]
    if model.task is QUESTION_ANSWERING:
        part = answer["answer"] or {"text": "", "start": 0, "end": 0}
        return {"answer": part["text"], "score": answer["score"], "start": part["start"], "end": part["end"]}
    if model.task is TEXT_REGRESSION:
        return [{"label": model.manifest.labels[0], "score": answer["score"]}]
    return answer["labels"]


FORMS = tuple(
    Form(
        Endpoint(
            path,
            operation,
            summary,
            (InferenceRequest,),
            list[float | dict[str, Any] | list[float | dict[str, Any]]] | dict[str, Any],
            {"inputs": ["fly to Rome", "Ms Keller moved to Graz"]},
        ),
        TASKS,
        works_of,
        response,
    )
    for path, operation, summary in (
        ("/", "infer_first", "Ask the first model in Hugging Face's form"),
        ("/models/{name}", "infer", "Ask a model in Hugging Face's form"),
    )
)
