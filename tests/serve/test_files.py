import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import PATIENCE_S

from serve.errors import BadInput
from serve.files import (
    JSON_LINES,
    disk_errors_reported,
    fill,
    lock_at,
    locked,
    output,
    path_beside,
    replacing,
    replacing_folder,
    vacant,
)


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    with replacing(target) as beside:
        beside.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_what_fails_while_it_writes_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")

    def written() -> None:
        with replacing(target) as beside:
            beside.write_text("ne")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        written()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_replaced_in_one_step_and_stays_if_filling_it_fails(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    with replacing_folder(target) as beside:
        (beside / "old").touch()
    with pytest.raises(KeyError), replacing_folder(target, alone=True) as beside:
        raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["bundle", "old"]
    with replacing_folder(target, synced=True) as beside:
        (beside / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["bundle", "new"]


def test_a_folder_that_a_kill_left_aside_is_back_before_the_next_is_filled(tmp_path: Path) -> None:
    target = tmp_path / "cache"
    (tmp_path / ".cache.old").mkdir()  # the kill was between the two renames
    (tmp_path / ".cache.old" / "kept").touch()
    with pytest.raises(KeyError), replacing_folder(target, alone=True):
        raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["cache", "kept"]


def test_a_lock_is_waited_for_with_a_note_and_a_removed_file_is_not_locked(tmp_path: Path) -> None:
    path, noted = tmp_path / "lock", threading.Event()

    def second() -> None:
        with locked(path, waiting=noted.set):
            path.unlink()

    with ThreadPoolExecutor(1) as pool, path.open("w") as file:
        with locked(path):
            assert not lock_at(path, file.fileno())
            other = pool.submit(second)
            assert noted.wait(PATIENCE_S)
        other.result()
        assert not lock_at(path, file.fileno())


def test_a_full_disk_is_reported_once_and_other_errors_as_they_are(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device", "file")
    in_rust = ValueError("I/O error: No space left on device (os error 28)")
    for error in (full, in_rust):
        with (
            pytest.raises(BadInput, match=r"^weights could not be written: .*No space left on device.*\. Make room"),
            disk_errors_reported("stage"),
            disk_errors_reported("weights"),
        ):
            raise error
    with pytest.raises(PermissionError), disk_errors_reported("weights"):
        raise PermissionError(13, "Permission denied")
    with (
        pytest.raises(BadInput, match=r"^weights cannot be written \(Permission denied\); give another$"),
        disk_errors_reported("weights", otherwise="give another"),
    ):
        raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("given", "endings", "message"),
    [
        pytest.param("nowhere", None, "is a link to gone, which is not there", id="a link that leads nowhere"),
        pytest.param("notes.txt", None, "already exists and is not a folder", id="a file"),
        pytest.param("notes.txt/a/b", None, "notes.txt is not a folder", id="below a file"),
        pytest.param("model.onnx", None, "ends in .onnx like a file", id="a folder with the name of a file"),
        pytest.param("/proc/model", None, "this user may not write in /proc", id="a folder that may not be written"),
        pytest.param("n" * 250, None, "File name too long", id="a long name"),
        pytest.param("mine", JSON_LINES, "already exists and is not a file", id="a folder"),
        pytest.param("/dev/null", JSON_LINES, "already exists and is not a file", id="a device"),
        pytest.param(
            "a.csv", JSON_LINES, "ends in .csv, and what is written there ends in .jsonl", id="another ending"
        ),
        pytest.param("a.JSONL.gz", JSON_LINES, "ends in .gz", id="packed"),
        pytest.param("a", JSON_LINES, "has no ending", id="no ending"),
        pytest.param("none/a.jsonl", JSON_LINES, "none, which does not exist: there is no folder", id="in no folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_done(
    given: str, endings: tuple[str, ...] | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "mine").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInput, match=f"^--out {given} .*{message}.*\\. Give another (folder|file|path)"):
        output(given, endings=endings)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_that_was_begun_under_another_ending_may_go_on(tmp_path: Path) -> None:
    begun = tmp_path / "answers.json"
    with pytest.raises(BadInput):
        output(begun, endings=JSON_LINES)
    (tmp_path / "answers.json.lineage.json").touch()
    assert output(begun, endings=JSON_LINES) == begun


def test_a_place_is_found_from_the_home_folder_and_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert output("~/a/b") == tmp_path / "a" / "b"
    assert output(Path()) == tmp_path / "here"
    assert output("a.ndjson", endings=JSON_LINES) == tmp_path / "here" / "a.ndjson"
    assert path_beside(".", ".work") == tmp_path / "here.work"
    assert path_beside("a/b", ".work") == Path("a/b.work")
    assert path_beside("/", ".work") == Path("/.work")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_an_empty_folder_that_is_there_is_filled_and_what_makes_it_whole_comes_last(tmp_path: Path) -> None:
    volume, link = tmp_path / "volume", tmp_path / "link"
    (volume / "lost+found").mkdir(parents=True)
    link.symlink_to(volume)
    there = volume.stat().st_ino

    def write(sync: object = None) -> None:
        with replacing_folder(link, last="manifest.json", synced=True) as beside:
            (beside / "onnx").mkdir()
            (beside / "onnx" / "model.onnx").write_text("weights")
            if sync is None:
                (beside / "manifest.json").write_text("{}")

    assert vacant(link, "manifest.json")
    with pytest.raises(FileNotFoundError):
        write("stopped before the last file")
    assert (volume / "onnx" / "model.onnx").exists()
    assert not (volume / "manifest.json").exists()
    assert vacant(link, "manifest.json"), "the same command may go on"
    (volume / "onnx" / "model_fp16.onnx").touch()  # of a call that was killed, with more variants
    write()
    assert not vacant(link, "manifest.json")
    assert link.is_symlink()
    assert volume.stat().st_ino == there
    assert sorted(path.name for path in volume.rglob("*")) == ["lost+found", "manifest.json", "model.onnx", "onnx"]
    with replacing_folder(link, last="manifest.json") as beside:  # a whole one is replaced where the link leads
        (beside / "manifest.json").write_text("[]")
    assert link.is_symlink()
    assert [path.name for path in volume.iterdir()] == ["manifest.json"]


def test_a_file_of_the_users_keeps_a_folder_from_being_filled(tmp_path: Path) -> None:
    assert vacant(tmp_path / "new", "config.json")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert not vacant(tmp_path / "mine", "config.json")
    (tmp_path / "probed").mkdir()
    (tmp_path / "probed" / ".probed.0a1b2c3d.partial").mkdir()  # by another process, which tries whether it may write
    assert vacant(tmp_path / "probed", "config.json")
    assert not vacant(tmp_path / "mine" / "thesis.txt", "config.json")
    (tmp_path / "new").mkdir()
    (tmp_path / "source" / "deep").mkdir(parents=True)
    (tmp_path / "source" / "config.json").touch()
    (tmp_path / "source" / "deep" / "a").touch()
    fill(tmp_path / "new", tmp_path / "source", "config.json")
    assert sorted(path.name for path in (tmp_path / "new").rglob("*")) == ["a", "config.json", "deep"]
