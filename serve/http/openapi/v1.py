"""The server's endpoints, described for programs: OpenAPI 3.1, with schemas made from the types that the code uses.

The document is of one server: the names of its models and its limits stand in it. schemathesis holds a running server
against it, see `benchmarks/serve/schemathesis_run.py`.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NotRequired, TypedDict

import msgspec

from serve.bundle.manifest import Manifest
from serve.http.openapi.v2 import V2_ERROR, v2_paths, v2_schemas
from serve.http.v1.relations import RelationItemsRequest, RelationRequest
from serve.http.v1.requests import ClassifyRequest, EntitiesRequest
from serve.model.description import ModelDescription
from serve.observe.request_context import TIMEOUT_HEADER
from serve.settings import Limits
from serve.text.answers import MOST_LABELS, EntitiesAnswer, LabelsAnswer


class EntitiesResponse(TypedDict):
    """One answer per text, in the order of the texts."""

    model: str
    variant: str
    results: list[EntitiesAnswer]


class ClassifyResponse(TypedDict):
    """One answer per text, in the order of the texts."""

    model: str
    variant: str
    results: list[LabelsAnswer]


class ModelsResponse(TypedDict):
    """The models of this server; the first of a task answers requests that name none."""

    models: list[ModelDescription]


class StateResponse(TypedDict):
    """The server's state in a word."""

    status: str


class ErrorDetail(TypedDict):
    """What went wrong: a stable code, a message for a person, and the field of the request where there is one."""

    code: str
    message: str
    field: NotRequired[str]


class ErrorResponse(TypedDict):
    """The body of every answer from 400 up."""

    error: ErrorDetail


Schema = dict[str, Any]

# Of every endpoint, of those that take a body, and of those that a model answers.
ERRORS = {
    "401": "no key, or none that this server knows; only where it has keys",
    "404": "no such path or model",
    "405": "not by this method; Allow says by which",
    "429": "the key asks more than it may; Retry-After says when to come again",
    "431": "more headers than a request needs",
    "500": "a fault of the server",
}
BODY_ERRORS = {
    "400": "the body is not JSON, or its parts are not as the headers say",
    "408": "the body does not come, or too slowly",
    "413": "over one of the server's limits",
    "415": "of another media type, or compressed",
    "422": "a field is missing, unknown or not as needed",
}
MODEL_ERRORS = {
    "429": "the queue is full, or the key asks more than it may; Retry-After says when to come again",
    "503": "no process can compute it now",
    "504": f"no answer in the time allowed: the server's, or the milliseconds that the client gave in {TIMEOUT_HEADER}",
}
HEADERS: dict[str, Schema] = {
    "X-Request-Id": {
        "description": "the request's own X-Request-Id where it is of up to 128 plain characters, else a new one; the log speaks of it",
        "required": True,
        "schema": {"type": "string"},
    },
    "Server-Timing": {
        "description": "milliseconds of the text answered last: queue, tokenise, run and decode; and total, of the request",
        "schema": {"type": "string"},
    },
    "WWW-Authenticate": {"description": "Bearer", "schema": {"type": "string"}},
    "Allow": {"description": "the methods of this path", "schema": {"type": "string"}},
    "Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}},
}
ADDED_HEADER = {"401": "WWW-Authenticate", "405": "Allow", "429": "Retry-After"}
REQUEST_ID: Schema = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "a name for this request, for the log and for its answer",
    "schema": {"type": "string"},
}

# Either, and on a server without keys neither.
SECURITY: list[Schema] = [{}, {"bearer": []}, {"key": []}]
SECURITY_SCHEMES: Schema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}

# What `AnswerOptions` needs beyond types.
OPTION_SCHEMAS: dict[str, Schema] = {
    "min_score": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": 1, "maximum": MOST_LABELS},
}

ENTITIES_EXAMPLE = {"text": ["Ms Keller moved to Graz", "fly to Rome"], "min_score": 0.5, "offsets": "utf16"}
CLASSIFY_EXAMPLE = {"text": "Where is my parcel?", "top_k": 2}
RELATIONS_EXAMPLE = {"text": "Rome is in Italy", "head": {"start": 0, "end": 4}, "tail": {"start": 11, "end": 16}}
# The requests, and which models may be named in each.
FITTING: dict[type[msgspec.Struct], Callable[[Manifest], bool]] = {
    EntitiesRequest: lambda manifest: manifest.task == "token-classification",
    ClassifyRequest: lambda manifest: manifest.task == "text-classification" and not manifest.relations,
    RelationRequest: lambda manifest: manifest.relations,
    RelationItemsRequest: lambda manifest: manifest.relations,
}
REQUESTS = tuple(FITTING)


def openapi(models: Mapping[str, Manifest], limits: Limits) -> dict[str, object]:
    """The OpenAPI document of a server of `models`, by their names and aliases."""
    responses = (EntitiesResponse, ClassifyResponse, ModelsResponse, StateResponse, ErrorResponse)
    references, schemas = msgspec.json.schema_components(
        (*REQUESTS, *responses), ref_template="#/components/schemas/{name}"
    )
    reference = {kind.__name__: found for kind, found in zip((*REQUESTS, *responses), references, strict=True)}
    _limit(schemas, models, limits)
    asked_relations = {"oneOf": [reference["RelationRequest"], reference["RelationItemsRequest"]]}
    labels, state = reference["ClassifyResponse"], _json(reference["StateResponse"])
    paths: dict[str, Schema] = {
        "/v1/entities": _post(
            "Find entities", "entities", reference["EntitiesRequest"], reference["EntitiesResponse"], ENTITIES_EXAMPLE
        ),
        "/v1/classify": _post("Classify texts", "classify", reference["ClassifyRequest"], labels, CLASSIFY_EXAMPLE),
        "/v1/relations": _post(
            "Say what one part of a text is to another", "relations", asked_relations, labels, RELATIONS_EXAMPLE
        ),
        "/v1/models": _get("The models served", "models", _json(reference["ModelsResponse"])),
        "/healthz": _get("The process is up", "healthz", state),
        "/readyz": _get("Every model is warm", "readyz", state, {"503": "still warming up, or no process computes"}),
        "/metrics": _get(
            "Counters in Prometheus's text format", "metrics", {"text/plain": {"schema": {"type": "string"}}}
        ),
        "/openapi.json": _get("This document", "openapi", _json({"type": "object"})),
        "/docs": _get("This document, for a person", "docs", {"text/html": {"schema": {"type": "string"}}}),
        "/": _get("A page to try the models on", "page", {"text/html": {"schema": {"type": "string"}}}),
        **v2_paths(models, {**BODY_ERRORS, **MODEL_ERRORS}),
    }
    for path, methods in paths.items():
        for operation in methods.values():
            _complete(operation, V2_ERROR if path.startswith("/v2") else reference["ErrorResponse"])
    return {
        "openapi": "3.1.0",
        "info": {"title": "stillroom", "version": program_version()},
        "paths": paths,
        "security": SECURITY,
        "components": {
            "schemas": {**schemas, **v2_schemas(OPTION_SCHEMAS)},
            "headers": HEADERS,
            "securitySchemes": SECURITY_SCHEMES,
        },
    }


def _limit(schemas: Mapping[str, Schema], models: Mapping[str, Manifest], limits: Limits) -> None:
    """Adds to the types what the server needs beyond them: limits, and the names of its models."""
    for kind in REQUESTS:
        properties = schemas[kind.__name__]["properties"]
        for name, schema in properties.items():
            schema.update(OPTION_SCHEMAS.get(name, {}))
        if names := [name for name, manifest in models.items() if FITTING[kind](manifest)]:
            properties["model"] = {"enum": [*names, None], "description": properties["model"]["description"]}
        for name in properties.keys() & {"text", "text_pair", "items"}:
            properties[name].update(minItems=1, maxItems=limits.texts, maxLength=limits.text_characters)
            for alternative in properties[name].get("anyOf", []):
                if alternative["type"] == "array":
                    alternative["items"]["maxLength"] = limits.text_characters
    schemas["RelationItem"]["properties"]["text"]["maxLength"] = limits.text_characters


def _post(summary: str, name: str, asked: Schema, answered: Schema, example: object) -> Schema:
    content = {"application/json": {"schema": asked, "example": example}}
    return {
        "post": {
            "summary": summary,
            "operationId": name,
            "requestBody": {"required": True, "content": content},
            "responses": {"200": {"description": "answers", "content": _json(answered)}},
            "x-errors": {**BODY_ERRORS, **MODEL_ERRORS},
        }
    }


def _get(summary: str, name: str, content: Schema, errors: dict[str, str] | None = None) -> Schema:
    responses = {"200": {"description": summary, "content": content}}
    return {"get": {"summary": summary, "operationId": name, "responses": responses, "x-errors": errors or {}}}


def _complete(operation: Schema, error: Schema) -> None:
    """Gives an operation what all have: the request's id, and its errors as answers in the form `error`."""
    operation.setdefault("parameters", []).append(REQUEST_ID)
    for status, meaning in sorted({**ERRORS, **operation.pop("x-errors")}.items()):
        operation["responses"][status] = {"description": meaning, "content": _json(error)}
    for status, response in operation["responses"].items():
        timed = "Server-Timing" if status == "200" and "504" in operation["responses"] else None
        names = ["X-Request-Id", *filter(None, [ADDED_HEADER.get(status), timed])]
        response.setdefault("headers", {}).update({name: {"$ref": f"#/components/headers/{name}"} for name in names})


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def program_version() -> str:
    """The version that is installed."""
    try:
        return version("stillroom")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0"
