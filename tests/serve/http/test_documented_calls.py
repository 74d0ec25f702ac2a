"""What the pages about the server show runs on a real server, and what their tables list is what the code has."""

import contextlib
import io
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from patience import PATIENCE_S
from repository import ROOT

from serve import errors
from serve.errors import StillroomError
from serve.http.access import OPEN_PATHS
from serve.http.app import create_app
from serve.http.v2_tensors import InferRequest
from serve.options import options_of
from serve.settings import ServeSettings
from serve.tasks.question_answering import AnswerRequest
from serve.tasks.relations import RelationItemsRequest, RelationRequest
from serve.tasks.text_classification import ClassifyRequest
from serve.tasks.token_classification import EntitiesRequest
from serve.workers.served_model import ModelDescription


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page(name), re.DOTALL)


HTTP = "reference/http.md"
CALLS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in (HTTP, "serving.md", "monitoring.md", "vectors.md")
    for number, block in enumerate(blocks(name, "sh"))
    if block.startswith("curl")
]
PROGRAMS = blocks(HTTP, "python")
JSON_PAGES = (HTTP, "reference/errors.md", "serving.md", "monitoring.md", "deploying.md")


def here(block: str, url: str) -> str:
    """A block of a page for the models of this server."""
    address = url.removeprefix("http://")
    return block.replace("127.0.0.1:8000", address).replace("my-classifier", "intents").replace("my-tagger", "cities")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("call", CALLS)
def test_a_call_on_a_page_is_answered(call: str, url: str) -> None:
    command = "set -e\n" + here(call, url).replace("curl -s", "curl -sS --fail")
    finished = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_on_the_page_runs(program: str, url: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(here(program, url), HTTP, "exec"), {})  # noqa: S102  # the page's own code
    assert "'text': 'rome', 'start': 7, 'end': 11" in said.getvalue()


def test_the_program_of_the_page_about_vectors_runs(url: str, vectors_bundle: Path) -> None:
    (program,) = blocks("vectors.md", "python")
    found: dict[str, object] = {}
    exec(compile(here(program, url).replace("small.bundle", str(vectors_bundle)), "vectors.md", "exec"), found)  # noqa: S102
    assert isinstance(found["vectors"], list)
    assert [len(vector) for vector in (found["vector"], *found["vectors"])] == [4, 4, 4]  # type: ignore[arg-type]


def test_the_pages_show_calls_and_a_program() -> None:
    assert len(CALLS) >= 10
    assert len(PROGRAMS) == 1


@pytest.mark.parametrize("name", JSON_PAGES)
def test_the_json_on_a_page_is_json(name: str) -> None:
    found = blocks(name, "json")
    assert found
    for block in found:
        msgspec.json.decode(block)


def section(heading: str) -> str:
    """A section of the reference of HTTP, to the next of its level."""
    (found,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page(HTTP), re.DOTALL | re.MULTILINE)
    return found


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [
        pytest.param("POST /v1/entities", [EntitiesRequest], id="entities"),
        pytest.param("POST /v1/classify", [ClassifyRequest], id="classify"),
        pytest.param("POST /v1/answer", [AnswerRequest], id="answer"),
        pytest.param("POST /v1/relations", [RelationRequest, RelationItemsRequest], id="relations"),
        pytest.param("Open Inference Protocol (/v2)", [InferRequest], id="v2"),
    ],
)
def test_every_field_of_a_request_is_in_the_reference(heading: str, kinds: list[type[msgspec.Struct]]) -> None:
    for field in {name for kind in kinds for name in kind.__struct_fields__}:
        assert f"`{field}`" in section(heading), field


def test_every_field_of_a_model_s_description_is_in_the_reference() -> None:
    for field in ModelDescription.__annotations__:
        assert f"`{field}`" in section("GET /v1/models"), field


def test_every_endpoint_is_in_the_reference_and_those_that_need_no_key_too(entities_bundle: Path) -> None:
    paths = {route.path for route in create_app([entities_bundle]).routes}  # type: ignore[attr-defined]
    for path in paths:
        shown = path.replace("{name}", "NAME").replace("/versions/{version}", "")
        assert re.search(rf"(GET|POST) {re.escape(shown)}`", page(HTTP)), shown
    listed = {path for path in OPEN_PATHS if not path.startswith("/v2")}
    rows = re.findall(r"^\| \[?`GET (\S+)`.*\| (\w+)[^|]*\|$", page(HTTP), re.MULTILINE)
    assert {path for path, key in rows if key == "no"} == listed


def kinds_of_errors() -> list[type[StillroomError]]:
    found = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, StillroomError)]
    return [each for each in found if each is not StillroomError]


@pytest.mark.parametrize("kind", kinds_of_errors())
def test_an_error_is_in_the_tables_with_its_status_code_and_exit_code(kind: type[StillroomError]) -> None:
    over_http = kind.code not in ("bundle", "gate_missed")
    status = kind.http_status if over_http else "not over HTTP"
    assert f"| `{kind.__name__}` | {status} | `{kind.code}` | {kind.exit_code} |" in page("reference/errors.md")
    if over_http:
        assert f"| {kind.http_status} | `{kind.code}` |" in page("reference/errors.md")


def test_limits_on_the_page_are_options_and_all_of_them_are_there() -> None:
    known = {option.flag: option for option in options_of(ServeSettings)}
    (table,) = re.findall(r"## Limits\n.*?(\|.*?)\n\n", page("serving.md"), re.DOTALL)
    named = set(re.findall(r"--[a-z][a-z-]+", table))
    assert named <= set(known)
    of_batches = {"--batch-tokens", "--max-wait-ms"}  # these refuse nobody
    assert named >= {flag for flag, option in known.items() if option.within} - of_batches


def test_the_proxy_of_the_page_fits_the_limits_of_the_server() -> None:
    (site,) = blocks("serving.md", "nginx")
    settings = ServeSettings()
    assert seconds(site, "keepalive_timeout") < settings.connections.keep_alive_s
    assert seconds(site, "proxy_read_timeout") > settings.limits.answer_s
    (megabytes,) = re.findall(r"client_max_body_size (\d+)m;", site)
    assert int(megabytes) << 20 > settings.limits.body_bytes
    assert f"server {settings.host}:{settings.port};" in site


def seconds(site: str, directive: str) -> float:
    (found,) = re.findall(rf"{directive} (\d+)s;", site)
    return float(found)
