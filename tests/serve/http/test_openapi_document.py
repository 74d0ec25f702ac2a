"""The OpenAPI document is true of the server, and the page made of it shows it all."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from html import unescape
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from lookup_bundles import INTENTS, intent_table, write_bundle
from server_process import HTTP
from starlette.testclient import TestClient

from benchmarks.serve.schemathesis_run import hold_against_its_document
from benchmarks.serve.small_server import serving
from serve.http import openapi, service
from serve.http.app import create_app
from serve.observe.metrics import Metrics
from serve.settings import Limits
from serve.tasks import open_bundle
from serve.workers.served_model import ServedModel

# Small limits, so that cases at them and beyond are small.
LIMITS = {"texts": 8, "text_characters": 60, "body_bytes": 20_000}


@pytest.fixture(scope="module")
def url(bundle_of_each_kind: list[Path]) -> Iterator[str]:
    with serving(bundle_of_each_kind, **LIMITS) as url:
        yield url


def test_schemathesis_finds_no_answer_that_is_not_as_described(url: str) -> None:
    outcome = hold_against_its_document(url, examples=1, seed=0)
    assert outcome.failures == []
    assert outcome.operations == 19
    assert outcome.cases > 200


def test_the_document_knows_the_models_and_the_limits_of_its_server(url: str) -> None:
    document = HTTP.get(f"{url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert schemas["AnswerRequest"]["properties"]["context"]["maxLength"] == LIMITS["text_characters"]
    assert schemas["EmbeddingsRequest"]["properties"]["dimensions"]["maximum"] == 4
    assert schemas["EntitiesRequest"]["properties"]["promise"]["enum"] == [None]  # no model here makes one
    assert schemas["EntitiesRequest"]["properties"]["text"]["maxItems"] == LIMITS["texts"]
    classify = document["paths"]["/v1/classify"]["post"]
    refusals = {"400", "401", "404", "405", "408", "413", "415", "422", "429", "431"}
    assert set(classify["responses"]) == {"200", *refusals, "500", "503", "504"}
    assert "X-Request-Id" in classify["responses"]["200"]["headers"]
    assert "Retry-After" in classify["responses"]["429"]["headers"]


def test_each_operation_is_described_and_has_a_tag_and_the_server_is_where_the_document_is(url: str) -> None:
    document = HTTP.get(f"{url}/openapi.json").json()
    assert document["servers"] == [{"url": "/", "description": "the server that sent this document"}]
    tags = [tag["name"] for tag in document["tags"]]
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert {tag for operation in operations for tag in operation["tags"]} == set(tags)
    for operation in operations:
        assert len(operation["tags"]) == 1
        assert operation["description"].endswith(".")
        assert operation["description"].rstrip(".") != operation["summary"]
    assert document["info"]["description"]
    for schema in document["components"]["schemas"].values():  # a client that is made from it asks other servers too
        assert "enum" not in schema.get("properties", {}).get("model", {})


# Folders in whose node_modules the linters are: npm install --prefix FOLDER @redocly/cli @stoplight/spectral-cli
LINTERS = os.environ.get("STILLROOM_LINTERS")


@pytest.mark.slow
@pytest.mark.skipif(not LINTERS, reason="STILLROOM_LINTERS is not set")
@pytest.mark.parametrize("linter", [["redocly", "lint"], ["spectral", "lint", "--ruleset", "rules.yaml"]])
def test_linters_find_no_error_in_the_document(url: str, linter: list[str], tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text('extends: ["spectral:oas"]\n')
    (tmp_path / "openapi.json").write_text(HTTP.get(f"{url}/openapi.json").text)
    program = Path(str(LINTERS)) / "node_modules" / ".bin" / linter[0]
    ended = subprocess.run(
        [program, *linter[1:], "openapi.json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_document_and_page_are_built_once_for_the_models_that_are_served(
    entities_bundle: Path, intents_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr(service, "openapi", lambda *given: built.append(given) or openapi.openapi(*given))
    app = create_app([entities_bundle])
    client = TestClient(app)
    first = [client.get(path).text for path in ("/docs", "/openapi.json", "/docs", "/openapi.json")]
    assert len(built) == 1
    assert first[:2] == first[2:]
    assert "curl -s http://testserver/v1/entities" in first[0]
    assert "curl -s https://other:8/v1/entities" in client.get("https://other:8/docs").text

    app.state.service.models["cities"] = ServedModel(intents_bundle, Limits(), Metrics())  # as a reload does
    assert client.get("/openapi.json").text != first[1]
    assert len(built) == 2


def test_the_page_of_the_document_holds_every_operation_and_its_calls_run(url: str) -> None:
    response = HTTP.get(f"{url}/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script" not in response.text
    document = HTTP.get(f"{url}/openapi.json").json()
    protocol = document["externalDocs"]["url"]
    assert f'<a href="{protocol}">/v2 is ' in response.text
    assert "http" not in response.text.replace(url, "").replace(protocol, "")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    shown = re.findall(r"<h2><b>(\w+)</b> ([^<]+)</h2>", response.text)
    assert shown == [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    calls = [unescape(call) for call in re.findall(r"<pre>(.*?)</pre>", response.text, re.DOTALL)]
    with_bodies = [call for call in calls if " -d " in call]
    assert len(with_bodies) == 11
    for call in with_bodies:
        called, body = re.findall(r"curl -s (\S+) .* -d '(.*)'$", call, re.DOTALL)[0]
        assert called.startswith(url)
        answered = HTTP.post(called, json=json.loads(body))
        assert answered.status_code == 200, call


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("models.example", "http://models.example/v1/entities"),
        ("[::1]:80", "http://[::1]:80/v1/entities"),
        ("$(rm)", "http://127.0.0.1:8000/v1/entities"),
        ("a b", "http://127.0.0.1:8000/v1/entities"),
    ],
)
def test_the_page_s_calls_go_to_the_server_s_address_as_the_client_knows_it(
    entities_bundle: Path, host: str, shown: str
) -> None:
    page = TestClient(create_app([entities_bundle])).get("/docs", headers={"Host": host}).text
    assert f"curl -s {shown} " in page
    assert host not in page or host in shown


def test_a_checkout_that_is_not_installed_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(openapi, "version", absent)
    assert openapi.program_version() == "0"


def test_the_example_of_an_endpoint_is_a_request_that_its_models_take(tmp_path: Path) -> None:
    for second_text, kinds in (("needed", {"pairs": True, "single_texts": False}), ("refused", {"single_texts": True})):
        folder = write_bundle(
            tmp_path / second_text, intent_table(), task="text-classification", labels=INTENTS, **kinds
        )
        described = openapi.openapi({"m": open_bundle(folder).manifest}, Limits())
        example = described["paths"]["/v1/classify"]["post"]["requestBody"]["content"]["application/json"]["example"]
        assert ("text_pair" in example) is (second_text == "needed")
