"""`/docs`: a web page of the endpoints, made from the OpenAPI document. It has no script and loads nothing."""

import json
import re
from html import escape
from typing import Any

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


def at_address(page: str, scheme: str, host: str) -> str:
    """`page` with commands for `host`, the client's Host header, if that is a valid address."""
    return page.replace(BASE, f"{scheme}://{host}") if ADDRESS.fullmatch(host) else page


def docs_page(document: dict[str, Any]) -> str:
    """A page with every operation of `document`: what it does, a curl command, its fields and its status codes.

    The commands are for `BASE`; `at_address` puts another in its place.
    """
    sections = [
        _section(document, path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    info, elsewhere = document["info"], document["externalDocs"]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(info["title"])}: endpoints</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(info['title'])} {escape(info['version'])}</h1>\n"
        '<p>For programs: <a href="/openapi.json">/openapi.json</a>. To try the models: <a href="/">/</a>. '
        f'<a href="{escape(elsewhere["url"])}">{escape(elsewhere["description"])}</a>.</p>\n'
        f"{''.join(sections)}</body>\n</html>\n"
    )


def _section(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> str:
    parameters = [(each["name"], each.get("description", "")) for each in operation.get("parameters", [])]
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    fields = _fields(document, content.get("schema", {}))
    answers = [(status, response["description"]) for status, response in operation["responses"].items()]
    return (
        f"<h2><b>{method.upper()}</b> {escape(path)}</h2>\n<p>{escape(operation['summary'])}.</p>\n"
        f"<pre>{escape(_call(BASE + path, content.get('example')))}</pre>\n"
        f"{_table('field', fields)}{_table('parameter', parameters)}"
        f"<details><summary>Status codes</summary>\n{_table('status', answers)}</details>\n"
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
