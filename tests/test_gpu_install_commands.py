"""How a GPU's packages are installed: what the docs and the messages say agrees with the metadata."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from latency.candidates.candidate import INSTALL_TORCH_CUDA
from serve.bundle.runtimes import INSTALL_ONNXRUNTIME_GPU

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED = [
    Requirement(line)
    for lines in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for line in lines
]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PINNED = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", CONSTRAINTS, re.MULTILINE))


def test_onnxruntime_gpu_is_no_requirement_since_it_excludes_onnxruntime() -> None:
    names = {requirement.name for requirement in REQUIRED} | set(PINNED)
    assert "onnxruntime" in names
    assert not any(name.replace("_", "-").startswith("onnxruntime-gpu") for name in names)
    assert INSTALL_ONNXRUNTIME_GPU.startswith("pip uninstall -y onnxruntime && pip install ")


@pytest.mark.parametrize(
    ("command", "package"), [(INSTALL_ONNXRUNTIME_GPU, "onnxruntime"), (INSTALL_TORCH_CUDA, "torch")]
)
def test_the_commands_install_the_versions_that_were_tested(command: str, package: str) -> None:
    (version,) = re.findall(r"==([0-9.]+)", command)
    assert version == PINNED[package].partition("+")[0]
    (requirement,) = [requirement for requirement in REQUIRED if requirement.name == package]
    assert requirement.specifier.contains(version)


@pytest.mark.parametrize("command", [INSTALL_ONNXRUNTIME_GPU, INSTALL_TORCH_CUDA])
def test_the_docs_give_the_same_commands(command: str) -> None:
    assert command in (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
