"""The verbs as functions."""

from dataclasses import fields
from pathlib import Path

import pytest
from loopback import Asked, answer, serving
from small_profiles import Models, Profiled

import stillroom
from serve.errors import BadInput
from stillroom.inputs.recipe import Recipe, write_recipe


@pytest.mark.parametrize("setting", ["progress", "nonsense"])
def test_what_is_no_setting_is_named_before_any_work(setting: str) -> None:
    with pytest.raises(
        BadInput, match=f"^{setting} is not a setting; the settings are .*layer_map, learning_rate, method"
    ):
        stillroom.distill("teacher", ["corpus.txt"], "out", **{setting: 1})
    with pytest.raises(BadInput, match=f"^{setting} is not a setting; the settings are .*data, data_revision"):
        stillroom.finetune("model", "text-classification", "data", "out", **{setting: 1})


def test_a_recipe_begins_with_what_a_run_cannot_do_without() -> None:
    lines = write_recipe(Recipe(teacher="t", task="text-classification", data="d", out="o")).splitlines()
    assert [line.split(" ")[0] for line in lines[:6]] == ["teacher", "task", "data", "out", "student", "name"]
    names = [line.split(" ")[0] for line in lines]
    assert len(names) == len(set(names))
    # What was left to stillroom stays out.
    assert {each.name for each in fields(Recipe)} - set(names) == {
        "teacher_epochs",
        "student_epochs",
        "soft_weight",
        "budget_ms",
        "stages",
    }


@pytest.mark.slow
def test_profile_from_python_writes_its_report_and_runs_against_an_earlier_one(
    models: Models, earlier: Profiled, tmp_path: Path
) -> None:
    quick = {"seconds": 0.5, "batches": (1,), "lengths": (8,), "threads": 1}
    document = stillroom.profile([models.fast], out=tmp_path / "again", against=earlier.out / "report.json", **quick)
    assert sorted(file.name for file in (tmp_path / "again").iterdir()) == ["report.html", "report.json", "table.md"]
    assert {row["name"] for row in document["regression"]} == {"fast ORT fp32"}
    with pytest.raises(BadInput, match="--sweep: no effect with --paper"):
        stillroom.profile([], paper=True, sweep=True)
    with pytest.raises(BadInput, match="--paper makes its own models; leave MODEL and --against out"):
        stillroom.profile(["a.bundle"], paper=True)


def test_load_from_python_writes_its_report(tmp_path: Path) -> None:
    async def at_once(_: Asked) -> bytes:
        return answer()

    (tmp_path / "texts.txt").write_text("a lamp\n", encoding="utf-8")
    with serving(at_once) as server:
        stillroom.load(server.url, tmp_path / "texts.txt", rate=200, queries=5, out=tmp_path / "loaded")
    assert sorted(file.name for file in (tmp_path / "loaded").iterdir()) == ["load.json", "table.md"]
