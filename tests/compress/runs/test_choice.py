"""Which student ships: never one that labels alone beat on validation."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compress.runs import task_stages
from compress.runs.lineage import read_lineage


def checkpoint(folder: Path, validation: list[float], **lineage: Any) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(folder.name.encode())
    (folder / "metrics.jsonl").write_text("{}\n")
    curve = [[i, value] for i, value in enumerate(validation, 1)]
    (folder / "lineage.json").write_text(json.dumps({"validation": curve, "method": folder.name, **lineage}))
    return folder


@pytest.fixture
def inputs() -> Any:
    return SimpleNamespace(
        chain=SimpleNamespace(method="soft-labels", ends_on_task=True),
        settings=SimpleNamespace(then="soft-labels"),
        metric="accuracy",
        splits=SimpleNamespace(validation=[0] * 100),
    )


def choose(tmp_path: Path, inputs: Any, distilled: list[float] | None, undistilled: list[float] | None) -> Path:
    teacher = checkpoint(tmp_path / "teacher", [], on_validation=0.9)
    found = {"distilled": distilled, "undistilled": undistilled}
    folders = {name: checkpoint(tmp_path / name, curve) if curve else None for name, curve in found.items()}
    out = tmp_path / "student"
    out.mkdir()
    task_stages.make_choice(out, inputs, teacher, folders["distilled"], folders["undistilled"])
    return out


@pytest.mark.parametrize(
    ("distilled", "undistilled", "ships", "method", "why"),
    [
        ([0.7, 0.88, 0.8], [0.85], "distilled", "soft-labels", "the student of soft-labels ships"),
        ([0.85], [0.85], "distilled", "soft-labels", "the student of soft-labels ships"),
        ([0.7], [0.6, 0.71], "undistilled", "labels", "labels alone 0.7100: labels alone ship"),
        (
            None,
            [0.95],
            "undistilled",
            "labels",
            "reached accuracy 0.9500 and the teacher 0.9000, so the student was not",
        ),
        ([0.2], None, "distilled", "soft-labels", "--no-undistilled"),
    ],
)
def test_the_best_on_validation_ships(
    tmp_path: Path,
    inputs: Any,
    distilled: list[float] | None,
    undistilled: list[float] | None,
    ships: str,
    method: str,
    why: str,
) -> None:
    out = choose(tmp_path, inputs, distilled, undistilled)
    assert (out / "model.safetensors").read_bytes() == ships.encode()
    lineage = read_lineage(out)
    assert lineage["method"] == lineage["choice"]["method"] == method
    assert why in lineage["choice"]["why"]
    assert not (out / "metrics.jsonl").exists()


def test_labels_asked_for_by_name_are_not_called_a_failure_of_distillation(tmp_path: Path, inputs: Any) -> None:
    inputs.chain.method = "labels"
    out = choose(tmp_path, inputs, None, [0.95])
    assert "as --method labels asks" in read_lineage(out)["choice"]["why"]
