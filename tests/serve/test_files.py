import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import PATIENCE_S

from serve.errors import BadInput
from serve.files import disk_errors_reported, lock_at, locked, replacing, replacing_folder


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
