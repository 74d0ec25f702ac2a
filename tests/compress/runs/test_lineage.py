"""What a checkpoint says of where it comes from."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel

from compress.models.pretrained import open_model
from compress.runs.lineage import LINEAGE, base_model_of, read_lineage, save_with_lineage
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
