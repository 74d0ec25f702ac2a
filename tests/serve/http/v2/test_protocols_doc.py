"""What `docs/protocols.md` shows runs, on a real server."""

import contextlib
import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S
from repository import ROOT

from benchmarks.serve.small_server import serving

PAGE = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8")
CALLS = [block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if block.startswith("curl")]
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def url(entities_bundle: Path, intents_bundle: Path, relations_bundle: Path) -> Iterator[str]:
    with serving([entities_bundle, intents_bundle, relations_bundle]) as url:
        yield url


def here(block: str, url: str) -> str:
    """A block of the page for the models of this server."""
    address = url.removeprefix("http://")
    return block.replace("127.0.0.1:8000", address).replace("my-classifier", "intents").replace("my-tagger", "cities")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("call", CALLS)
def test_a_call_on_the_page_is_answered(call: str, url: str) -> None:
    command = here(call, url).replace("curl -s", "curl -s -w '\\n%{http_code}'")
    finished = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert finished.stdout.endswith("\n200"), finished.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_on_the_page_runs(program: str, url: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(here(program, url), "protocols.md", "exec"), {})  # noqa: S102  # the page's own code
    assert "'text': 'rome', 'start': 7, 'end': 11" in said.getvalue()


def test_the_page_shows_calls_and_a_program() -> None:
    assert len(CALLS) == 4
    assert len(PROGRAMS) == 1
