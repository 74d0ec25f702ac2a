from pathlib import Path

import pytest

from serve.bundle.replaced_files import replacing


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
