"""`run` within a latency budget: what goes together, what a slow student gets, and `--student auto` and promises from teacher to bundle."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quick_search import quick_searches
from small_task import examples, write_rows, write_splits

import stillroom
from compress.models.shapes import shape_of
from serve.errors import BadInput
from serve.tasks import open_bundle
from stillroom.verbs.run import pipeline, stages
from stillroom.verbs.run.stages import BudgetMissed

SETTINGS: dict[str, Any] = {
    "task": "text-classification", "tokens": 16, "teacher_epochs": 20, "teacher_learning_rate": 5e-3, "student_learning_rate": 5e-3,
    "student_epochs": 2, "threads": 1, "batch": 16, "latency_seconds": 1.0, "gate": 0.0, "teacher_gate": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_searches(tmp_path_factory.mktemp("cache")) as patch:
        patch.setattr("stillroom.verbs.run.pipeline.MOST_TRIALS", 2)
        patch.setattr("stillroom.verbs.run.pipeline.TRIAL_STEPS", 10)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("data") / "data", examples, (120, 40, 20))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget_ms": None}, "--student auto needs --budget-ms"),
        ({"max_minutes": 5.0}, "--max-minutes cannot be planned before the student is known"),
        ({"start": "first"}, "Leave --teacher-labels and --start out"),
        ({"latency_seconds": 0.0}, "Give --latency-seconds above 0"),
        ({"promise_data": "apart.jsonl"}, "--promise-data needs --promise"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    asked = SETTINGS | {"teacher": "none", "data": "none", "student": "auto", "budget_ms": 1.0} | given
    with pytest.raises(BadInput, match=message):
        stillroom.run(**asked, out=tmp_path / "none")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_auto_ships_a_student_that_was_found_and_met_the_budget(
    shallow_teacher: Path, data: Path, tmp_path: Path
) -> None:
    asked = SETTINGS | {"teacher": str(shallow_teacher), "data": str(data), "student": "auto", "budget_ms": 60_000.0}
    out = tmp_path / "found"
    document = stillroom.run(**asked, out=out)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    chosen = report["found"]["chosen"]
    assert chosen in (out / "recipe.toml").read_text(encoding="utf-8")
    assert len(report["found"]["trials"]) == 2
    assert chosen in (out / "report.html").read_text(encoding="utf-8")
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"] == shape_of(chosen).layers
    assert open_bundle(out).manifest.task == "text-classification"
    made = (out / "manifest.json").stat().st_mtime_ns
    assert stillroom.run(**asked, out=out)["bundle"] == document["bundle"]
    assert (out / "manifest.json").stat().st_mtime_ns == made
    for changed in ({"budget_ms": 50_000.0}, {"search_minutes": 5.0}, {"student": chosen}):
        with pytest.raises(BadInput, match="a bundle of other inputs or settings"):
            stillroom.run(**(asked | changed), out=out)


@pytest.mark.slow
def test_a_student_that_is_too_slow_in_full_gives_way_to_a_faster_one_and_is_not_trained_again(
    shallow_teacher: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SETTINGS | {"teacher": str(shallow_teacher), "data": str(data), "student": "auto", "budget_ms": 60_000.0}
    out, real, seen = tmp_path / "next", stages.check_met, []

    def too_slow(inputs: Any, *given: Any) -> None:
        seen.append(str(inputs.shape))
        if len(seen) == 1:
            raise BudgetMissed("It is too slow.", 70_000.0)
        if len(seen) == 2:
            raise KeyboardInterrupt
        real(inputs, *given)

    def two_students(*given: Any) -> tuple[list[str], dict[str, Any]]:
        _, found = search(*given)
        return ["layers=2,hidden=32,heads=4,ffn=64", "layers=1,hidden=32,heads=4,ffn=32"], found

    search = pipeline.found_students
    monkeypatch.setattr(pipeline, "found_students", two_students)
    monkeypatch.setattr(stages, "check_met", too_slow)
    with pytest.raises(KeyboardInterrupt):
        stillroom.run(**asked, out=out)
    stillroom.run(**asked, out=out)
    first, second, third = seen
    assert first != second == third
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["found"]["shipped"] == second
    assert report["found"]["missed"] == [{"student": first, "measured_ms": 70_000.0}]
    assert f"{second} ships." in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_named_student_that_is_too_slow_does_not_ship(shallow_teacher: Path, data: Path, tmp_path: Path) -> None:
    asked = SETTINGS | {
        "teacher": str(shallow_teacher), "data": str(data), "student": "layers=1,hidden=32,heads=4,ffn=32", "budget_ms": 1e-6,
    }  # fmt: skip
    out = tmp_path / "slow"
    with pytest.raises(
        BudgetMissed, match=r"on 16 tokens, and the budget is 1e-06 ms.*Report: .*slow\.work/report\.html"
    ):
        stillroom.run(**asked, out=out)
    assert not out.exists()
    assert (tmp_path / "slow.work" / "report.html").is_file()
    assert stillroom.run(**(asked | {"budget_ms": 60_000.0}), out=out)["bundle"] == str(out)


@pytest.mark.slow
def test_promises_are_made_on_the_file_and_another_file_is_another_bundle(
    shallow_teacher: Path, task_data: Path, tmp_path: Path
) -> None:
    file, out = write_rows(tmp_path / "apart.jsonl", examples(90, seed=9)), tmp_path / "kept"
    student = {"student": "layers=1,hidden=32,heads=4,ffn=32", "student_epochs": 8, "latency_seconds": 0.5}
    given = {
        "teacher": str(shallow_teacher),
        "data": str(task_data),
        "promise_data": str(file),
        "promises": ("precision=0.5",),
    }
    asked = {name: value for name, value in (SETTINGS | student | given).items() if name != "tokens"}
    stillroom.run(**asked, out=out)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert {each["made_on"]["texts"] for made in report["promises"].values() for each in made} == {90}
    write_rows(file, examples(80, seed=9))
    with pytest.raises(BadInput, match="a bundle of other inputs or settings"):
        stillroom.run(**asked, out=out)
