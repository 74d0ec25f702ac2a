"""Columns by other names, tables without the columns that are needed, and which files are the splits."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.data.columns import Columns
from compress.data.examples import Entity, Example
from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
from compress.data.splits import read_splits
from compress.data.task import Task
from compress.data.texts import TextFiles, read_texts
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from serve.errors import BadInput

TEXT, TOKENS = TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION


def written(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8", newline="")
    return path


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def fault(path: Path, columns: Columns | None = None, task: Task = TEXT) -> str:
    """The one line that says what is wrong with the file."""
    with pytest.raises(BadRows) as caught:
        read_examples(path, task, columns or Columns())  # type: ignore[arg-type]
    (only,) = caught.value.faults
    assert only.line is None
    return f"{Path(only.file).name} {only.reason}"


ROW = {"Text": "a", "Other": "b", "Category": "x"}


def test_columns_are_read_by_the_names_that_are_given_in_every_format(tmp_path: Path) -> None:
    import datasets

    files = [
        written(tmp_path / "a.jsonl", json.dumps(ROW)),
        written(tmp_path / "a.json", json.dumps([ROW])),
        written(tmp_path / "a.csv", "Category,Text,Other\nx,a,b\n"),
        written(tmp_path / "a.tsv", "Text\tCategory\tOther\na\tx\tb\n"),
        parquet(tmp_path / "a.parquet", [ROW]),
    ]
    columns = Columns(text="Text", label="Category", text_pair="Other")
    for path in files:
        assert read_examples(path, TEXT_CLASSIFICATION, columns) == [Example("a", "b", label="x")], path.name
        assert read_texts(path, columns, pairs=True) == ["a", "b"], path.name
        assert list(TextFiles((path,), columns)) == ["a"], path.name
    split = datasets.Dataset.from_list([ROW, ROW])
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    assert read_splits(str(tmp_path / "saved"), TEXT_CLASSIFICATION, columns).test == [Example("a", "b", label="x")] * 2


def test_columns_of_entities_words_and_tags_have_the_names_that_are_given(tmp_path: Path) -> None:
    spans = {"sentence": "to Rome", "spans": [{"start": 3, "end": 7, "label": "city"}]}
    words = {"words": ["to", "Rome"], "labels": ["O", "B-city"]}
    expected = [Example("to Rome", entities=(Entity(3, 7, "city"),))]
    for row, columns in (
        (spans, Columns(text="sentence", entities="spans")),
        (words, Columns(tokens="words", tags="labels")),
    ):
        assert read_examples(written(tmp_path / "a.jsonl", json.dumps(row)), TOKEN_CLASSIFICATION, columns) == expected
        assert read_examples(parquet(tmp_path / "a.parquet", [row]), TOKEN_CLASSIFICATION, columns) == expected
    conll = written(tmp_path / "a.conll", "to O\nRome B-city\n")
    assert read_examples(conll, TOKEN_CLASSIFICATION, Columns(tokens="words", tags="labels")) == expected


def test_a_wrong_header_is_one_line_that_names_what_is_there_and_the_flags(tmp_path: Path) -> None:
    said = "has the columns Text, Category; text and label are needed. Rename columns, or give --text-column Text --label-column Category"
    assert fault(written(tmp_path / "a.csv", "Text,Category\n" + "a,b\n" * 50)) == f"a.csv {said}"
    assert fault(parquet(tmp_path / "a.parquet", [{"Text": "a", "Category": "b"}] * 50)) == f"a.parquet {said}"
    other = fault(written(tmp_path / "a.tsv", "id\ttext\n1\ta\n"), Columns(label="Kind"))
    assert other == (
        "a.tsv has the columns id, text; text and Kind are needed. Rename columns, or give --label-column NAME"
    )
    assert "a.csv has no column names in its first line" in fault(written(tmp_path / "a.csv", ",,\na,b,c\n"))
    note = written(tmp_path / "a.csv", "text,label,note,note\na,x,1,2\n")
    assert read_examples(note, TEXT_CLASSIFICATION) == [Example("a", label="x")]
    assert "has the column text twice" in fault(written(tmp_path / "a.csv", "text,label,text\na,b,c\n"))
    assert "a.csv is a table, whose cells cannot hold tags" in fault(
        written(tmp_path / "a.csv", "text,entities\na,[]\n" * 9), task=TOKENS
    )
    with pytest.raises(
        BadRows, match=r"u\.csv: has the columns Body; text is needed\. Rename columns, or give --text-column Body"
    ):
        read_texts(written(tmp_path / "u.csv", "Body\na\nb\n"))


def test_rows_that_all_lack_a_field_are_told_in_one_line_with_the_flag(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"sentence": "a", "label": "x"}\n' * 30)
    with pytest.raises(BadRows) as caught:
        read_examples(path, TEXT_CLASSIFICATION)
    assert len(caught.value.faults) == 30
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[1].endswith(
        "a.jsonl, lines 1, 2, 3, 4, 5 and 25 more: has no `text` (its fields: sentence, label); rename fields, or give "
        "--text-column sentence"
    )


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", ","), ("a.tsv", ";")])
def test_a_table_with_another_separator_is_read_by_its_header(tmp_path: Path, name: str, separator: str) -> None:
    rows = f'text{separator} label\n"to, Rome; now\t!"{separator}book\n'
    assert read_examples(written(tmp_path / name, rows), TEXT_CLASSIFICATION) == [
        Example("to, Rome; now\t!", label="book")
    ]
    assert "has the columns a, b; text and label are needed" in fault(
        written(tmp_path / name, f"a{separator}b\n1{separator}2\n")
    )


def test_a_blank_table_is_empty_and_blank_lines_before_its_header_are_none(tmp_path: Path) -> None:
    for content in ("", "\n\n"):
        assert fault(written(tmp_path / "c4.csv", content)) == "c4.csv is empty: it holds no rows"
    assert read_examples(written(tmp_path / "a.csv", "\n\ntext,label\n\na,x\n"), TEXT_CLASSIFICATION) == [
        Example("a", label="x")
    ]


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_validation_is_read_by_each_of_its_names(tmp_path: Path, name: str) -> None:
    import datasets

    for split in ("train", name, "test"):
        written(tmp_path / f"{split}.csv", f"text,label\n{split},x\n")
    splits = {split: datasets.Dataset.from_list([{"text": split, "label": "x"}]) for split in ("train", name, "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    for data in (tmp_path, tmp_path / "saved"):
        found = read_splits(str(data), TEXT_CLASSIFICATION)
        assert [example.text for example in found.validation] == [name]
        assert not found.held_out


def test_two_files_for_one_split_are_a_fault_that_names_both_of_every_split(tmp_path: Path) -> None:
    for name in ("train.csv", "train.jsonl", "dev.csv", "validation.csv", "test.csv"):
        written(tmp_path / name, "text,label\na,x\n")
    with pytest.raises(BadInput) as caught:
        read_splits(str(tmp_path), TEXT_CLASSIFICATION)
    assert "holds train.csv and train.jsonl; train needs exactly one file. Remove the others." in str(caught.value)
    assert "holds dev.csv and validation.csv; validation needs exactly one file" in str(caught.value)


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"--data-revision is .*, but --data .* is a local folder; only data sets of the Hub"
    ):
        read_splits(str(tmp_path), TEXT_CLASSIFICATION, revision="v1")


def test_two_fields_cannot_be_read_from_one_column() -> None:
    with pytest.raises(
        BadInput, match="--text-column and --label-column name the same column, label; give each another column"
    ):
        Columns(text="label")
    assert Columns(text="tokens").text == "tokens"  # which rows with a label have no other use for


@pytest.mark.parametrize(
    ("task", "columns", "message"),
    [
        (TEXT, Columns(entities="spans"), "--entities-column has no effect on text-classification. Leave it out"),
        (TOKENS, Columns(label="y", text_pair="b"), "--text-pair-column and --label-column have no effect"),
    ],
)
def test_a_column_that_the_task_does_not_read_is_refused(
    task: Any, columns: Columns, message: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "train.jsonl", json.dumps({"text": "in Rome", "label": "x", "entities": []}) + "\n")
    for read in (lambda: read_examples(file, task, columns), lambda: read_splits(str(tmp_path), task, columns)):
        with pytest.raises(BadInput, match=message):
            read()


@pytest.mark.parametrize(
    "content",
    [
        "text|label\na|x\n",
        "\ufefftext,label\u200b\na,x\n",
        "text,label\na,x,\n",
        "text;label\na;x;;\n",
    ],
)
def test_other_separators_and_what_cannot_be_seen_or_is_empty_beside_the_cells_change_no_row(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "a.csv").write_text(content, encoding="utf-8-sig")
    assert read_examples(tmp_path / "a.csv", TEXT_CLASSIFICATION) == [Example("a", label="x")]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ("sep=;\ntext;label\na;x\n", 1, "is no header, and a line below names the needed columns"),
        ("# by me\n\ntext,label\na,x\n", 1, "is no header, and a line below names the needed columns"),
        ("text,label\na,x\ntext,label\nb,y\n", 3, "names the columns again; remove the line"),
        ('text,label\n1,a,x\n', 2, "or name the column in front, if it is an index"),
        ('text,label\n"a,x"\n', 2, "quote each text, and not the whole line"),
        ("text,sport,art\na,1,0\n", 1, "has 0 or 1 in sport, art; if these are labels"),
    ],
)  # fmt: skip
def test_lines_that_do_not_fit_the_header_say_why(tmp_path: Path, content: str, line: int, reason: str) -> None:
    (tmp_path / "a.csv").write_text(content, encoding="utf-8")
    with pytest.raises(BadRows) as caught:
        read_examples(tmp_path / "a.csv", TEXT_CLASSIFICATION)
    assert [(fault.line, reason in fault.reason) for fault in caught.value.faults] == [(line, True)], caught.value


def test_a_header_is_found_below_blank_lines_and_by_a_later_separator(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n" * 6 + "text,label\na,x\n", encoding="utf-8")
    assert read_examples(tmp_path / "a.csv", TEXT_CLASSIFICATION) == [Example("a", label="x")]
    # Between commas the second line would name a column `text`.
    (tmp_path / "b.csv").write_text("id;text\n1;hello, text\n2;foo\n", encoding="utf-8")
    assert read_texts(tmp_path / "b.csv") == ["hello, text", "foo"]
    (tmp_path / "c.csv").write_text("text\nhello\ntext\nbye\n", encoding="utf-8")
    assert read_texts(tmp_path / "c.csv") == ["hello", "text", "bye"]
