import fcntl
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from compress.runs.resumable_stages import Workdir
from compress.runs.stages import fingerprint
from serve.errors import BadInput
from stillroom.inputs.recipe import Recipe, read_recipe, resolve, write_recipe


def test_a_finished_stage_is_not_made_again_and_a_changed_input_makes_it_anew(tmp_path: Path) -> None:
    work = Workdir(tmp_path)
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
    work = Workdir(tmp_path)

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
    work = Workdir(tmp_path)
    with work.locked():
        for name in ("plan", "teacher", "student"):
            work.stage(name, fingerprint("a"), lambda folder: None)
        (tmp_path / "student").rename(tmp_path / "student.partial")
        work.clear(but=["plan"])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "made-by-stillroom", "plan"]


def test_two_runs_do_not_share_a_work_folder(tmp_path: Path) -> None:
    with (
        Workdir(tmp_path).locked(),
        pytest.raises(BadInput, match="Another run uses"),
        Workdir(tmp_path).locked(),
    ):
        pass
    with Workdir(tmp_path).locked():
        pass


def test_a_lock_whose_holder_has_removed_it_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def after_the_other_has_ended(file: int, how: int) -> None:
        (tmp_path / "lock").unlink()
        flock(file, how)

    with monkeypatch.context() as late:
        late.setattr(fcntl, "flock", after_the_other_has_ended)
        with pytest.raises(BadInput, match="Another run uses"), Workdir(tmp_path).locked():
            pass
    with Workdir(tmp_path).locked():
        pass


def test_a_scratch_folder_is_empty_at_first_and_gone_with_its_work_afterwards(tmp_path: Path) -> None:
    work = Workdir(tmp_path / "out.export-work")
    with suppress(KeyboardInterrupt), work.scratch() as folder:
        (folder / "half a graph").touch()
        with pytest.raises(BadInput, match="Another run uses"), Workdir(work.root).scratch():
            pass
        assert (folder / "half a graph").exists()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    # What a kill leaves.
    (folder / "deep").mkdir(parents=True)
    (work.root / "made-by-stillroom").touch()
    with work.scratch() as folder:
        assert list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_leaving_run_removes_nothing_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, unlink = tmp_path / "work", Path.unlink
    with ExitStack() as next_run:

        def unlink_and_wait(path: Path, *, missing_ok: bool = False) -> None:
            unlink(path, missing_ok=missing_ok)
            if path.name == "lock":
                (next_run.enter_context(Workdir(root).scratch()) / "its own").touch()

        with monkeypatch.context() as slow:
            slow.setattr(Path, "unlink", unlink_and_wait)
            with Workdir(root).scratch():
                pass
        assert sorted(path.name for path in root.rglob("*")) == ["its own", "lock", "made-by-stillroom", "scratch"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_kind_is_never_cleared(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "diary").touch()
    with pytest.raises(BadInput, match="already exists and stillroom did not make it"), Workdir(tmp_path).scratch():
        pass
    assert (tmp_path / "scratch" / "diary").exists()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


STAGE_DAMAGE: dict[str, Callable[[Path], object]] = {
    "model.safetensors": cut,
    "config.json": cut,
    "logits.npy": cut,
    "lineage.json": cut,
    "maps.safetensors": cut,
    "model.safetensors, which is gone": lambda file: file.with_name("model.safetensors").unlink(),
}


@pytest.mark.parametrize("damaged", STAGE_DAMAGE)
def test_a_damaged_stage_is_refused_with_its_folder(damaged: str, tiny_teacher: Path, tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        shutil.copytree(tiny_teacher, folder, dirs_exist_ok=True)
        np.save(folder / "logits.npy", np.zeros((40, 3), np.float32))
        (folder / "lineage.json").write_text('{"role": "student"}')
        save_file({"map": torch.zeros(8, 8)}, folder / "maps.safetensors")

    done = Workdir(tmp_path).stage("student", "mark", make)
    assert Workdir(tmp_path).stage("student", "mark", make) == done
    STAGE_DAMAGE[damaged](done / damaged)
    for ask in (lambda w: w.finished("student", "mark"), lambda w: w.stage("student", "mark", make)):
        with pytest.raises(BadInput, match=f"{done} of an earlier call is damaged: .* Remove it") as refused:
            ask(Workdir(tmp_path))
        assert "save_pretrained" not in str(refused.value)
    assert not Workdir(tmp_path).finished("student", "another mark")
    shutil.rmtree(done)
    assert Workdir(tmp_path).stage("student", "mark", make) == done


def test_a_recipe_comes_back_as_it_was_written(tmp_path: Path) -> None:
    recipe = Recipe(teacher="t", task="text-classification", data="d", out="o", corpus=("a", "b"), seed=3, gate=0.5)
    (tmp_path / "recipe.toml").write_text(write_recipe(recipe))
    assert resolve(read_recipe(tmp_path / "recipe.toml"), {}) == recipe
    assert resolve(read_recipe(tmp_path / "recipe.toml"), {"seed": 9, "gate": None}).seed == 9


def test_a_stage_that_fills_the_disk_says_so_and_is_gone_on_with(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    work = Workdir(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def make(folder: Path) -> None:
        (folder / "small").write_text("kept")
        (folder / "large").write_bytes(bytes(10_000))

    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
        with pytest.raises(BadInput, match=r"student.partial could not be written: .*File too large. Make room"):
            work.stage("student", "mark", make)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "student.partial" / "small").read_text() == "kept"
    assert json.loads((tmp_path / "student.partial" / "stage.json").read_text())["fingerprint"] == "mark"
    assert (work.stage("student", "mark", make) / "large").stat().st_size == 10_000
