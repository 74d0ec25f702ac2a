"""`stillroom compare`: what it refuses before any work."""

from pathlib import Path

import pytest

from serve.errors import BadInput
from stillroom.commands.compare import Comparison, compare


def test_a_folder_that_cannot_be_made_is_one_message_before_any_training(
    tmp_path: Path, tiny_teacher: Path, task_data: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    given = Comparison(
        teacher=str(tiny_teacher),
        task="text-classification",
        data=str(task_data),
        out=str(tmp_path / "file" / "out"),
        methods=("soft-labels",),
        students=("layers=2,hidden=32,heads=4,ffn=32",),
        threads=1,
    )
    with pytest.raises(BadInput, match=r"--out .* cannot be made: .*file is not a folder"):
        compare(given)
    assert (tmp_path / "file").read_text() == "not a folder"
