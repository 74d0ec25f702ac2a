"""The server's endpoints, described for programs: OpenAPI 3.1, with schemas made from the types that the code uses."""

from importlib.metadata import PackageNotFoundError, version
from typing import TypedDict

import msgspec

from serve.answers import EntitiesAnswer, LabelsAnswer
from serve.requests import ClassifyRequest, EntitiesRequest


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


class ModelDescription(TypedDict):
    """One model of this server."""

    name: str
    task: str
    labels: list[str]
    multi_label: bool
    relations: bool
    max_length: int
    variant: str
    variants: list[str]
    digest: str


class ModelsResponse(TypedDict):
    """The models of this server; the first of a task answers requests that name none."""

    models: list[ModelDescription]


class ErrorDetail(TypedDict, total=False):
    """What went wrong: a stable code, a message for a person, and the field of the request where there is one."""

    code: str
    message: str
    field: str


class ErrorResponse(TypedDict):
    """The body of every answer from 400 up."""

    error: ErrorDetail


ERRORS = {
    "400": "the body is not JSON",
    "404": "no such model",
    "413": "over one of the server's limits",
    "415": "not application/json",
    "422": "a field is missing, unknown or not as needed",
    "429": "the queue is full; Retry-After says when to come again",
    "500": "a fault of the server",
    "504": "no answer in the time allowed",
}


def openapi() -> dict[str, object]:
    """The OpenAPI document of this version."""
    types = (EntitiesRequest, ClassifyRequest, EntitiesResponse, ClassifyResponse, ModelsResponse, ErrorResponse)
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    entities, classify, entities_response, classify_response, models, error = references
    return {
        "openapi": "3.1.0",
        "info": {"title": "stillroom", "version": _version()},
        "paths": {
            "/v1/entities": {"post": _post("Find entities", "entities", entities, entities_response, error)},
            "/v1/classify": {"post": _post("Classify texts", "classify", classify, classify_response, error)},
            "/v1/models": {"get": _get("The models served", "models", {"application/json": {"schema": models}})},
            "/healthz": {"get": _get("The process is up", "healthz", {"application/json": {}})},
            "/readyz": {
                "get": _get(
                    "Every model is warm",
                    "readyz",
                    {"application/json": {}},
                    {"503": _error("still warming up", error)},
                )
            },
            "/metrics": {"get": _get("Counters in Prometheus's text format", "metrics", {"text/plain": {}})},
            "/openapi.json": {"get": _get("This document", "openapi", {"application/json": {}})},
            "/": {"get": _get("A page to try the models on", "page", {"text/html": {}})},
        },
        "components": {"schemas": components},
    }


def _post(
    summary: str, name: str, asked: dict[str, object], answered: dict[str, object], error: dict[str, object]
) -> dict[str, object]:
    return {
        "summary": summary,
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": asked}}},
        "responses": {
            "200": {"description": "answers", "content": {"application/json": {"schema": answered}}},
            **{status: _error(meaning, error) for status, meaning in ERRORS.items()},
        },
    }


def _get(
    summary: str, name: str, content: dict[str, object], errors: dict[str, object] | None = None
) -> dict[str, object]:
    return {
        "summary": summary,
        "operationId": name,
        "responses": {"200": {"description": summary, "content": content}, **(errors or {})},
    }


def _error(meaning: str, schema: dict[str, object]) -> dict[str, object]:
    return {"description": meaning, "content": {"application/json": {"schema": schema}}}


def _version() -> str:
    try:
        return version("stillroom")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0"
