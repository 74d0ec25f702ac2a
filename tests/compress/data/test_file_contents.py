"""What files may hold: arrays, class numbers with names, cells of any length up to one limit, quotes."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from compress.data import file_formats
from compress.data.examples import Entity, Example
from compress.data.labelled_files import read_examples
from compress.data.row_fields import MOST_CHARACTERS, BadRows
from compress.data.splits import read_splits
from compress.data.texts import read_texts
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION

TEXT, TOKENS = TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION


def written(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8", newline="")
    return path


def test_a_json_file_holds_an_array_or_one_object_a_line(tmp_path: Path) -> None:
    rows = [{"text": "a [1]\nb", "label": "x"}, {"text": "c", "label": "y"}]
    expected = [Example("a [1]\nb", label="x"), Example("c", label="y")]
    for content in (
        json.dumps(rows),
        json.dumps(rows, indent=2),
        "\ufeff\n " + json.dumps(rows) + "\n",
        "\n".join(map(json.dumps, rows)),
    ):
        path = written(tmp_path / "train.json", content)
        assert read_examples(path, TEXT_CLASSIFICATION) == expected, content
        assert read_texts(path) == ["a [1]\nb", "c"]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ('[{"text": "a", "label": "x"},\n\n {"text": "b"}]', 3, "has no `label`"),
        ('[\n{"text": "a", "label": "x"}\n,\n3]', 4, "is int, not an object with fields"),
        (
            '[{"text": "a", "label": "x"},\n]',
            2,
            "is not JSON from here on (Expecting value at column 1; remove the comma before it)",
        ),
        ('[{"text": "a", "label": "x"}\n{}]', 2, "is not JSON from here on (Expecting ',' or ']' at column 1)"),
        ('[{"text": "a", "label": "x"},', 1, "is not JSON from here on"),
        ("[" * 100_000, 1, "it is nested too deeply"),
        ('{"rows":\n[]}', 1, "has no `text` and no `label` (its fields: rows)"),
        ("text: a", 1, "an array of objects is needed, or one object a line"),
        ("[]", None, "is empty: it holds no rows"),
    ],
)
def test_a_bad_array_is_named_by_file_line_and_reason(
    tmp_path: Path, content: str, line: int | None, reason: str
) -> None:
    with pytest.raises(BadRows) as caught:
        read_examples(written(tmp_path / "train.json", content), TEXT_CLASSIFICATION)
    ((at, said),) = [(fault.line, fault.reason) for fault in caught.value.faults]
    assert at == line
    assert reason in said


def parquet_of(path: Path, rows: dict[str, list[Any]], features: Any) -> Path:
    """The file that `datasets` writes of `rows`, with the names of its classes beside them."""
    import datasets

    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(path))
    return path


def test_class_numbers_in_parquet_of_the_hub_become_names(tmp_path: Path) -> None:
    import datasets

    names = datasets.ClassLabel(names=["O", "B-city"])
    words = datasets.Features(
        {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": datasets.Sequence(names)}
    )
    path = parquet_of(tmp_path / "a.parquet", {"tokens": [["to", "Rome"]], "ner_tags": [[0, 1]]}, words)
    assert read_examples(path, TOKEN_CLASSIFICATION) == [Example("to Rome", entities=(Entity(3, 7, "city"),))]
    classes = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    path = parquet_of(tmp_path / "b.parquet", {"text": ["a", "b", "c"], "label": [1, 0, -1]}, classes)
    with pytest.raises(
        BadRows, match=r"b\.parquet, line 3: `label` holds the class number -1, which has no name; only 0 to 1"
    ):
        read_examples(path, TEXT_CLASSIFICATION)
    path = parquet_of(path, {"text": ["a", "b"], "label": [1, 0]}, classes)
    assert [example.label for example in read_examples(path, TEXT_CLASSIFICATION)] == ["yes", "no"]


def test_class_numbers_within_objects_and_lists_become_names(tmp_path: Path) -> None:
    import datasets

    place, names = datasets.Value("int32"), datasets.ClassLabel(names=["per", "loc"])
    fields = {"start": place, "end": place, "label": names}
    lists = {"start": [0, 7], "end": [3, 11], "label": [0, 1]}
    objects = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    for kind, entities in ((datasets.Sequence(fields), lists), ([fields], objects)):
        features = datasets.Features({"text": datasets.Value("string"), "entities": kind})
        path = parquet_of(tmp_path / "a.parquet", {"text": ["Ann in Graz"], "entities": [entities]}, features)
        (example,) = read_examples(path, TOKEN_CLASSIFICATION)
        assert example.entities == (Entity(0, 3, "per"), Entity(7, 11, "loc"))
        split = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
        datasets.DatasetDict(dict.fromkeys(("train", "dev", "test"), split)).save_to_disk(str(tmp_path / "saved"))
        assert read_splits(str(tmp_path / "saved"), TOKEN_CLASSIFICATION).test == [example]
        shutil.rmtree(tmp_path / "saved")
    objects[0]["label"] = -1
    path = parquet_of(tmp_path / "a.parquet", {"text": ["Ann in Graz"], "entities": [objects]}, features)
    with pytest.raises(BadRows, match="`label` holds the class number -1, which has no name"):
        read_examples(path, TOKEN_CLASSIFICATION)


def test_what_else_stands_in_a_parquet_file_of_the_hub_is_passed_over(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": ["a"], "label": ["no"]}).replace_schema_metadata({"huggingface": "[1]"})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [example.label for example in read_examples(tmp_path / "a.parquet", TEXT_CLASSIFICATION)] == ["no"]


def test_a_class_number_without_a_name_in_a_saved_data_set_is_a_fault_of_its_row(tmp_path: Path) -> None:
    import datasets

    classes = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    split = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, -1]}, features=classes)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(BadRows, match=r"saved \(train\), line 2: `label` holds the class number -1, which has no name"):
        read_splits(str(tmp_path / "saved"), TEXT_CLASSIFICATION)


def test_numbers_for_labels_are_a_fault_that_asks_for_names(tmp_path: Path) -> None:
    path = written(tmp_path / "train.jsonl", '{"text": "a", "label": 3}\n{"text": "a", "label": [3]}\n')
    with pytest.raises(BadRows, match=r"lines 1, 2: `label` holds a number, .* write the label as a string"):
        read_examples(path, TEXT_CLASSIFICATION)


def of_one_text(path: Path, text: str) -> Path:
    """A file with a first row, and `text` in the second."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "a", "label": "x"}, {"text": text, "label": "x"}]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    separator = "\t" if path.suffix == ".tsv" else ","
    return written(
        path,
        {
            ".jsonl": "\n".join(map(json.dumps, rows)),
            ".json": json.dumps(rows, indent=0),
            ".csv": f"text{separator}label\na{separator}x\n{text}{separator}x\n",
            ".tsv": f"text{separator}label\na{separator}x\n{text}{separator}x\n",
            ".txt": f"a\n{text}\n",
            ".conll": f"a O\n\n{text} O\n",
        }[path.suffix],
    )


LINES = {".jsonl": 2, ".json": 6, ".csv": 3, ".tsv": 3, ".parquet": 2, ".txt": 2, ".conll": 3}


@pytest.mark.parametrize("suffix", LINES)
def test_one_text_has_as_many_characters_at_most_in_every_format(tmp_path: Path, suffix: str) -> None:
    def read(path: Path) -> list[str]:
        if suffix == ".txt":
            return read_texts(path)
        return [e.text for e in read_examples(path, TOKENS if suffix == ".conll" else TEXT)]

    path = tmp_path / f"a{suffix}"
    assert len(read(of_one_text(path, "x" * MOST_CHARACTERS))[1]) == MOST_CHARACTERS
    with pytest.raises(BadRows) as caught:
        read(of_one_text(path, "x" * (MOST_CHARACTERS + 1)))
    (fault,) = caught.value.faults
    assert (fault.file, fault.line) == (str(path), LINES[suffix])
    assert len(str(fault)) < 500
    assert "10,000,00" in fault.reason


def test_a_file_without_line_ends_is_read_no_further_than_a_line_may_be(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(2_000_000_000)  # of zeros, which a disk does not keep
    tracemalloc.start()
    try:
        with pytest.raises(BadRows, match=r"a\.jsonl, line 1: is longer than 10,000,000 characters"):
            read_texts(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 400_000_000


def test_an_array_on_one_line_is_read_up_to_a_limit_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_formats, "MOST_LINE_BYTES", 100)
    rows = [{"text": f"text {i}", "label": "x"} for i in range(50)]
    array, laid_out = json.dumps(rows), json.dumps(rows, indent=1)
    for content in (array, "\ufeff \n\t" + array, " " * 70_000 + array):
        assert len(read_examples(written(tmp_path / "train.json", content), TEXT_CLASSIFICATION)) == 50
    monkeypatch.setattr(file_formats, "MOST_ARRAY_BYTES", 1000)
    for content in (array, laid_out):
        with pytest.raises(BadRows) as caught:
            read_examples(written(tmp_path / "train.json", content), TEXT_CLASSIFICATION)
        (fault,) = caught.value.faults
        assert fault.reason == (
            "is an array of over 1,000 bytes, the most that are held; give JSON lines, which may have any size: "
            "jq -c '.[]' train.json > train.jsonl"
        )
    with pytest.raises(BadRows, match=r"line 1: is longer than"):
        read_examples(written(tmp_path / "train.json", json.dumps(rows[0] | {"more": "x" * 2000})), TEXT_CLASSIFICATION)


def test_an_open_quote_is_named_by_the_line_on_which_it_opens(tmp_path: Path) -> None:
    for content, line in (('text,label\na,x\nb,"x\nc,x\nd,x\n', 3), ('text,label\n"a\nb",x\n"c,x\nd,x\n', 4)):
        with pytest.raises(BadRows) as caught:
            read_examples(written(tmp_path / "a.csv", content), TEXT_CLASSIFICATION)
        assert [fault.line for fault in caught.value.faults] == [line]
        assert "has a quote that is not closed before the end of the file" in str(caught.value)
    rows = read_examples(written(tmp_path / "a.csv", 'label,text\nx,"a\nb"\nx,"c\n"\n'), TEXT_CLASSIFICATION)
    assert [row.text for row in rows] == ["a\nb", "c\n"]


def test_a_row_after_one_of_several_lines_is_named_by_its_own(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'text,label\n"a\nb",x\n\nshort\nlong,x,y\n"c\nd",\n')
    with pytest.raises(BadRows) as caught:
        read_examples(path, TEXT_CLASSIFICATION)
    assert [(fault.line, fault.reason[:38]) for fault in caught.value.faults] == [
        (5, "has 1 field, but the header has 2"),
        (6, "has 3 fields, but the header has 2; qu"),
        (7, "`label` holds ''; a non-empty string i"),
    ]


def test_faults_of_a_file_that_is_given_up_are_told_with_those_of_the_others(tmp_path: Path) -> None:
    written(tmp_path / "train.jsonl", '{"words": "x"}\n' * 3_000)
    written(tmp_path / "test.jsonl", '{"text": "a", "label": ""}\n')
    with pytest.raises(BadRows) as caught:
        read_splits(str(tmp_path), TEXT_CLASSIFICATION)
    assert "train.jsonl: was read only up to line 1000, which has fault number 1,000" in str(caught.value)
    assert "test.jsonl, line 1: `label` holds ''" in str(caught.value)


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_objects_of_several_lines_and_arrays_are_read_whatever_the_suffix(tmp_path: Path, name: str) -> None:
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    for content in (
        "\n".join(json.dumps(row, indent=2) for row in rows) + "\n",
        ",\n".join(json.dumps(row, indent=2) for row in rows),
        json.dumps(rows),
        "\n" + json.dumps(rows, indent=1),
    ):
        path = written(tmp_path / name, content)
        assert [example.text for example in read_examples(path, TEXT)] == ["a", "b"], content


ROW = '{"text": "a", "label": "x"}'


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (f"{ROW},\n{ROW}", 1, "a comma is behind the object; remove it"),
        (f"{ROW} {ROW}", 1, "give one object a line"),
        (f"// rows\n{ROW}", 1, "JSON has no comments; remove it"),
        ("{'text': 'a', 'label': 'x'}", 1, "names and texts need double quotes"),
        ('{text: "a", "label": "x"}', 1, "names and texts need double quotes"),
        ('{"text": "a", "label": None}', 1, "write null, true or false"),
        ('{"text": "a', 1, "write a line break in it as"),
        ('{"text": "a\tb", "label": "x"}', 1, "write a tab as \\t"),
        (f"[{ROW}]\n[{ROW}]", 2, "give one array, or one object a line"),
        (f"{ROW}\n{json.dumps(ROW)}", 2, "it was written as JSON twice"),
        (
            f'{{"data": [{ROW}]}}',
            1,
            "has a list `data` of objects; if these are the rows, give them alone: jq -c '.data[]'",
        ),
        (f'{{\n"version": "1", "train": [{ROW}]}}', 1, "has a list `train` of objects"),
        (f'{{"0": {ROW}, "1": {ROW}}}', 1, "is one object of objects; give these alone"),
        ('{"columns": ["text"], "data": [["a"]]}', 1, "pandas' orient='split'"),
        ('{"text": ["a", "b"], "label": ["x", "y"]}', 1, "`text` is a list, not a string; give a row for each text"),
    ],
)
def test_what_is_nearly_json_lines_says_what_to_correct(tmp_path: Path, content: str, line: int, reason: str) -> None:
    with pytest.raises(BadRows) as caught:
        read_examples(written(tmp_path / "train.jsonl", content), TEXT)
    assert [(fault.line, reason in fault.reason) for fault in caught.value.faults] == [(line, True)], caught.value


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": None, "label": "x"}, "`text` is null; a text is needed"),
        ({"text": float("nan"), "label": "x"}, "`text` is NaN; a text is needed"),
        ({"text": " \u200b ", "label": "x"}, "`text` is empty"),
        ({"text": "a", "label": " "}, "`label` holds ' '; a non-empty string is needed"),
        ({"text": "a", "label": float("nan")}, "`label` holds NaN; a non-empty string is needed"),
        ({"text": "a", "label": {"x": 0.9, "y": 0.1}}, "probabilities by --teacher-labels"),
        (
            {"text": "a b", "sport": 1, "art": 0},
            "has 0 or 1 in sport, art; if these are labels, give one field `label`",
        ),
        ({"text": "a", "cats": {"x": 1.0, "y": 0.0}}, "has `cats` as spaCy writes them; give `label`"),
    ],
)
def test_a_value_that_is_no_text_or_label_says_what_is_needed(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRows) as caught:
        read_examples(written(tmp_path / "train.jsonl", json.dumps(row)), TEXT)
    assert [reason in fault.reason for fault in caught.value.faults] == [True], caught.value


@pytest.mark.parametrize("first", ["Rar! said the lion", "BZh is no word", "ARROW1 is a sign"])
def test_a_text_that_begins_as_an_archive_does_is_read(tmp_path: Path, first: str) -> None:
    (tmp_path / "a.txt").write_text(f"{first}\n", encoding="utf-8")
    assert read_texts(tmp_path / "a.txt") == [first]
