"""`stillroom compare`: what it refuses before any work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve.errors import BadInput
from stillroom.verbs.compare import Comparison, compare

Given = Callable[..., Comparison]


@pytest.fixture
def given(tmp_path: Path, tiny_teacher: Path, task_data: Path) -> Given:
    """A comparison of a student's two baselines and a method, with changes."""

    def make(**changes: Any) -> Comparison:
        settings: dict[str, Any] = {
            "teacher": str(tiny_teacher), "task": "text-classification", "data": str(task_data), "out": str(tmp_path / "out"),
            "methods": ("soft-labels",), "students": ("layers=2,hidden=32,heads=4,ffn=32",), "threads": 1,
        }  # fmt: skip
        return Comparison(**(settings | changes))

    return make


def test_a_folder_that_cannot_be_made_is_one_message_before_any_training(given: Given, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(BadInput, match=r"--out .* cannot be created: .*file is not a folder"):
        compare(**vars(given(out=str(tmp_path / "file" / "out"))))
    assert (tmp_path / "file").read_text() == "not a folder"


def test_every_method_that_cannot_work_is_told_at_once(given: Given, tmp_path: Path) -> None:
    # What a kill left of a page under way is no other thing.
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".report.html.4711.partial").write_text("<p>", encoding="utf-8")
    for changes, faults in (
        (
            {"methods": ("minilm,minilmv2", "nosuch"), "teacher": "no-such-folder/x"},
            ("--method minilm,minilmv2", "Give --method again for each", "--method nosuch", "no-such-folder/x"),
        ),
        ({"methods": ("minilm", "xtremedistil-transfer")}, ("no --corpus was given", "no --source-data was given")),
    ):
        with pytest.raises(BadInput) as told:
            compare(**vars(given(**changes)))
        assert all(fault in told.value.message for fault in faults)
        assert "holds other files" not in told.value.message


def test_every_repeated_value_that_cannot_work_is_told_at_once(given: Given, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a lamp\n", encoding="utf-8")
    with pytest.raises(BadInput) as told:
        compare(
            **vars(given(
                methods=("minilmv2", "minilm"), corpus=(str(tmp_path / "text.txt"),), starts=("alternate", "last", "first"),
                students=("layers=3,hidden=32,heads=4,ffn=32", "layers=2,hidden=16,heads=4,ffn=32"), teacher_layers=(4, 7, 9),
            ))
        )  # fmt: skip
    said = told.value.message
    assert said.startswith("6 faults were found")
    assert "--start alternate for a student of 3 layers needs a teacher of at least 5 layers" in said
    for start in ("alternate", "last", "first"):
        assert f"--start {start} copies the teacher's layers, but layers=2,hidden=16,heads=4,ffn=32" in said
    assert "layer 7" in said
    assert "layer 9" in said
    assert not (tmp_path / "out").exists()
