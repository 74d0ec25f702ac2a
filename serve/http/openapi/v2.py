"""The part of the OpenAPI document for `/v2`. The schemas are the protocol's, so they are written here and not made from types."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from serve.bundle.manifest import Manifest
from serve.http.v1.requests import ClassifyRequest, EntitiesRequest, options_of

Schema = dict[str, Any]

V2_ERROR: Schema = {"$ref": "#/components/schemas/V2Error"}
UNREADY = "some model cannot answer now"
SHAPE: Schema = {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "maxItems": 2}
INFER_EXAMPLE = {
    "id": "42",
    "inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["fly to Rome", "thank you"]}],
}
JSON_LENGTH: Schema = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "length of the JSON in bytes, if binary tensors follow it",
    "schema": {"type": "integer", "minimum": 0},
}


def v2_paths(models: Mapping[str, Manifest], errors: dict[str, str]) -> dict[str, Schema]:
    """The paths of `/v2`; `errors` are those of endpoints that a model answers."""
    named = {"name": _parameter("name", "a name or alias from /v1/models", [*models])}
    versioned = {
        **named,
        "version": _parameter(
            "version", "the model's digest", sorted({manifest.digest for manifest in models.values()})
        ),
    }
    paths = {
        "/v2": _get("Open Inference Protocol: describe the server", "v2_server", _reference("V2Server")),
        "/v2/health/live": _get("Check that the server runs", "v2_live", _truth("live")),
        "/v2/health/ready": _get("Check that every model can answer", "v2_ready", _truth("ready"), unready=UNREADY),
    }
    for suffix, ending, parameters in (("", "", named), ("/versions/{version}", "_of_version", versioned)):
        model = f"/v2/models/{{name}}{suffix}"
        listed = list(parameters.values())
        paths |= {
            model: _get("Inputs and outputs of a model", f"v2_model{ending}", _reference("V2Model"), listed),
            f"{model}/ready": _get(
                "Check a model", f"v2_model_ready{ending}", _truth("ready", "name"), listed, unready=UNREADY
            ),
            f"{model}/infer": {"post": _infer(f"v2_infer{ending}", listed, errors)},
        }
    return paths


def v2_schemas(option_schemas: Mapping[str, Schema]) -> dict[str, Schema]:
    """The schemas that the paths refer to; `option_schemas` are the ranges of options, which their types do not state."""
    parameters = {"binary_data_output": {"type": "boolean", "description": "true: binary outputs after the JSON"}}
    for kind in (EntitiesRequest, ClassifyRequest):
        properties = msgspec.json.schema_components([kind])[1][kind.__name__]["properties"]
        parameters |= {name: {**properties[name], **option_schemas.get(name, {})} for name in options_of(kind)}
    texts = {"anyOf": [_list({"type": "string"}), _list(_list({"type": "string"}))]}
    whole = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    numbers = {"anyOf": [_list(whole), _list(_list(whole))]}
    inputs = [_input(["text", "text_pair"], "BYTES", texts)]
    inputs += [_input(["input_ids", "attention_mask", "token_type_ids"], "INT64", numbers)]
    output = {
        "name": {"enum": ["answer", "label", "score", "logits"]},
        "parameters": _object({"binary_data": _nullable("boolean")}),
    }
    tensor = {"name": {"type": "string"}, "datatype": {"type": "string"}, "shape": _list({"type": "integer"})}
    given = {**tensor, "data": {"type": "array"}, "parameters": _object({"binary_data_size": {"type": "integer"}})}
    text = {"type": "string"}
    return {
        "V2Error": _object({"error": text}, ["error"]),
        "V2Server": _object(
            {"name": text, "version": text, "extensions": _list(text)}, ["name", "version", "extensions"]
        ),
        "V2Model": _object(
            {
                "name": text,
                "versions": _list(text),
                "platform": text,
                "inputs": _list(_object(tensor, [*tensor])),
                "outputs": _list(_object(tensor, [*tensor])),
            },
            ["name", "versions", "platform", "inputs", "outputs"],
        ),
        "V2InferRequest": _object(
            {
                "id": _nullable("string"),
                "parameters": _object(parameters),
                "inputs": {**_list({"oneOf": inputs}), "minItems": 1, "maxItems": 3},
                "outputs": _list(_object(output, ["name"])),
            },
            ["inputs"],
        ),
        "V2InferResponse": _object(
            {
                "model_name": text,
                "model_version": text,
                "id": text,
                "parameters": {"type": "object"},
                "outputs": _list(_object(given, [*tensor])),
            },
            ["model_name", "model_version", "outputs"],
        ),
    }


def _infer(name: str, parameters: list[Schema], errors: dict[str, str]) -> Schema:
    return {
        "summary": "Run a model on texts or on token ids",
        "operationId": name,
        "parameters": [*parameters, JSON_LENGTH],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _reference("V2InferRequest"), "example": INFER_EXAMPLE},
                "application/octet-stream": {"schema": {"description": "the same JSON, then binary tensors"}},
            },
        },
        "responses": {
            "200": {
                "description": "outputs; after the JSON as binary tensors if asked for",
                "headers": {
                    JSON_LENGTH["name"]: {"description": JSON_LENGTH["description"], "schema": JSON_LENGTH["schema"]}
                },
                "content": {
                    "application/json": {"schema": _reference("V2InferResponse")},
                    "application/octet-stream": {"schema": {}},
                },
            }
        },
        "x-errors": errors,
    }


def _get(summary: str, name: str, schema: Schema, parameters: Sequence[Schema] = (), *, unready: str = "") -> Schema:
    return {
        "get": {
            "summary": summary,
            "operationId": name,
            "parameters": list(parameters),
            "responses": {"200": {"description": summary, "content": {"application/json": {"schema": schema}}}},
            "x-errors": {"503": unready} if unready else {},
        }
    }


def _parameter(name: str, meaning: str, values: list[str]) -> Schema:
    schema: Schema = {"type": "string", "enum": values} if values else {"type": "string"}
    return {"name": name, "in": "path", "required": True, "description": meaning, "schema": schema}


def _input(names: list[str], datatype: str, data: Schema) -> Schema:
    properties = {
        "name": {"enum": names},
        "datatype": {"const": datatype},
        "shape": SHAPE,
        "data": data,
        "parameters": _object({"content_type": _nullable("string")}),
    }
    return _object(properties, [*properties][:-1])


def _truth(name: str, *others: str) -> Schema:
    texts: dict[str, Schema] = {other: {"type": "string"} for other in others}
    return _object({name: {"const": True}, **texts}, [name])


def _object(properties: Schema, required: Sequence[str] = ()) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(kind: str) -> Schema:
    return {"type": [kind, "null"]}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
