"""What decides whether a rerun takes a stage from an earlier run."""

from importlib import metadata
from pathlib import Path

import pytest

from stillroom.inputs.preflight import prepare
from stillroom.inputs.recipe import resolve
from stillroom.verbs.run import stages


def test_the_package_of_onnxruntime_for_gpus_serves_as_well(
    tiny_teacher: Path, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the same module under another name."""

    def without_onnxruntime(name: str) -> str:
        if name == "onnxruntime":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    given = {
        "teacher": str(tiny_teacher),
        "task": "text-classification",
        "data": str(task_data),
        "out": str(tmp_path / "out"),
    }
    inputs = prepare(resolve({}, given))
    expected = stages.Run(inputs).fingerprints
    monkeypatch.setattr(stages, "version", without_onnxruntime)
    assert stages.Run(inputs).fingerprints == expected
