"""The files that people have: packed, in parts, with names in capitals, in folders; and what is said of others."""

import gzip
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data_files import TEXT, faults, lines_of, saved, written

from compress.data.columns import Columns
from compress.data.examples import Entity, Example, normalised, normalised_text
from compress.data.labelled_files import read_examples
from compress.data.splits import Splits, hold_out, read_splits, set_apart
from compress.data.texts import read_texts
from serve.errors import BadInput

ROWS = [{"text": f"text {i}", "label": "ab"[i % 2]} for i in range(4)]
LINES = lines_of(*ROWS)
TABLE = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS)


def folder_of(path: Path, files: dict[str, str]) -> Path:
    """A folder with `files`, by their names."""
    for name, content in files.items():
        written(path / name, content)
    return path


def splits_of(path: Path) -> Splits:
    return read_splits(str(path), TEXT)


def sizes(path: Path) -> tuple[int, int, int]:
    splits = splits_of(path)
    return len(splits.train), len(splits.validation), len(splits.test)


def refused(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        splits_of(path)
    return caught.value.message


@pytest.mark.parametrize("name", ["jsonl", "csv", "json", "ndjson", "JSONL", "tsv"])
def test_a_file_is_read_whatever_the_case_of_its_name_and_packed_or_not(tmp_path: Path, name: str) -> None:
    content = {"csv": TABLE, "tsv": TABLE.replace(",", "\t"), "json": json.dumps(ROWS)}.get(name, LINES)
    for train, test in ((f"train.{name}", f"TEST.{name}"), (f"Train.{name}.gz", f"test.{name}.GZ")):
        for file in (train, test):
            data = gzip.compress(content.encode()) if file.lower().endswith(".gz") else content
            path = written(tmp_path / file, data)
            assert [example.text for example in read_examples(path, TEXT)] == [row["text"] for row in ROWS]
            assert len(read_texts(path)) == 4
        assert sizes(tmp_path) == (3, 1, 4)
        for file in (train, test):
            (tmp_path / file).unlink()


def test_a_packed_array_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.data.file_formats.MOST_ARRAY_BYTES", 1000)
    ((_, reason),) = faults(written(tmp_path / "a.json.gz", gzip.compress(json.dumps(ROWS * 100).encode())))
    assert "an array of over 1,000 bytes" in reason


def test_the_parts_of_a_split_are_read_together_and_a_missing_one_is_told(tmp_path: Path) -> None:
    parts = {f"train-{i:05}-of-00002.jsonl": LINES for i in range(2)}
    folder = folder_of(tmp_path, parts | {"test-00000-of-00001-a1b2c3.jsonl": LINES, "eval.jsonl": LINES})
    assert sizes(folder) == (8, 4, 4)
    last = written(folder / "train-00001-of-00002.jsonl", '{"text": "a"}\n')
    assert "train-00001-of-00002.jsonl, line 1: has no `label`" in refused(folder)
    last.unlink()
    assert "holds train-00000-of-00002.jsonl, and by these names train has 2 parts" in refused(folder)
    for other in ("train-00000-of-00002.csv", "train-00001-of-00003.jsonl"):
        written(folder / other, TABLE)
        assert "by these names train has 2 parts" in refused(folder)
        (folder / other).unlink()
    written(folder / "train.csv", TABLE)
    assert "holds train.csv and train-00000-of-00002.jsonl; train needs exactly one" in refused(folder)


def test_a_folder_for_each_split_holds_its_files(tmp_path: Path) -> None:
    files = {"Train/a.jsonl": LINES, "Train/b.csv": TABLE, "Train/.c.csv": "x", "test/a.json": LINES}
    folder = folder_of(tmp_path, files)
    (folder / "dev").mkdir()
    assert sizes(folder) == (6, 2, 4)  # a text stands in both files
    folder_of(tmp_path, {"dev/rows.jsonl": LINES})
    assert sizes(folder) == (8, 4, 4)


def test_files_that_do_not_belong_together_in_the_folder_of_a_split_are_refused(tmp_path: Path) -> None:
    parts = {f"train/data-{i:05}-of-00004.jsonl": LINES for i in range(4)}
    folder = folder_of(tmp_path / "parts", parts | {"train/more.csv": TABLE, "test/a.jsonl": LINES})
    assert sizes(folder) == (15, 5, 4)  # a text stands in each of the five files
    (folder / "train" / "data-00002-of-00004.jsonl").unlink()
    assert "train/data has 4 parts. Add data-00002-of-00004" in refused(folder)
    for other in ("data.csv", "data-00000-of-00001.jsonl"):
        folder = folder_of(
            tmp_path / other, {"train/data.jsonl": LINES, f"train/{other}": TABLE, "test/a.jsonl": LINES}
        )
        assert other in refused(folder)
        assert "train/data needs exactly one file" in refused(folder)


def test_two_files_for_one_split_are_a_fault_that_names_both_of_every_split(tmp_path: Path) -> None:
    names = ("train.csv", "train.jsonl", "dev.csv", "validation.csv", "test.csv")
    said = refused(folder_of(tmp_path, dict.fromkeys(names, "text,label\na,x\n")))
    assert "holds train.csv and train.jsonl; train needs exactly one file" in said
    assert "holds dev.csv and validation.csv; validation needs exactly one file" in said


@pytest.mark.parametrize("name", ["eval", "dev", "val", "Validation"])
def test_beside_a_file_of_train_a_folder_is_no_split(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, {"train.jsonl": LINES, "test.jsonl": LINES, f"{name}/a.jsonl": LINES * 2})
    assert sizes(folder) == (3, 1, 4)
    (folder / "train.jsonl").unlink()
    folder_of(tmp_path, {"train/a.jsonl": LINES})
    assert sizes(folder) == ((3, 1, 4) if name == "eval" else (4, 8, 4))


def test_a_file_is_read_rather_than_its_packed_copy_with_a_line(tmp_path: Path) -> None:
    for name, train, test in (("files", "train.jsonl", "test.csv"), ("folders", "train/a.jsonl", "test/a.csv")):
        folder = folder_of(tmp_path / name, {train: LINES, test: TABLE})
        written(folder / f"{train}.gz", gzip.compress(LINES.encode() * 2))
        assert sizes(folder) == (3, 1, 4)
        (note,) = splits_of(folder).notes
        assert f"{train}.gz is not read" in note


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_validation_is_read_by_each_of_its_names(tmp_path: Path, name: str) -> None:
    for split in ("train", name, "test"):
        written(tmp_path / f"{split}.csv", f"text,label\n{split},x\n")
    folder = saved(tmp_path / "saved", **{n: [{"text": n, "label": "x"}] for n in ("train", name, "test")})
    for data in (tmp_path, folder):
        found = splits_of(data)
        assert ([example.text for example in found.validation], found.held_out) == ([name], False)


@pytest.mark.parametrize("name", ["validation_matched", "dev_matched", "eval"])
def test_further_names_of_validation_are_read_where_there_is_no_usual_one(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, {"train.jsonl": LINES, "test.jsonl": LINES, f"{name}.jsonl": LINES * 2})
    assert sizes(folder) == (4, 8, 4)
    folder_of(tmp_path, {"val.jsonl": LINES})
    assert sizes(folder) == (4, 4, 4)


def test_without_validation_a_tenth_of_train_is_held_out_the_same_each_time(tmp_path: Path) -> None:
    rows = lines_of(*({"text": f"t{i}", "label": "x"} for i in range(50)))
    folder = folder_of(tmp_path, {"train.jsonl": rows, "test.jsonl": rows})
    first, second = splits_of(folder), splits_of(folder)
    assert (first.held_out, len(first.validation)) == (True, 5)
    assert first.validation == second.validation
    assert not set(first.validation) & set(first.train)


@pytest.mark.parametrize(
    "name", ["train.xlsx", "train.feather", "train.bio.zip", "train/pos/1.txt", "data/train-00000-of-00001.parquet"]
)
def test_a_folder_without_a_split_names_what_it_holds(tmp_path: Path, name: str) -> None:
    said = refused(folder_of(tmp_path, {name: LINES, "test.jsonl": LINES}))
    assert "has no train split (found: test). Add a file train.jsonl" in said
    assert f"It holds {name.split('/', maxsplit=1)[0]}" in said
    assert "test.jsonl" not in said
    assert ("data, which has splits" in said) is name.startswith("data/")


def test_data_sets_that_datasets_saved_one_by_one_are_read_and_one_alone_is_told(tmp_path: Path) -> None:
    import datasets

    split = datasets.Dataset.from_list(ROWS)
    for name in ("train", "validation_matched", "test"):
        split.save_to_disk(str(tmp_path / "saved" / name))
    assert sizes(tmp_path / "saved") == (4, 4, 4)
    assert "one data set that `datasets` saved" in refused(tmp_path / "saved" / "train")
    shutil.rmtree(tmp_path / "saved" / "test")
    assert "(found: train, validation). It has" in refused(tmp_path / "saved")


def test_saved_splits_are_found_by_names_in_capitals_and_a_missing_one_says_how_to_make_it(tmp_path: Path) -> None:
    assert sizes(saved(tmp_path / "saved", Train=ROWS, TEST=ROWS)) == (3, 1, 4)
    said = refused(saved(tmp_path / "alone", train=ROWS))
    assert "It has train; give one that name, or divide one by train_test_split" in said


def test_rows_that_were_rejected_or_ignored_are_left_out_with_a_line(tmp_path: Path) -> None:
    verdicts: list[Any] = ["accept", "reject", "ignore", None]
    rows = [row | {"answer": verdict} for row, verdict in zip(ROWS, verdicts, strict=True)]
    splits = splits_of(folder_of(tmp_path, {"train.jsonl": lines_of(*rows, *rows), "test.jsonl": LINES}))
    assert len(splits.train) + len(splits.validation) == 4
    (note,) = splits.notes
    assert "4 rows of" in note
    assert "train.jsonl were left out: `answer` is reject or ignore" in note
    ((line, reason),) = faults(written(tmp_path / "none.jsonl", lines_of(rows[1])))
    assert (line, "1 row of" in reason, "`answer` is reject" in reason) == (None, True, True)
    # A column that is read is no verdict.
    own = written(tmp_path / "own.jsonl", '{"text": "a", "answer": "reject"}\n')
    assert read_examples(own, TEXT, Columns(label="answer")) == [Example("a", label="reject")]


def test_names_and_folders_that_are_no_data_say_what_to_give(tmp_path: Path) -> None:
    brat = folder_of(tmp_path / "brat", {"doc-1.txt": "Ana is here", "doc-1.ann": "Ana is here"})
    assert "It holds doc-1.ann, doc-1.txt" in refused(brat)
    assert "brat and spaCy are not read" in refused(brat)
    with pytest.raises(BadInput, match="neither a local folder nor a data set that can be read from the Hub"):
        read_splits("absent", TEXT)
    with pytest.raises(BadInput, match="--data-revision is"):
        read_splits(str(tmp_path), TEXT, revision="v1")


def test_copies_of_a_text_are_held_out_together() -> None:
    train = [Example(text, label="a" if i % 2 else "b") for i in range(200) for text in (f"Text {i}", f"text  {i}!")]
    kept, held = hold_out(train, 0)
    assert {normalised_text(each.text) for each in kept} & {normalised_text(each.text) for each in held} == set()
    assert (len(kept), len(held)) == (360, 40)
    assert Counter(each.label for each in held) == {"a": 20, "b": 20}


@pytest.mark.parametrize("seed", range(20))
def test_train_keeps_every_label_and_validation_gets_its_share(seed: int) -> None:
    train = [Example(f"text {i}", label="often") for i in range(160)] + [
        Example(f"other {i}", label=f"class {i % 8}") for i in range(40)
    ]
    train.append(Example("alone", label="once"))
    kept, held = hold_out(train, seed)
    assert {each.label for each in kept} == {each.label for each in train}
    found = Counter(each.label for each in held)
    assert found["often"] == 16
    assert sum(found.values()) == 20
    assert max(found[f"class {i}"] for i in range(8)) == 1


def test_train_keeps_every_entity_label_and_every_one_of_several_labels() -> None:
    entities = [
        Example(f"at {i}", entities=(Entity(0, 2, "PLACE"), *([Entity(3, 4, "RARE")] if i == 7 else ())))
        for i in range(40)
    ]
    several = [Example(f"at {i}", label=("rare", "usual") if i == 7 else ("usual",)) for i in range(40)]
    for seed in range(20):
        assert any(len(each.entities or ()) == 2 for each in hold_out(entities, seed)[0])
        assert any("rare" in (each.label or ()) for each in hold_out(several, seed)[0])  # type: ignore[operator]


def test_relations_of_one_sentence_are_held_out_together() -> None:
    train = [
        Example(f"{i} met them", label="met", head=(0, 1), tail=(start, start + 1))
        for i in range(10, 40)
        for start in (3, 7)
    ]
    kept, held = hold_out(train, 1)
    assert {each.text for each in kept} & {each.text for each in held} == set()
    assert len(held) == 6


def test_validation_gets_a_text_where_each_label_occurs_once() -> None:
    kept, held = hold_out([Example(f"text {i}", label=f"class {i}") for i in range(5)], 0)
    assert (len(kept), len(held)) == (4, 1)


def many_splits(texts: int) -> Splits:
    validation = [Example(f"text {i}", label="ab"[i % 2]) for i in range(texts)]
    return Splits([Example("Text 1!", label="b")], validation, [Example("TEXT 2", label="a")], fingerprint="x")


def test_a_quarter_of_validation_is_set_apart_where_300_texts_remain() -> None:
    whole = many_splits(400)
    found = set_apart(whole, 0)
    assert len(found.validation) == 300
    assert {"text 1", "text 2"}.isdisjoint(each.text for each in found.apart)  # train and test have them
    assert 98 <= len(found.apart) <= 100
    assert not {*map(normalised, found.apart)} & {*map(normalised, found.validation)}
    assert Counter(each.label for each in found.validation) == {"a": 150, "b": 150}
    assert found.fingerprint != whole.fingerprint
    assert f"{len(found.apart)} texts of validation are set apart for promises" in found.notes[0]
    fewer = many_splits(396)
    assert set_apart(fewer, 0) is fewer
    copied = replace(whole, train=whole.validation)
    assert set_apart(copied, 0) is copied  # nothing would be left to promise on


def test_one_text_many_times_is_refused(tmp_path: Path) -> None:
    rows = [{"text": text, "label": "a"} for text in ("One", "one.", "ONE")]
    files = {"train.jsonl": lines_of(*rows), "test.jsonl": lines_of({"text": "two", "label": "a"})}
    assert "All 3 rows of train have one text" in refused(folder_of(tmp_path, files))
