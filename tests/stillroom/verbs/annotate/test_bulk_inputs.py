"""Which files `stillroom annotate` takes of a folder or a pattern, and which it refuses."""

import json
import os
from pathlib import Path

import pytest
from test_bulk import parts_of, refused, settings_of

from serve.errors import BadInput
from stillroom.verbs.annotate.inputs import inputs_of, is_inside
from stillroom.verbs.annotate.parts import MANIFEST
from stillroom.verbs.annotate.run import annotate_files


@pytest.fixture
def given(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    for name in ("a.txt", "x/b.txt", "x/y/c.txt", "x/_old/d.txt", ".e.txt", "x/f[1].txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("fly\n")
    return folder


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", ["a.txt", "x/b.txt", "x/f[1].txt", "x/y/c.txt"]),
        ("**", ["a.txt", "x/b.txt", "x/f[1].txt", "x/y/c.txt"]),
        ("*", ["a.txt"]),
        ("*/*.txt", ["x/b.txt", "x/f[1].txt"]),
        ("**/*.txt", ["a.txt", "x/b.txt", "x/f[1].txt", "x/y/c.txt"]),
        ("**/**/**/*.txt", ["a.txt", "x/b.txt", "x/f[1].txt", "x/y/c.txt"]),
        ("**/x/**/[bc].txt", ["x/b.txt", "x/y/c.txt"]),
        ("x/?.txt", ["b.txt"]),
        ("x/f[1].txt", ["f[1].txt"]),
        ("**/y/*", ["x/y/c.txt"]),
        ("none/*", None),
        ("x", ["b.txt", "f[1].txt", "y/c.txt"]),
    ],
)
def test_each_file_of_a_pattern_is_found_once(pattern: str, names: list[str] | None, given: Path) -> None:
    if names is None:
        with pytest.raises(BadInput, match="no file is there"):
            inputs_of(f"{given}/{pattern}")
        return
    assert [each.name for each in inputs_of(f"{given}/{pattern}")] == names


@pytest.mark.parametrize("pattern", ["", "/**/*.txt"])
def test_links_to_folders_are_not_entered_and_a_link_to_no_file_is_told(pattern: str, given: Path) -> None:
    before = [each.name for each in inputs_of(f"{given}{pattern}")]
    (given / "self").symlink_to(".")
    (given / "x" / "up").symlink_to("..")
    assert [each.name for each in inputs_of(f"{given}{pattern}")] == before
    (given / "linked.txt").symlink_to("a.txt")
    assert [each.name for each in inputs_of(f"{given}{pattern}")] == sorted([*before, "linked.txt"])
    (given / "x" / "lost.txt").symlink_to("nowhere.txt")
    with pytest.raises(BadInput, match=r"these links lead to no file: .*/x/lost.txt; remove them"):
        inputs_of(f"{given}{pattern}")


@pytest.mark.parametrize("pattern", ["", "/**/*.txt"])
def test_a_folder_that_may_not_be_read_is_told(pattern: str, given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: Path) -> object:  # permissions do not stop the superuser, whom tests may run as
        if Path(path).name == "y":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(BadInput, match=r"/x/y cannot be read \(Permission denied\)"):
        inputs_of(f"{given}{pattern}")


@pytest.mark.parametrize(
    ("output", "given", "inside"),
    [
        ("{}/x/out", "{}", True),
        ("{}", "{}", True),
        ("file://{}/out", "{}", True),
        ("{}/out", "file://{}", True),
        ("{}/out", "{}/**/*.txt", True),
        ("{}/x/out", "{}/x/**", True),
        ("{}/linked/out", "{}/x", True),
        ("{}/out", "{}/x/**", False),
        ("{}/out", "{}/*.txt", False),
        ("{}2", "{}", False),
        ("{}/out", "{}/a.txt", False),
        ("s3://b{}", "{}", False),
        ("s3://b/d/out", "s3://b/d", True),
        ("s3://b/d/out/", "s3://b/d/", True),
        ("s3://b/d", "s3://b", True),
        ("s3://b/d/out", "s3://b/d/**/*.jsonl", True),
        ("s3://b/out", "s3://b/d", False),
        ("s3://b/d2", "s3://b/d", False),
        ("gs://b/d/out", "s3://b/d", False),
        ("s3://b/d/out", "s3://b/d/*.jsonl", False),
    ],
)
def test_an_output_among_the_inputs_is_known(output: str, given: str, inside: bool, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "a.txt").touch()
    (tmp_path / "linked").symlink_to("x")
    assert is_inside(output.format(tmp_path), given.format(tmp_path)) == inside


def test_an_output_within_a_pattern_is_refused(cities: Path, given: Path) -> None:
    assert "is in the input folder, and its parts would be inputs of the next run" in refused(
        cities, f"{given}/**/*.txt", given / "out"
    )
    assert "is in the input folder" in refused(cities, given, f"file://{given}/out")
    assert not (given / "out").exists()


def test_names_of_any_bytes_are_kept_and_those_too_long_for_parts_are_refused(cities: Path, tmp_path: Path) -> None:
    given, out = tmp_path / "in", tmp_path / "out"
    given.mkdir()
    odd = os.fsdecode(b"\xff\xc3\xa9.txt")
    (given / odd).write_text("fly\n")
    longest = "x" * 177 + ".txt"
    (given / longest).write_text("fly\n")
    for before in (0, 2):
        assert annotate_files(settings_of(cities, given, out))["parts_before"] == before
    assert set(json.loads((out / MANIFEST).read_bytes())["inputs"]) == {odd, longest}
    assert len(parts_of(out, longest)) == len(parts_of(out, odd)) == 1
    (given / f"x{longest}").write_text("fly\n")
    assert "would have names of more than 213 bytes: " in refused(cities, given, tmp_path / "other")
    assert not (tmp_path / "other").exists()
