"""A student of `run` that starts from a checkpoint of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_task import make_teacher

from compress.models.families import encoder_of
from compress.models.initialise import student_of
from compress.models.pretrained import load_encoder, open_model, save_tokenizer
from compress.models.shapes import Shape
from compress.runs import task_stages
from compress.runs.open_task import open_task
from compress.runs.task_inputs import TaskInputs
from compress.settings import TaskSettings
from compress.tasks import TEXT_CLASSIFICATION
from serve.errors import BadInput


@pytest.fixture
def body(tiny_teacher: Path, tmp_path: Path) -> Path:
    """Two layers, as `distill` leaves them; its weights are of no teacher layer."""
    opened = open_model(str(tiny_teacher))
    student, _ = student_of(load_encoder(opened, seed=5), Shape(2, 32, 4, 48), seed=5, new_layers=True)
    folder = tmp_path / "body"
    student.save_pretrained(folder)
    save_tokenizer(opened, folder)
    return folder


def opened(tiny_teacher: Path, task_data: Path, tmp_path: Path, **more: Any) -> TaskInputs:
    given = {"teacher": str(tiny_teacher), "task": "text-classification", "data": str(task_data), "threads": 1} | more
    return open_task(TaskSettings(**given), tmp_path)


def test_a_start_gives_shape_and_weights_and_gets_a_head(
    tiny_teacher: Path, task_data: Path, tmp_path: Path, body: Path
) -> None:
    inputs = opened(tiny_teacher, task_data, tmp_path, start=str(body))
    assert inputs.shape == Shape(2, 32, 4, 48)
    assert inputs.chain.method == "soft-labels"
    assert not any("start at random" in warning for warning in inputs.warnings)
    start = tmp_path / "start"
    start.mkdir()
    task_stages.make_start(start, inputs, tiny_teacher)
    found = task_stages.load_stage(start, inputs)
    theirs = dict(load_encoder(open_model(str(body)), seed=0).named_parameters())
    ours = dict(encoder_of(found).named_parameters())
    assert any("layer.1." in name for name in theirs)
    for name, value in ours.items():
        if name in theirs:
            torch.testing.assert_close(value, theirs[name])
    assert open_model(str(start)).head_for(TEXT_CLASSIFICATION) == inputs.labels


def test_a_start_with_another_activation_names_it(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> None:
    teacher = open_model(str(tiny_teacher))
    shape = Shape(2, 32, 4, 48, "relu")
    student, _ = student_of(load_encoder(teacher, seed=5), shape, seed=5)
    student.save_pretrained(tmp_path / "relu")
    save_tokenizer(teacher, tmp_path / "relu")
    start = {"start": str(tmp_path / "relu")}
    for named in ({}, {"student": str(shape)}):
        assert opened(tiny_teacher, task_data, tmp_path, **start, **named).shape == shape
    plain = "layers=2,hidden=32,heads=4,ffn=48"
    with pytest.raises(BadInput, match=f"activation=relu, and --student is {plain}"):
        opened(tiny_teacher, task_data, tmp_path, **start, student=plain)


def test_what_does_not_fit_a_start_is_refused(tiny_teacher: Path, task_data: Path, tmp_path: Path, body: Path) -> None:
    with pytest.raises(BadInput, match=r"ffn=48, and --student is 3x384\. Leave --student out"):
        opened(tiny_teacher, task_data, tmp_path, start=str(body), student="3x384")
    with pytest.raises(BadInput, match=r"--start .*nowhere.* does not exist"):
        opened(tiny_teacher, task_data, tmp_path, start=str(tmp_path / "nowhere"))
    other = make_teacher(tmp_path / "other")
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8").replace('"refund"', '"refunds"'), encoding="utf-8")
    with pytest.raises(BadInput, match="do not share a tokenizer"):
        opened(tiny_teacher, task_data, tmp_path, start=str(other))
