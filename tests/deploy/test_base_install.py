"""The base install by itself, as the image has it: what the wheel asks for and no more, in a world that cannot be written."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from deploy_files import ROOT, dockerfile, image_health_check
from patience import PATIENCE_S

from serve.settings import ServeSettings

# What the root user of a new mount namespace does before it runs a command: makes every file system read-only, the one of the
# devices aside, and drops all capabilities.
READ_ONLY = """
cut -d' ' -f5 /proc/self/mountinfo | sort -r | while read -r place; do
  case $place in /dev*|/proc*|/sys*) ;; *) mount -o remount,bind,ro "$place" || exit 9;; esac
done
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel of this tree, made as the Dockerfile makes it; it asks the package index."""
    folder = tmp_path_factory.mktemp("image")
    source = folder / "source"
    source.mkdir()
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line.startswith("!"):
            kept = ROOT / line[1:]
            (shutil.copytree if kept.is_dir() else shutil.copy)(kept, source / kept.name)
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    (steps,) = re.findall(r"^RUN (python -m pip wheel .*)$", text, re.MULTILINE)
    steps = steps.replace("/wheels", f"{folder}/wheels").replace("/opt/stillroom", f"{folder}/stillroom")
    # The Python that made this environment stands for the image's.
    subprocess.run([sys.executable, "-m", "venv", folder / "build"], check=True)
    environment = {**os.environ, "PATH": f"{folder / 'build' / 'bin'}:{os.environ['PATH']}", "PIP_QUIET": "1"}
    environment.pop("PYTHONPATH", None)
    subprocess.run(["sh", "-ec", steps], cwd=source, env=environment, check=True)
    return folder / "stillroom"


@pytest.fixture
def read_only() -> list[str]:
    """What to run a command with so that it may write nothing; nothing where this process may not arrange that."""
    prefix = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh"]
    if shutil.which("unshare") and shutil.which("setpriv"):
        tried = subprocess.run([*prefix, "touch", str(ROOT / "written")], capture_output=True, text=True, check=False)
        if "Read-only file system" in tried.stderr:
            return prefix
        (ROOT / "written").unlink(missing_ok=True)
    return []


@pytest.mark.slow
def test_the_base_install_serves_and_writes_nothing(base: Path, served_bundle: Path, read_only: list[str]) -> None:
    said = dict(each.split("=", 1) for line in dockerfile()["ENV"] for each in line.split())
    environment = {**said, "PATH": f"{base / 'bin'}:/usr/bin:/bin"}
    python = str(base / "bin" / "python")
    absent = "import importlib.util as u; print([n for n in ('torch', 'transformers', 'pip') if u.find_spec(n)])"
    found = subprocess.run([python, "-I", "-c", absent], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

    command = [*read_only, "stillroom", "serve", "--no-access-log", "--port", "0", str(served_bundle)]
    with subprocess.Popen(
        command, env=environment, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout
            url = server.stdout.readline().strip()
            answer = httpx.post(f"{url}/v1/entities", json={"text": "I moved to Rome"}, timeout=PATIENCE_S)
            results = answer.json()["results"]
            assert [entity["text"] for entity in results[0]["entities"]] == ["Rome"]
            check = [each.replace("8000", url.rpartition(":")[2]) for each in image_health_check()]
            assert subprocess.run(check, env=environment, check=False, timeout=PATIENCE_S).returncode == 0
        finally:
            server.send_signal(signal.SIGTERM)
        _, complaints = server.communicate(timeout=ServeSettings.drain_s + PATIENCE_S)
    assert server.returncode == 0
    assert complaints == ""
    # Now nobody listens.
    assert subprocess.run(check, env=environment, check=False, timeout=PATIENCE_S, capture_output=True).returncode != 0
