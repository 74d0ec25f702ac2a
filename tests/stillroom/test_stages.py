import json
from pathlib import Path

import pytest

from serve.errors import BadInput
from stillroom.recipe import Recipe, read_recipe, resolve, write_recipe
from stillroom.stages import Work, fingerprint


def test_a_finished_stage_is_not_made_again_and_a_changed_input_makes_it_anew(tmp_path: Path) -> None:
    work = Work(tmp_path)
    made = []

    def make(folder: Path) -> None:
        made.append(folder.name)
        (folder / "result").write_text(str(len(made)))

    first = work.stage("teacher", fingerprint("a"), make)
    assert work.stage("teacher", fingerprint("a"), make) == first
    assert (first / "result").read_text() == "1"
    work.stage("teacher", fingerprint("b"), make)
    assert (first / "result").read_text() == "2"
    assert made == ["teacher.partial", "teacher.partial"]


def test_an_unfinished_stage_is_handed_what_it_left_unless_its_inputs_changed(tmp_path: Path) -> None:
    work = Work(tmp_path)

    def dies(folder: Path) -> None:
        (folder / "checkpoint").write_text("half way")
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            work.stage("student", fingerprint("a"), dies)
    assert not (tmp_path / "student").exists()
    seen = {}
    work.stage("student", fingerprint("a"), lambda f: seen.update(a=(f / "checkpoint").is_file()))
    with pytest.raises(KeyboardInterrupt):
        work.stage("other", fingerprint("a"), dies)
    work.stage("other", fingerprint("b"), lambda f: seen.update(b=(f / "checkpoint").is_file()))
    assert seen == {"a": True, "b": False}


def test_clearing_leaves_one_stage_and_what_is_no_stage(tmp_path: Path) -> None:
    work = Work(tmp_path)
    with work.locked():
        for name in ("plan", "teacher", "student"):
            work.stage(name, fingerprint("a"), lambda folder: None)
        (tmp_path / "student").rename(tmp_path / "student.partial")
        work.clear(but="plan")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "made-by-stillroom", "plan"]


def test_two_runs_do_not_share_a_work_folder(tmp_path: Path) -> None:
    with Work(tmp_path).locked(), pytest.raises(BadInput, match="Another run is at work"), Work(tmp_path).locked():
        pass
    with Work(tmp_path).locked():
        pass


def test_a_recipe_comes_back_as_it_was_written(tmp_path: Path) -> None:
    recipe = Recipe(teacher="t", task="text-classification", data="d", out="o", corpus=("a", "b"), seed=3, gate=0.5)
    (tmp_path / "recipe.toml").write_text(write_recipe(recipe))
    assert resolve(read_recipe(tmp_path / "recipe.toml"), {}) == recipe
    assert resolve(read_recipe(tmp_path / "recipe.toml"), {"seed": 9, "gate": None}).seed == 9


def test_a_stage_that_fills_the_disk_says_so_and_is_gone_on_with(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    work = Work(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def make(folder: Path) -> None:
        (folder / "small").write_text("kept")
        (folder / "large").write_bytes(bytes(10_000))

    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
        with pytest.raises(BadInput, match=r"student.partial could not be written: .*File too large.* Make room"):
            work.stage("student", "mark", make)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "student.partial" / "small").read_text() == "kept"
    assert json.loads((tmp_path / "student.partial" / "stage.json").read_text())["fingerprint"] == "mark"
    assert (work.stage("student", "mark", make) / "large").stat().st_size == 10_000
