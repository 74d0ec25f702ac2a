"""The files that people have: packed, in parts, with names in capitals, in folders; and what is said of others."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from compress.data.columns import Columns
from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
from compress.data.splits import read_splits
from compress.data.texts import read_texts
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from serve.errors import BadInput

ROWS = [{"text": f"text {i}", "label": "ab"[i % 2]} for i in range(4)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS)


def folder_of(path: Path, files: dict[str, str]) -> Path:
    """A folder with `files`, by their names."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content, encoding="utf-8")
    return path


def texts_of(path: Path) -> tuple[int, int, int]:
    splits = read_splits(str(path), TEXT_CLASSIFICATION)
    return len(splits.train), len(splits.validation), len(splits.test)


@pytest.mark.parametrize("name", ["jsonl", "csv", "json", "ndjson", "JSONL", "tsv"])
def test_a_file_is_read_whatever_the_case_of_its_name_and_packed_or_not(tmp_path: Path, name: str) -> None:
    content = {"csv": TABLE, "tsv": TABLE.replace(",", "\t"), "json": json.dumps(ROWS)}.get(name, LINES)
    for train, test in ((f"train.{name}", f"TEST.{name}"), (f"Train.{name}.gz", f"test.{name}.GZ")):
        for file in (train, test):
            data = gzip.compress(content.encode()) if file.lower().endswith(".gz") else content.encode()
            (tmp_path / file).write_bytes(data)
            assert [example.text for example in read_examples(tmp_path / file, TEXT_CLASSIFICATION)] == [
                row["text"] for row in ROWS
            ]
            assert len(read_texts(tmp_path / file)) == 4
        assert texts_of(tmp_path) == (3, 1, 4)
        for file in (train, test):
            (tmp_path / file).unlink()


def test_a_packed_array_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.data.file_formats.MOST_ARRAY_BYTES", 1000)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS * 100).encode()))
    with pytest.raises(BadRows, match="is an array of over 1,000 bytes"):
        read_examples(tmp_path / "a.json.gz", TEXT_CLASSIFICATION)


def test_the_parts_of_a_split_are_read_together_and_a_missing_one_is_told(tmp_path: Path) -> None:
    parts = {f"train-{i:05}-of-00002.jsonl": LINES for i in range(2)}
    folder = folder_of(tmp_path, parts | {"test-00000-of-00001-a1b2c3.jsonl": LINES, "eval.jsonl": LINES})
    assert texts_of(folder) == (8, 4, 4)
    (folder / "train-00001-of-00002.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(BadRows, match=r"train-00001-of-00002\.jsonl, line 1: has no `label`"):
        read_splits(str(folder), TEXT_CLASSIFICATION)
    (folder / "train-00001-of-00002.jsonl").unlink()
    with pytest.raises(BadInput, match=r"holds train-00000-of-00002\.jsonl, and by these names train has 2 parts"):
        read_splits(str(folder), TEXT_CLASSIFICATION)
    for other in ("train-00000-of-00002.csv", "train-00001-of-00003.jsonl"):
        (folder / other).write_text(TABLE)
        with pytest.raises(BadInput, match="by these names train has 2 parts"):
            read_splits(str(folder), TEXT_CLASSIFICATION)
        (folder / other).unlink()
    (folder / "train.csv").write_text(TABLE)
    with pytest.raises(BadInput, match=r"holds train\.csv and train-00000-of-00002\.jsonl; train needs exactly one"):
        read_splits(str(folder), TEXT_CLASSIFICATION)


def test_a_folder_for_each_split_holds_its_files(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, {"Train/a.jsonl": LINES, "Train/b.csv": TABLE, "Train/.c.csv": "x", "test/a.json": LINES}
    )
    (folder / "dev").mkdir()
    assert texts_of(folder) == (7, 1, 4)
    folder_of(tmp_path, {"dev/rows.jsonl": LINES})
    assert texts_of(folder) == (8, 4, 4)


def test_a_part_that_is_missing_in_the_folder_of_a_split_is_named(tmp_path: Path) -> None:
    parts = {f"train/data-{i:05}-of-00004.jsonl": LINES for i in range(4)}
    folder = folder_of(tmp_path, parts | {"train/more.csv": TABLE, "test/a.jsonl": LINES})
    assert texts_of(folder) == (18, 2, 4)
    (folder / "train" / "data-00002-of-00004.jsonl").unlink()
    with pytest.raises(BadInput, match=r"train/data has 4 parts\. Add data-00002-of-00004"):
        read_splits(str(folder), TEXT_CLASSIFICATION)


@pytest.mark.parametrize("other", ["data.csv", "data-00000-of-00001.jsonl"])
def test_two_files_of_one_name_in_the_folder_of_a_split_are_refused(tmp_path: Path, other: str) -> None:
    folder = folder_of(tmp_path, {"train/data.jsonl": LINES, f"train/{other}": TABLE, "test/a.jsonl": LINES})
    with pytest.raises(
        BadInput, match=r"train holds data\S+ and data\S+; train/data needs exactly one file"
    ) as refused:
        read_splits(str(folder), TEXT_CLASSIFICATION)
    assert other in refused.value.message


@pytest.mark.parametrize("name", ["eval", "dev", "val", "Validation"])
def test_beside_a_file_of_train_a_folder_is_no_split(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, {"train.jsonl": LINES, "test.jsonl": LINES, f"{name}/a.jsonl": LINES * 2})
    assert texts_of(folder) == (3, 1, 4)
    (folder / "train.jsonl").unlink()
    folder_of(tmp_path, {"train/a.jsonl": LINES})
    assert texts_of(folder) == ((3, 1, 4) if name == "eval" else (4, 8, 4))


def test_a_file_is_read_rather_than_its_packed_copy_with_a_line(tmp_path: Path) -> None:
    for name, train, test in (("files", "train.jsonl", "test.csv"), ("folders", "train/a.jsonl", "test/a.csv")):
        folder = folder_of(tmp_path / name, {train: LINES, test: TABLE})
        (folder / f"{train}.gz").write_bytes(gzip.compress(LINES.encode() * 2))
        assert texts_of(folder) == (3, 1, 4)
        (note,) = read_splits(str(folder), TEXT_CLASSIFICATION).notes
        assert f"{train}.gz is not read, since" in note


@pytest.mark.parametrize("name", ["validation_matched", "dev_matched", "eval"])
def test_further_names_of_validation_are_read_where_there_is_no_usual_one(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, {"train.jsonl": LINES, "test.jsonl": LINES, f"{name}.jsonl": LINES * 2})
    assert texts_of(folder) == (4, 8, 4)
    folder_of(tmp_path, {"val.jsonl": LINES})
    assert texts_of(folder) == (4, 4, 4)


@pytest.mark.parametrize(
    "name", ["train.xlsx", "train.feather", "train.bio.zip", "train/pos/1.txt", "data/train-00000-of-00001.parquet"]
)
def test_what_a_folder_without_a_split_holds_is_named(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, {name: LINES, "test.jsonl": LINES})
    with pytest.raises(BadInput) as refused:
        read_splits(str(folder), TEXT_CLASSIFICATION)
    assert "has no train split (found: test). Add a file train.jsonl" in refused.value.message
    assert f"It holds {name.split('/', maxsplit=1)[0]}" in refused.value.message
    assert "test.jsonl" not in refused.value.message
    assert ("data, which has splits" in refused.value.message) is name.startswith("data/")


def test_data_sets_that_datasets_saved_one_by_one_are_read_and_one_alone_is_told(tmp_path: Path) -> None:
    import datasets

    split = datasets.Dataset.from_list(ROWS)
    for name in ("train", "validation_matched", "test"):
        split.save_to_disk(str(tmp_path / "saved" / name))
    assert texts_of(tmp_path / "saved") == (4, 4, 4)
    with pytest.raises(
        BadInput, match=r"one data set that `datasets` saved with save_to_disk, without splits\. Divide it"
    ):
        read_splits(str(tmp_path / "saved" / "train"), TEXT_CLASSIFICATION)
    shutil.rmtree(tmp_path / "saved" / "test")
    with pytest.raises(BadInput, match=r"\(found: train, validation\)\. It has .*validation_matched.*; give one that"):
        read_splits(str(tmp_path / "saved"), TEXT_CLASSIFICATION)


def test_rows_that_were_rejected_or_ignored_are_left_out_with_a_line(tmp_path: Path) -> None:
    verdicts: list[Any] = ["accept", "reject", "ignore", None]
    rows = [row | {"answer": verdict} for row, verdict in zip(ROWS, verdicts, strict=True)]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    folder = folder_of(tmp_path, {"train.jsonl": content * 2, "test.jsonl": LINES})
    splits = read_splits(str(folder), TEXT_CLASSIFICATION)
    assert len(splits.train) + len(splits.validation) == 4
    (note,) = splits.notes
    assert "4 rows of" in note
    assert "train.jsonl were left out: `answer` is reject or ignore there." in note
    (tmp_path / "none.jsonl").write_text(json.dumps(rows[1]))
    with pytest.raises(
        BadRows, match=r"none\.jsonl: holds no other rows: 1 row of .* was left out: `answer` is reject"
    ):
        read_examples(tmp_path / "none.jsonl", TEXT_CLASSIFICATION)
    # A column that is read is no verdict.
    labelled = Columns(label="answer")
    (tmp_path / "own.jsonl").write_text('{"text": "a", "answer": "reject"}\n')
    assert read_examples(tmp_path / "own.jsonl", TEXT_CLASSIFICATION, labelled)[0].label == "reject"


def test_saved_splits_are_found_by_names_in_capitals_and_a_missing_one_says_how_to_make_it(tmp_path: Path) -> None:
    import datasets

    split = datasets.Dataset.from_list([{"text": f"t{i}", "label": "x"} for i in range(3)])
    datasets.DatasetDict({"Train": split, "TEST": split}).save_to_disk(str(tmp_path / "saved"))
    assert len(read_splits(str(tmp_path / "saved"), TEXT_CLASSIFICATION).test) == 3
    datasets.DatasetDict({"train": split}).save_to_disk(str(tmp_path / "alone"))
    with pytest.raises(BadInput, match="It has train; give one that name, or divide one by train_test_split"):
        read_splits(str(tmp_path / "alone"), TEXT_CLASSIFICATION)


def test_a_folder_of_brat_says_how_to_give_its_entities(tmp_path: Path) -> None:
    for name in ("doc-1.txt", "doc-1.ann"):
        (tmp_path / name).write_text("Ana is here", encoding="utf-8")
    with pytest.raises(
        BadInput, match=r"It holds doc-1\.ann, doc-1\.txt.*Files of brat and spaCy are not read\. Write a line"
    ):
        read_splits(str(tmp_path), TEXT_CLASSIFICATION)


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train.conll", "train.parquet"])
def test_a_file_that_the_system_does_not_let_be_read_is_a_fault_of_the_data(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/proc/self/mem")  # a read of its beginning is an I/O error
    with pytest.raises(BadRows, match=rf"{name}: cannot be read \(Input/output error\)"):
        read_examples(tmp_path / name, TOKEN_CLASSIFICATION if name.endswith("conll") else TEXT_CLASSIFICATION)
