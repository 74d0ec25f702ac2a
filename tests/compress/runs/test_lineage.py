"""What a checkpoint says of where it comes from, what is doubted of a training, and which student ships."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModel

from compress.models.configurations import LINEAGE
from compress.models.pretrained import open_model
from compress.runs import task_stages
from compress.runs.lineage import base_model_of, loss_warnings, read_lineage, save_with_lineage
from serve.errors import BadInput


def encoder(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder)


def test_the_name_on_the_hub_is_handed_on_from_checkpoint_to_checkpoint(tiny_teacher: Path, tmp_path: Path) -> None:
    opened = open_model(str(tiny_teacher))
    assert base_model_of(opened) is None
    save_with_lineage(encoder(opened.folder), opened, tmp_path / "distilled", {"base_model": "bert-base-uncased"})
    student = open_model(str(tmp_path / "distilled"))
    assert base_model_of(student) == "bert-base-uncased"
    save_with_lineage(encoder(student.folder), student, tmp_path / "tuned", {"method": "labels"})
    assert read_lineage(tmp_path / "tuned")["base_model"] == "bert-base-uncased"
    assert read_lineage(tmp_path / "tuned")["teacher"] == "distilled"


def test_a_damaged_lineage_is_told_when_it_is_read_and_costs_no_training(tiny_teacher: Path, tmp_path: Path) -> None:
    opened = open_model(str(tiny_teacher))
    save_with_lineage(encoder(opened.folder), opened, tmp_path / "model", {})
    (tmp_path / "model" / LINEAGE).write_text("{")
    with pytest.raises(BadInput, match=r"lineage.json cannot be read"):
        read_lineage(tmp_path / "model")
    damaged = open_model(str(tmp_path / "model"))
    save_with_lineage(encoder(damaged.folder), damaged, tmp_path / "next", {})
    assert json.loads((tmp_path / "next" / LINEAGE).read_text())["base_model"] is None


def curve(*values: float) -> list[tuple[int, float]]:
    return list(enumerate(values, 1))


def test_a_falling_loss_is_not_warned_of() -> None:
    assert loss_warnings(curve(*(1 / step + 0.2 * (step % 2) for step in range(1, 50))), "relations") == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.5] * 40, "the loss did not fall"),
        ([0.5 + 0.01 * i for i in range(40)], "the loss did not fall"),
        ([1.0] * 20 + [0.0] * 20, "nearly 0"),
        ([1.0] * 20 + [1e-7] * 20, "nearly 0"),
    ],
)
def test_flat_and_vanishing_losses_are_warned_of(values: list[float], said: str) -> None:
    (told,) = loss_warnings(curve(*values), "relations")
    assert told.startswith("relations: ")
    assert said in told


def test_few_points_are_not_warned_of() -> None:
    assert loss_warnings(curve(1.0, 1.0, 1.0), "relations") == []


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
        (None, [0.95], "undistilled", "labels", "0.9500 and the teacher 0.9000"),
        ([0.2], None, "distilled", "soft-labels", "--no-undistilled"),
    ],
)
def test_the_best_on_validation_ships(
    tmp_path: Path, inputs: Any, distilled: Any, undistilled: Any, ships: str, method: str, why: str
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
