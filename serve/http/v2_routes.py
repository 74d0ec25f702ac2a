"""`/v2`: the Open Inference Protocol (KServe v2) over HTTP.

A model takes texts, and answers with JSON in a BYTES tensor; or token ids, and answers with logits. `serve.http.v2_tensors` reads
and writes the tensors. `serve.http.middleware` gives errors the protocol's form: `{"error": message}`.
"""

from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from serve.bundle.manifest import Manifest
from serve.errors import BadInput, NotFound, TooLarge, Unavailable, UnsupportedMedia
from serve.http.middleware import JsonResponse
from serve.http.openapi import program_version
from serve.http.request_bodies import decode_json, read_body
from serve.http.service import Service
from serve.http.v2_tensors import IGNORED, Datatype, InferRequest, OutputTensor, Tensor, read_tensors, written
from serve.settings import Limits
from serve.tasks import task_of
from serve.tasks.served_task import ServedTask
from serve.text.answers import AnswerOptions, Logits
from serve.text.inputs import TextWork, TokenWork, Work, check_limits, second_texts
from serve.workers.model_threads import WorkOutput
from serve.workers.served_model import ServedModel

JSON_LENGTH = "Inference-Header-Content-Length"
MEDIA = ("application/json", "application/octet-stream")

INPUTS: dict[str, Datatype] = {
    "text": "BYTES",
    "text_pair": "BYTES",
    "input_ids": "INT64",
    "attention_mask": "INT64",
    "token_type_ids": "INT64",
}
TEXT_INPUTS = ("text", "text_pair")


async def _server(service: Service, request: Request) -> Response:
    return JsonResponse({"name": "stillroom", "version": program_version(), "extensions": ["binary_tensor_data"]})


async def _live(service: Service, request: Request) -> Response:
    return JsonResponse({"live": True})


async def _ready(service: Service, request: Request) -> Response:
    if reason := service.unready():
        raise reason
    return JsonResponse({"ready": True})


async def _model(service: Service, request: Request) -> Response:
    return JsonResponse(metadata(_asked_for(service, request)))


async def _model_ready(service: Service, request: Request) -> Response:
    model = _asked_for(service, request)
    if not model.ready:
        raise Unavailable(f"model {model.manifest.name!r} is not ready; ask again in a second")
    return JsonResponse({"name": model.manifest.name, "ready": True})


def metadata(model: ServedModel) -> dict[str, object]:
    """The inputs and outputs of a model. Its only version is the digest of its bundle, so that a client can ask for exactly this one.

    A request has texts or token ids, never both. A size of -1 means any size.
    """
    manifest, task = model.manifest, model.task
    width = manifest.outputs
    texts = TEXT_INPUTS if task.reads_pairs else TEXT_INPUTS[:1]
    return {
        "name": manifest.name,
        "versions": [manifest.digest],
        "platform": f"{manifest.variants[model.variant].runtime}_onnx",
        "inputs": [
            *({"name": name, "datatype": INPUTS[name], "shape": [-1]} for name in texts),
            *(
                {"name": name, "datatype": INPUTS[name], "shape": [-1, -1]}
                for name in INPUTS
                if name in manifest.inputs
            ),
        ],
        "outputs": [
            {"name": "answer", "datatype": "BYTES", "shape": [-1]},
            *(
                {"name": name, "datatype": kind, "shape": [-1, width] if name == "embedding" else [-1]}
                for name, kind in task.tensors.items()
            ),
            {"name": "logits", "datatype": "FP32", "shape": [-1, -1, width] if task.per_token else [-1, width]},
        ],
    }


async def _infer(service: Service, request: Request) -> Response:
    content_type = request.headers.get("content-type", "")
    # tritonclient sends no content type. A web page of any origin may do so too, unasked (Fetch, CORS-safelisted); its browser says Origin.
    missing = not content_type and "origin" not in request.headers and "sec-fetch-site" not in request.headers
    if not missing and content_type.partition(";")[0].strip().lower() not in MEDIA:
        raise UnsupportedMedia(f"the content type is {content_type or 'missing'}; send {' or '.join(MEDIA)}")
    _asked_for(service, request)
    body = await read_body(request, service.limits.body_bytes)
    model = _asked_for(service, request)  # again, since it may have been reloaded while the body arrived
    asked, tensors = read_tensors(body, request.headers.get(JSON_LENGTH), INPUTS)
    if asked.model_name is not None and service.named(asked.model_name) is not model:
        raise BadInput(
            f"model_name is {asked.model_name!r}, and the path has {model.manifest.name!r}; name one model",
            field="model_name",
        )
    all_as_bytes, options = parameters_of(asked, model)
    works = works_of(tensors, options, model.manifest, service.limits)
    names = ["answer", *model.task.tensors] if "text" in tensors else ["logits"]
    wanted = wanted_outputs(asked, names, all_as_bytes)
    answers = await service.answers(request, model, works, binary_logits=wanted.get("logits", False))
    made = outputs_of(answers, list(wanted), model.task)
    content: dict[str, object] = {
        "model_name": model.manifest.name,
        "model_version": model.manifest.digest,
        "parameters": {"variant": model.variant},
    }
    if asked.id is not None:
        content["id"] = asked.id
    answer, json_bytes = written(content, [(each, wanted[each.name]) for each in made])
    if json_bytes is None:
        return Response(answer, media_type=MEDIA[0])
    return Response(answer, headers={JSON_LENGTH: str(json_bytes)}, media_type=MEDIA[1])


def _asked_for(service: Service, request: Request) -> ServedModel:
    """The model in the request's path. NotFound if there is no such model, or it has another version."""
    name, version = request.path_params["name"], request.path_params.get("version")
    model = service.named(name)
    if version not in {None, model.manifest.digest}:
        raise NotFound(f"there is no version {version!r} of {name!r}; its only version is {model.manifest.digest}")
    return model


def parameters_of(asked: InferRequest, model: ServedModel) -> tuple[bool, AnswerOptions]:
    """Whether outputs are wanted as bytes, and the options of answers. BadInput for an unknown parameter or a wrong value."""
    given = {
        name: value for name, value in (asked.parameters or {}).items() if value is not None and name not in IGNORED
    }
    as_bytes = given.pop("binary_data_output", False)
    if not isinstance(as_bytes, bool):
        raise BadInput("parameters.binary_data_output: give true or false", field="parameters.binary_data_output")
    known = model.task.tensor_options
    if unknown := sorted(given.keys() - set(known)):
        raise BadInput(
            f"{model.manifest.name!r} has no parameter {unknown[0]!r}; the parameters are {', '.join(['binary_data_output', *known])}",
            field=f"parameters.{unknown[0]}",
        )
    try:
        return as_bytes, decode_json(msgspec.json.encode(given), AnswerOptions)
    except msgspec.ValidationError as error:
        raise BadInput(f"parameters: {error}", field="parameters") from error


def works_of(tensors: dict[str, Tensor], options: AnswerOptions, manifest: Manifest, limits: Limits) -> list[Work]:
    """A work item for each text, or for each row of token ids. BadInput if the tensors do not belong together."""
    if ("text" in tensors) == ("input_ids" in tensors):
        raise BadInput("inputs: send either text or input_ids", field="inputs")
    of_texts = "text" in tensors
    if strangers := [name for name in tensors if (name in TEXT_INPUTS) != of_texts]:
        raise BadInput(
            f"inputs: {strangers[0]} cannot be sent together with {'text' if of_texts else 'input_ids'}; leave one out",
            field="inputs",
        )
    if not of_texts:
        return _token_works(tensors, manifest, limits)
    columns: list[list[str]] = []
    for name, tensor in tensors.items():
        if len(tensor.shape) > 2 or tensor.shape[1:] not in {(), (1,)}:
            raise BadInput(f"{name} has the shape {list(tensor.shape)}; it must be [n] or [n, 1]", field="inputs")
        columns.append([str(value) for value in tensor.values])
        check_limits(columns[-1], name, limits)
    if len({len(column) for column in columns}) > 1:
        raise BadInput("text_pair: give as many texts as in text", field="inputs")
    by_name = dict(zip(tensors, columns, strict=True))
    texts = by_name["text"]
    pairs = second_texts(by_name.get("text_pair"), len(texts), contexts=task_of(manifest).needs_pair)
    return [TextWork(text, pair, options) for text, pair in zip(texts, pairs, strict=True)]


def _token_works(tensors: dict[str, Tensor], manifest: Manifest, limits: Limits) -> list[Work]:
    shape = tensors["input_ids"].shape
    if len(shape) != 2:
        raise BadInput(f"input_ids has the shape {list(shape)}; it must be [rows, tokens]", field="inputs")
    count, tokens = shape
    if tokens > manifest.max_length:
        raise TooLarge(
            f"input_ids has rows of {tokens:,} tokens; {manifest.name!r} reads at most {manifest.max_length:,}: cut the rows"
        )
    if count > limits.texts:
        raise TooLarge(f"input_ids has {count:,} rows; this server takes {limits.texts:,} at once")
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise BadInput(
                f"{name} has the shape {list(tensor.shape)}; it must have the shape of input_ids, {list(shape)}",
                field="inputs",
            )
        if name not in manifest.inputs:
            raise BadInput(
                f"{name} is not an input of {manifest.name!r}, which takes {', '.join(manifest.inputs)}; leave it out",
                field="inputs",
            )
    defaults = {"attention_mask": 1, "token_type_ids": 0}
    columns = {
        name: tensors[name].values if name in tensors else [value] * (count * tokens)
        for name, value in defaults.items()
    }
    for name, values in columns.items():
        if not set(values) <= {0, 1}:
            raise BadInput(f"{name} has numbers other than 0 and 1; send only 0 and 1", field="inputs")
    works = [
        TokenWork(tensors["input_ids"].values[row], columns["attention_mask"][row], columns["token_type_ids"][row])  # type: ignore[arg-type]
        for row in (slice(start, start + tokens) for start in range(0, count * tokens, tokens))
    ]
    unseen = next((index for index, work in enumerate(works) if 1 not in work.attention_mask), None)
    if unseen is not None:
        raise BadInput(f"attention_mask has only 0 in row {unseen}; send at least one 1 in each row", field="inputs")
    return list(works)


def wanted_outputs(asked: InferRequest, names: list[str], all_as_bytes: bool) -> dict[str, bool]:
    """The outputs that a request asks for, and whether each is wanted as bytes. Without a list, all of `names`."""
    if not asked.outputs:
        return dict.fromkeys(names, all_as_bytes)
    wanted: dict[str, bool] = {}
    for index, each in enumerate(asked.outputs):
        field = f"outputs[{index}].name"
        if each.name not in names:
            raise BadInput(
                f"outputs[{index}] is {each.name!r}; the outputs for these inputs are {', '.join(map(repr, names))}",
                field=field,
            )
        if each.name in wanted:
            raise BadInput(f"outputs[{index}] is a second {each.name!r}; ask for each once", field=field)
        own = each.parameters.binary_data if each.parameters else None
        wanted[each.name] = all_as_bytes if own is None else own
    return wanted


def outputs_of(answers: list[WorkOutput], names: list[str], task: ServedTask) -> list[OutputTensor]:
    """The outputs `names`, made of the model's answers. If no label applies to a text, its `label` is empty and its `score` is 0."""
    logits = [answer for answer in answers if isinstance(answer, Logits)]
    if logits:  # all rows have the same length, so all logits have the same shape
        shape = [len(logits), *logits[0].shape]
        return [OutputTensor("logits", "FP32", shape, b"".join(each.data for each in logits))]
    texts = [answer for answer in answers if isinstance(answer, bytes)]
    values: dict[str, list[bytes] | np.ndarray] = {"answer": texts}
    if names != ["answer"]:
        values |= task.tensor_values(texts)
    return [
        OutputTensor(name, "BYTES", [len(column)], column)
        if isinstance(column := values[name], list)
        else OutputTensor(name, "FP32", list(column.shape), column.tobytes())
        for name in names
    ]


_MODEL = "/v2/models/{name}"
# The endpoints under `/v2`: path, handler and method.
V2: list[tuple[str, Callable[[Service, Request], Awaitable[Response]], str]] = [
    ("/v2", _server, "GET"),
    ("/v2/health/live", _live, "GET"),
    ("/v2/health/ready", _ready, "GET"),
    *(
        (f"{_MODEL}{of_version}{end}", handler, method)
        for of_version in ("", "/versions/{version}")
        for end, handler, method in (("", _model, "GET"), ("/ready", _model_ready, "GET"), ("/infer", _infer, "POST"))
    ),
]
