"""The OpenAPI 3.1 document of a server, with schemas made from the types that the code uses; and `/docs`, a web page of it.

The document has the names of this server's models, its limits, and a link to the protocol of `/v2`. `benchmarks/serve/schemathesis_run.py`
checks a running server against it. The page has no script and loads nothing.
"""

import base64
import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from serve.bundle.manifest import Manifest
from serve.errors import MESSAGE_ALONE
from serve.http.forms import FORMS
from serve.observe.request_context import TIMEOUT_HEADER
from serve.options import options_of
from serve.settings import Limits
from serve.tasks import task_of
from serve.text.answers import WIDEST_VECTOR, AnswerOptions
from serve.workers.served_model import ModelDescription


class OpenaiModel(TypedDict):
    """A model as clients of OpenAI's list of models read it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsResponse(TypedDict):
    """The models of this server. The first one for an endpoint answers its requests without `model`."""

    object: Literal["list"]
    data: list[OpenaiModel]
    models: list[ModelDescription]


class StateResponse(TypedDict):
    """The server's state in one word."""

    status: str


class ErrorDetail(TypedDict):
    """A stable code, a message for a person, and the field of the request that is at fault, if there is one.

    `type` and `param` are for clients of OpenAI's endpoints; `param` is the field, or null.
    """

    code: str
    message: str
    field: NotRequired[str]
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None


class ErrorResponse(TypedDict):
    """The body of an answer with a status of 400 or more."""

    error: ErrorDetail


class MessageAlone(TypedDict):
    """The body of an error in the forms of Hugging Face and TEI."""

    error: str


Schema = dict[str, Any]

# Of every endpoint, of those with a request body, and of those that a model answers.
ERRORS = {
    "401": "the key is missing or unknown; only on a server with keys",
    "404": "no such path or model",
    "405": "the path does not take this method; the header Allow lists those that it takes",
    "429": "the key is over its limits; Retry-After gives the seconds to wait",
    "431": "the headers are too many or too long",
    "500": "the server failed",
}
BODY_ERRORS = {
    "400": "the body is not JSON, or does not match its headers",
    "408": "the body did not arrive in time, or comes too slowly",
    "413": "the request is over a limit of the server",
    "415": "the body has another media type, or is compressed",
    "422": "a field is missing, unknown, or has a wrong value",
}
MODEL_ERRORS = {
    "429": "the queue is full, or the key is over its limits; Retry-After gives the seconds to wait",
    "503": "no model can answer now",
    "504": f"no answer in the time allowed: the server's limit, or the client's milliseconds in {TIMEOUT_HEADER}",
}
HEADERS: dict[str, Schema] = {
    "X-Request-Id": {
        "description": "the request's X-Request-Id if it has 1 to 128 of A-Z a-z 0-9 _ . : / + = -, otherwise a new id; also in the log",
        "required": True,
        "schema": {"type": "string"},
    },
    "Server-Timing": {
        "description": "milliseconds: queue, tokenise, run and decode of the text answered last, and total of the request",
        "schema": {"type": "string"},
    },
    "WWW-Authenticate": {"description": "the scheme, Bearer", "schema": {"type": "string"}},
    "Allow": {"description": "the methods of this path", "schema": {"type": "string"}},
    "Retry-After": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 1}},
}
ADDED_HEADER = {"401": "WWW-Authenticate", "405": "Allow", "429": "Retry-After"}
# The fields of requests that hold texts.
TEXT_FIELDS = {"text", "text_pair", "items", "input", "question", "context", "inputs", "query", "texts"}
NO_MODEL = {"422": "no model has a form of TEI; the message names the path of the first model"}
NAME: Schema = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "the name or alias of a model",
    "schema": {"type": "string", "minLength": 1},
}
REQUEST_ID: Schema = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "an id for this request, which the answer and the log repeat",
    "schema": {"type": "string"},
}

# The ranges of options, which their types do not state.
OPTION_SCHEMAS: dict[str, Schema] = {
    option.name: {"minimum": option.at_least, "maximum": option.at_most}
    for option in options_of(AnswerOptions)
    if option.at_least is not None
}

TAGS = {
    "answers": "Answers of models to texts, and the list of models",
    "forms": "The same answers in the forms of Hugging Face and of text-embeddings-inference (TEI)",
    "server": "The state of the server, and pages about it",
}

# The requests, and the tasks of the models that answer each.
TASKS_OF = {request: form.tasks for form in FORMS for request in form.endpoint.requests}


def openapi(models: Mapping[str, Manifest], limits: Limits) -> dict[str, object]:
    """The OpenAPI document of a server with `models`, by their names and aliases."""
    # The responses of two tasks are of one type.
    responses = dict.fromkeys(form.endpoint.response for form in FORMS)
    kinds = (*TASKS_OF, *responses, ModelsResponse, OpenaiModel, StateResponse, ErrorResponse, MessageAlone)
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    reference = dict(zip(kinds, references, strict=True))
    _limit(schemas, models, limits)
    state = _json(reference[StateResponse])
    paths: dict[str, Schema] = {}
    for form in FORMS:
        endpoint = form.endpoint
        second_texts = {manifest.second_text for manifest in models.values() if task_of(manifest) in form.tasks}
        forms = [reference[each] for each in endpoint.requests]
        asked = forms[0] if len(forms) == 1 else {"oneOf": forms}
        example = dict(endpoint.example)
        if second_texts == {"refused"}:
            example.pop("text_pair", None)
        elif second_texts == {"needed"} and "text_pair" in endpoint.requests[0].__struct_fields__:
            example.setdefault("text_pair", "Someone asks.")
        content = {"application/json": {"schema": asked, "example": example}}
        paths[endpoint.path] = {
            "post": {
                "summary": endpoint.summary,
                "description": _words(endpoint.requests[0]),
                "operationId": endpoint.operation,
                "requestBody": {"required": True, "content": content},
                "responses": {"200": {"description": "answers", "content": _json(reference[endpoint.response])}},
                "x-errors": {**BODY_ERRORS, **MODEL_ERRORS},
            }
        }
    text: Schema = {"schema": {"type": "string"}}
    of_server: dict[str, Schema] = {
        "/v1/models": _get("List the models", _words(ModelsResponse), "models", _json(reference[ModelsResponse])),
        "/v1/models/{name}": _get("Find a model", _words(OpenaiModel), "model", _json(reference[OpenaiModel])),
        "/info": _get(
            "Describe the first model, in TEI's form",
            "Its type, limits and version.",
            "info",
            _json({"type": "object"}),
            NO_MODEL,
        ),
        "/healthz": _get("Check that the server runs", "200 while its process answers.", "healthz", state),
        "/readyz": _get(
            "Check that every model can answer",
            "200 when requests may be sent.",
            "readyz",
            state,
            {"503": "some model cannot answer now"},
        ),
        "/metrics": _get(
            "Give metrics",
            "Requests, latencies and models in Prometheus's text format.",
            "metrics",
            {"text/plain": text},
        ),
        "/openapi.json": _get(
            "Give this document",
            "It describes the models and limits of this server.",
            "openapi",
            _json({"type": "object"}),
        ),
        "/docs": _get("Show this document", "A web page that loads nothing.", "docs", {"text/html": text}),
        "/": _get("Try the models", "A web page with a form for texts.", "page", {"text/html": text}),
    }
    for path, methods in of_server.items():
        paths.setdefault(path, {}).update(methods)
    for path, methods in paths.items():
        for method, operation in methods.items():
            of_others = path == "/info" or (method == "post" and MESSAGE_ALONE.fullmatch(path))
            operation["tags"] = ["answers" if path.startswith("/v1/") else "forms" if of_others else "server"]
            _complete(
                path,
                next(iter(models)),
                operation,
                reference[MessageAlone if MESSAGE_ALONE.fullmatch(path) else ErrorResponse],
            )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "stillroom",
            "version": program_version(),
            "description": "Answers of small text encoders: entities, classes, numbers, answers to questions, vectors",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "the server that sent this document"}],
        "tags": [{"name": name, "description": words} for name, words in TAGS.items()],
        "paths": paths,
        # The protocol has a description of its own.
        "externalDocs": {
            "description": "/v2 is the Open Inference Protocol, for clients of KServe and Triton",
            "url": "https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol",
        },
        "security": [{}, {"bearer": []}, {"key": []}],  # either of the two; a server without keys needs neither
        "components": {
            "schemas": schemas,
            "headers": HEADERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _limit(schemas: Mapping[str, Schema], models: Mapping[str, Manifest], limits: Limits) -> None:
    """Adds to the schemas what the types do not state: limits, and the names of models."""
    for request, tasks in TASKS_OF.items():
        properties = schemas[request.__name__]["properties"]
        fitting = {name: manifest for name, manifest in models.items() if task_of(manifest) in tasks}
        for name, schema in properties.items():
            schema.update(OPTION_SCHEMAS.get(name, {}))
        if fitting and "model" in properties:
            properties["model"]["examples"] = [*fitting]
        if "dimensions" in properties:
            widths = [manifest.vector_width for manifest in fitting.values()]
            properties["dimensions"]["maximum"] = max(widths, default=WIDEST_VECTOR)
        if "promise" in properties:
            variants = [variant for manifest in fitting.values() for variant in manifest.variants.values()]
            made = {name for variant in variants for name in variant.promises}
            properties["promise"] = {"enum": [*sorted(made), None], "description": properties["promise"]["description"]}
        for name in properties.keys() & TEXT_FIELDS:
            properties[name].update(minItems=1, maxItems=limits.texts, maxLength=limits.text_characters)
            for alternative in properties[name].get("anyOf", []):
                if alternative.get("type") == "array" and "type" in alternative["items"]:
                    alternative["items"]["maxLength"] = limits.text_characters
    schemas["RelationItem"]["properties"]["text"]["maxLength"] = limits.text_characters


def _words(kind: type) -> str:
    """What the docstring of `kind` says."""
    return inspect.getdoc(kind) or ""


def _get(summary: str, words: str, name: str, content: Schema, errors: dict[str, str] | None = None) -> Schema:
    about = {"summary": summary, "description": words, "operationId": name}
    return {
        "get": {**about, "responses": {"200": {"description": summary, "content": content}}, "x-errors": errors or {}}
    }


def _complete(path: str, model: str, operation: Schema, error: Schema) -> None:
    """Adds what every operation has: the name of a model such as `model`, if its path has one, the request id, and its errors as
    responses with the schema `error`."""
    operation["parameters"] = [*([{**NAME, "example": model}] if "{name}" in path else []), REQUEST_ID]
    for status, meaning in sorted({**ERRORS, **operation.pop("x-errors")}.items()):
        operation["responses"][status] = {"description": meaning, "content": _json(error)}
    for status, response in operation["responses"].items():
        timed = "Server-Timing" if status == "200" and "504" in operation["responses"] else None
        names = ["X-Request-Id", *filter(None, [ADDED_HEADER.get(status), timed])]
        response.setdefault("headers", {}).update({name: {"$ref": f"#/components/headers/{name}"} for name in names})


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def program_version() -> str:
    """The installed version."""
    try:
        return version("stillroom")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0"


# A Host header that is safe in a command: a name or an IP address, and a port.
ADDRESS = re.compile(r"[A-Za-z0-9._-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")

BASE = "http://127.0.0.1:8000"

# The colours are those of the report pages.
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --quiet: #5b6470; --paper: #ffffff; --panel: #f5f6f8; --line: #d9dde3;
  --accent: #0b6e8f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7eaee; --quiet: #a3adb9; --paper: #14171b; --panel: #1d2228; --line: #343b44; --accent: #4cb8d9; } }
* { box-sizing: border-box; }
body { max-width: 58rem; margin: 0 auto; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: clamp(1.5rem, 4vw, 2.1rem); line-height: 1.2; margin: 0 0 .25rem; }
h2 { font: 600 1rem ui-monospace, Menlo, Consolas, monospace; margin: 2.5rem 0 .25rem;
  padding-top: .9rem; border-top: 1px solid var(--line); }
h2 b { display: inline-block; min-width: 3.2rem; color: var(--quiet); }
p { margin: .25rem 0; }
a, summary { color: var(--accent); text-underline-offset: .2em; }
summary { cursor: pointer; padding: .2rem 0; }
pre { background: var(--panel); padding: .9rem 1rem; white-space: pre-wrap; font: .86rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0; }
th { text-align: left; color: var(--quiet); font-weight: 500; font-size: .85rem; }
th, td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
td:first-child { font-family: ui-monospace, Menlo, Consolas, monospace; overflow-wrap: normal; }
"""


def docs_page(document: dict[str, Any]) -> str:
    """A page with every operation of `document`: what it does, a curl command, its fields and its status codes.

    The commands are for `BASE`.
    """
    sections = []
    model = document["paths"]["/models/{name}"]["post"]["parameters"][0]["example"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parameters = [(each["name"], each.get("description", "")) for each in operation.get("parameters", [])]
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            fields = _fields(document, content.get("schema", {}))
            answers = [(status, response["description"]) for status, response in operation["responses"].items()]
            sections.append(
                f"<h2><b>{method.upper()}</b> {escape(path)}</h2>\n<p>{escape(operation['summary'])}.</p>\n"
                f"<pre>{escape(_call(BASE + path.replace('{name}', model), content.get('example')))}</pre>\n"
                f"{_table('field', fields)}{_table('parameter', parameters)}"
                f"<details><summary>Status codes</summary>\n{_table('status', answers)}</details>\n"
            )
    info, elsewhere = document["info"], document["externalDocs"]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(info["title"])}: endpoints</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(info['title'])} {escape(info['version'])}</h1>\n"
        '<p>For programs: <a href="/openapi.json">/openapi.json</a>. To try the models: <a href="/">/</a>. '
        f'<a href="{escape(elsewhere["url"])}">{escape(elsewhere["description"])}</a>.</p>\n'
        f"{''.join(sections)}</body>\n</html>\n"
    )


def _call(url: str, example: object) -> str:
    """The operation as a curl command."""
    if example is None:
        return f"curl -s {url}"
    body = json.dumps(example, ensure_ascii=False)
    return f"curl -s {url} \\\n  -H 'Content-Type: application/json' \\\n  -d '{body}'"


def _fields(document: dict[str, Any], schema: dict[str, Any]) -> list[tuple[str, str]]:
    """The fields of a body, in all its forms, and their descriptions."""
    fields: dict[str, str] = {}
    for form in schema.get("oneOf", [schema]):
        resolved = form
        if reference := form.get("$ref"):
            resolved = document["components"]["schemas"][reference.rpartition("/")[2]]
        for name, each in resolved.get("properties", {}).items():
            needed = "needed: " if name in resolved.get("required", []) else ""
            fields.setdefault(name, f"{needed}{each.get('description', '')}")
    return list(fields.items())


def _table(first: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(meaning)}</td></tr>\n" for name, meaning in rows)
    return f'<table>\n<tr><th scope="col">{first}</th><th scope="col">meaning</th></tr>\n{cells}</table>\n'


def content_security_policy(page: str) -> str:
    """A policy that allows `page` only its own inline styles and scripts, by their hashes, and calls to this server."""
    hashes = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
            for inline in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        for tag in ("style", "script")
    }
    return (
        f"default-src 'none'; style-src {hashes['style']}; script-src {hashes['script']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
