"""Every extra can be installed with the versions of `constraints.txt`, and needs nothing that is not pinned there."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from repository import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
PINNED = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([A-Za-z0-9_.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
}
OWN_ENVIRONMENT = "optimum"  # pins transformers below the version that everything else is tested with


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", *sorted(set(EXTRAS) - {OWN_ENVIRONMENT})])
def test_an_extra_resolves_with_the_constraints_and_all_that_it_brings_is_pinned(extra: str, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):  # pip leaves files where it builds
        shutil.copyfile(ROOT / name, tmp_path / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        "report.json",
    ]
    resolved = subprocess.run(
        [*command, "-c", "constraints.txt", f".[{extra}]" if extra else "."],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=580,
    )  # fmt: skip
    assert resolved.returncode == 0, resolved.stderr
    brought = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["install"]
    versions = {canonicalize_name(each["metadata"]["name"]): each["metadata"]["version"] for each in brought}
    assert versions.pop("stillroom")
    assert {name: version.partition("+")[0] for name, version in versions.items()} == {
        name: PINNED.get(name) for name in versions
    }
