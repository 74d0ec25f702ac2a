"""`run --promise-data`: promises are made on the texts of that file, and the file decides the bundle."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_task import examples, write_rows

import stillroom
from serve.errors import BadInput

SETTINGS: dict[str, Any] = {
    "task": "text-classification", "student": "layers=1,hidden=32,heads=4,ffn=32", "teacher_epochs": 20, "teacher_learning_rate": 5e-3,
    "student_learning_rate": 5e-3, "student_epochs": 8, "threads": 1, "batch": 16, "latency_seconds": 0.5, "gate": 0.0, "teacher_gate": 0.0,
}  # fmt: skip


@pytest.fixture
def asked(shallow_teacher: Path, task_data: Path, tmp_path: Path) -> dict[str, Any]:
    file = write_rows(tmp_path / "apart.jsonl", examples(90, seed=9))
    return SETTINGS | {"teacher": str(shallow_teacher), "data": str(task_data), "promise_data": str(file)}


def test_a_file_without_a_promise_is_refused(asked: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--promise-data needs --promise"):
        stillroom.run(**asked, out=tmp_path / "none")
    assert not (tmp_path / "none.work").exists()


@pytest.mark.slow
def test_promises_are_made_on_the_file_and_another_file_is_another_bundle(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    asked |= {"promises": ("precision=0.5",)}
    out = tmp_path / "kept"
    stillroom.run(**asked, out=out)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert {each["made_on"]["texts"] for made in report["promises"].values() for each in made} == {90}
    write_rows(Path(asked["promise_data"]), examples(80, seed=9))
    with pytest.raises(BadInput, match="a bundle of other inputs or settings"):
        stillroom.run(**asked, out=out)
