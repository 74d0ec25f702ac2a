"""`stillroom search` with a tiny teacher: what it trains and chooses, what a second call repeats, and what no student can meet."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_task import examples, write_splits

from compress.models.shapes import Shape, shape_of
from serve.errors import BadInput
from stillroom.cli.make import show_search
from stillroom.commands.search import search
from stillroom.report.search_page import as_good
from stillroom.student_search import machine_latency, trials

Search = Callable[..., dict[str, Any]]
SETTINGS: dict[str, Any] = {
    "task": "text-classification", "tokens": 16, "trials": 3, "trial_steps": 12, "teacher_epochs": 20, "teacher_learning_rate": 5e-3,
    "student_learning_rate": 5e-3, "threads": 1, "batch": 16,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Times few students for a second, and keeps the latency model where nobody else looks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"FITTED": 4, "CHECKED": 2, "SECONDS": 1.0, "TURNS": 6, "TURN_SECONDS": 0.01}.items():
            patch.setattr(machine_latency, name, value)
        patch.setattr("stillroom.student_search.search.CHECK_SECONDS", 0.2)
        patch.setenv("STILLROOM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("data") / "data", examples, (120, 40, 20))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("found") / "found"


@pytest.fixture(scope="module")
def found(shallow_teacher: Path, data: Path, out: Path) -> dict[str, Any]:
    """A search with a budget that every student meets."""
    return search(teacher=str(shallow_teacher), data=str(data), out=str(out), budget_ms=60_000.0, **SETTINGS)


def test_the_best_of_those_that_were_trained_is_chosen_and_timed(found: dict[str, Any], out: Path) -> None:
    rows = found["trials"]
    assert len(rows) == 3
    assert len({row["student"] for row in rows}) == 3
    assert {row["student"]: shape_of(row["student"]) for row in rows} == {
        row["student"]: Shape(*(row[name] for name in ("layers", "hidden", "heads", "ffn"))) for row in rows
    }
    scores = [row["validation"]["value"] for row in rows]
    assert found["chosen"] == rows[scores.index(max(scores))]["student"]
    assert [row["measured_ms"] is not None for row in rows] == [row["student"] == found["chosen"] for row in rows]
    assert found["fitting"] == found["considered"]
    assert all(row["predicted_ms"] > 0 for row in rows)
    kept = json.loads((out / "search.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps({key: value for key, value in found.items() if key != "report"}))


def test_the_command_that_follows_trains_the_chosen_student(
    found: dict[str, Any], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"--student {found['chosen']} " in found["command"] + " "
    assert f"--teacher {out}.work/teacher " in found["command"]
    assert (out.with_name("found.work") / "teacher" / "model.safetensors").is_file()
    show_search(found)
    shown = capsys.readouterr().out
    assert found["chosen"] in shown.replace("\n", " ")
    assert "Predicted times were wrong by" in shown


def test_the_page_names_the_choice_and_holds_no_text_of_the_data(found: dict[str, Any], data: Path, out: Path) -> None:
    page = (out / "search.html").read_text(encoding="utf-8")
    assert found["chosen"] in page
    assert "<svg" in page
    first = json.loads((data / "validation.jsonl").read_text(encoding="utf-8").splitlines()[0])["text"]
    assert first not in page


def test_the_same_call_again_trains_and_times_nothing(
    found: dict[str, Any], shallow_teacher: Path, data: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("this was finished")

    for module, name in ((trials.task_stages, "on_task"), (trials.task_stages, "make_teacher")):
        monkeypatch.setattr(module, name, refused)
    monkeypatch.setattr("stillroom.student_search.search.time_students", refused)
    monkeypatch.setattr(machine_latency, "time_students", refused)
    again = search(teacher=str(shallow_teacher), data=str(data), out=str(out), budget_ms=60_000.0, **SETTINGS)
    same = ("chosen", "trials", "latency_model", "teacher")
    assert {name: again[name] for name in same} == {name: found[name] for name in same}


def test_more_trials_keep_those_that_were_made(
    found: dict[str, Any], shallow_teacher: Path, data: Path, out: Path
) -> None:
    given = SETTINGS | {"trials": 4}
    more = search(teacher=str(shallow_teacher), data=str(data), out=str(out), budget_ms=60_000.0, **given)
    before = {row["student"]: row["validation"] for row in found["trials"]}
    after = {row["student"]: row["validation"] for row in more["trials"]}
    assert len(after) == 4
    assert before.items() <= after.items()


def test_a_student_that_is_not_shown_to_be_worse_is_named(found: dict[str, Any]) -> None:
    others = [row for row in found["trials"] if row["student"] != found["chosen"]]
    assert as_good(found) == [row for row in others if row["less_chosen"]["high"] >= 0]
    assert all(row["less_chosen"]["value"] <= 0 for row in others)


def test_a_budget_that_no_student_meets_is_refused_with_the_least_time_before_any_training(
    found: dict[str, Any], shallow_teacher: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        BadInput,
        match=r"--budget-ms 1e-06 cannot be met here: the smallest student, layers=1,hidden=32.*takes 0\.\d+ ms",
    ):
        search(teacher=str(shallow_teacher), data=str(data), out=str(tmp_path / "none"), budget_ms=1e-6, **SETTINGS)  # fmt: skip
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "none.work" / "teacher").exists()


def test_more_tokens_than_the_teacher_reads_are_refused(shallow_teacher: Path, data: Path, tmp_path: Path) -> None:
    given = SETTINGS | {"tokens": 500}
    with pytest.raises(BadInput, match="--tokens 500 is more than the"):
        search(teacher=str(shallow_teacher), data=str(data), out=str(tmp_path / "none"), budget_ms=1.0, **given)
