"""What is read of files of examples and texts, by their format, their columns and their contents."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from data_files import TEXT, TOKENS, faults, lines_of, parquet, saved, written
from hypothesis import given
from hypothesis import strategies as st

from compress.data import file_formats
from compress.data.columns import Columns
from compress.data.examples import Entity, Example, examples_fingerprint
from compress.data.labelled_files import read_examples
from compress.data.row_fields import MOST_CHARACTERS, BadRows
from compress.data.rows import example_of
from compress.data.splits import read_splits
from compress.data.tags import from_tags
from compress.data.texts import TextFiles, read_texts, stream_texts
from serve.errors import BadInput
from serve.text.labels import bio_tags
from serve.text.spans import tag_runs

ROW = {"Text": "a", "Other": "b", "Category": "x"}


def test_columns_are_read_by_the_names_that_are_given_in_every_format(tmp_path: Path) -> None:
    files = [
        written(tmp_path / "a.jsonl", json.dumps(ROW)),
        written(tmp_path / "a.json", json.dumps([ROW])),
        written(tmp_path / "a.csv", "Category,Text,Other\nx,a,b\n"),
        written(tmp_path / "a.tsv", "Text\tCategory\tOther\na\tx\tb\n"),
        parquet(tmp_path / "a.parquet", [ROW]),
    ]
    columns = Columns(text="Text", label="Category", text_pair="Other")
    for path in files:
        assert read_examples(path, TEXT, columns) == [Example("a", "b", label="x")], path.name
        assert read_texts(path, columns, pairs=True) == ["a", "b"], path.name
        assert list(TextFiles((path,), columns)) == ["a"], path.name
    folder = saved(tmp_path / "saved", train=[ROW, ROW | {"Text": "c"}], test=[ROW, ROW])
    assert read_splits(str(folder), TEXT, columns).test == [Example("a", "b", label="x")] * 2


def test_columns_of_entities_words_and_tags_have_the_names_that_are_given(tmp_path: Path) -> None:
    spans = {"sentence": "to Rome", "spans": [{"start": 3, "end": 7, "label": "city"}]}
    words = {"words": ["to", "Rome"], "labels": ["O", "B-city"]}
    expected = [Example("to Rome", entities=(Entity(3, 7, "city"),))]
    named = Columns(tokens="words", tags="labels")
    for row, columns in ((spans, Columns(text="sentence", entities="spans")), (words, named)):
        assert read_examples(written(tmp_path / "a.jsonl", json.dumps(row)), TOKENS, columns) == expected
        assert read_examples(parquet(tmp_path / "a.parquet", [row]), TOKENS, columns) == expected
    assert read_examples(written(tmp_path / "a.conll", "to O\nRome B-city\n"), TOKENS, named) == expected


def test_column_flags_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--text-column and --label-column name the same column"):
        Columns(text="label")
    assert Columns(text="tokens").text == "tokens"  # which rows with a label have no other use for
    file = written(tmp_path / "train.jsonl", json.dumps({"text": "in Rome", "label": "x", "entities": []}) + "\n")
    for task, columns, flag in (
        (TEXT, Columns(entities="spans"), "--entities-column has no effect"),
        (TOKENS, Columns(label="y", text_pair="b"), "--text-pair-column and --label-column have no effect"),
    ):
        with pytest.raises(BadInput, match=flag):
            read_examples(file, task, columns)
        with pytest.raises(BadInput, match=flag):
            read_splits(str(tmp_path), task, columns)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text,label\r\na,x\r\n"),
        ("a.csv", ",text,label\n0,a,x\n"),  # a nameless column of row numbers
        ("a.csv", "\n\ntext,label\n\na,x\n"),
        ("a.csv", "\n\n\n\n\n\ntext,label\na,x\n"),
        ("a.csv", "text,label,note,note\na,x,1,2\n"),
        ("a.csv", "text,label,head\na,x,1\n"),  # a field called head alone is no relation
        ("a.csv", "text|label\na|x\n"),
        ("a.csv", "text;label\na;x\n"),
        ("a.csv", "text\tlabel\na\tx\n"),
        ("a.tsv", "text,label\na,x\n"),
        ("a.tsv", "text;label\na;x\n"),
        ("a.csv", "\ufeff\ufefftext,label\u200b\na,x\n"),
        ("a.csv", "\ufefftext,label\na,x,\n"),
        ("a.csv", "text;label\na;x;;\n"),
        ("a.json", '\ufeff\n [{"text": "a", "label": "x"}]\n'),
        ("a.json", '{"text": "a", "label": "x"}'),
        ("a.jsonl", '[\n{"text": "a",\n"label": "x"}\n]'),
    ],
)
def test_forms_of_a_file_that_change_no_row(tmp_path: Path, name: str, content: str) -> None:
    assert read_examples(written(tmp_path / name, content), TEXT) == [Example("a", label="x")]


def test_separators_are_told_by_the_header_and_not_by_what_is_in_cells(tmp_path: Path) -> None:
    for name, separator in (("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", ","), ("a.tsv", ";")):
        rows = f'text{separator} label\n"to, Rome; now\t!"{separator}book\n'
        assert read_examples(written(tmp_path / name, rows), TEXT) == [Example("to, Rome; now\t!", label="book")]
        ((_, reason),) = faults(written(tmp_path / name, f"a{separator}b\n1{separator}2\n"))
        assert "has the columns a, b;" in reason
    # Between commas the second line would name a column `text`.
    assert read_texts(written(tmp_path / "b.csv", "id;text\n1;hello, text\n2;foo\n")) == ["hello, text", "foo"]
    assert read_texts(written(tmp_path / "c.csv", "text\nhello\ntext\nbye\n")) == ["hello", "text", "bye"]


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_objects_of_several_lines_and_arrays_are_read_whatever_the_suffix(tmp_path: Path, name: str) -> None:
    rows = [{"text": "a [1]\nb", "label": "x"}, {"text": "c", "label": "y"}]
    for content in (
        lines_of(*rows),
        "\n".join(json.dumps(row, indent=2) for row in rows) + "\n",
        ",\n".join(json.dumps(row, indent=2) for row in rows),
        json.dumps(rows),
        "\n" + json.dumps(rows, indent=1),
    ):
        path = written(tmp_path / name, content)
        assert read_examples(path, TEXT) == [Example("a [1]\nb", label="x"), Example("c", label="y")], content
        assert read_texts(path) == ["a [1]\nb", "c"]


def features_of(**fields: Any) -> Any:
    import datasets

    return datasets.Features({"text": datasets.Value("string")} | fields)


def parquet_of(path: Path, rows: dict[str, list[Any]], features: Any) -> Path:
    """The file that `datasets` writes of `rows`, with the names of its classes beside them."""
    import datasets

    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(path))
    return path


def test_class_numbers_become_names_and_one_without_a_name_is_a_fault(tmp_path: Path) -> None:
    import datasets

    classes = features_of(label=datasets.ClassLabel(names=["no", "yes"]))
    path = parquet_of(tmp_path / "b.parquet", {"text": ["a", "b"], "label": [1, 0]}, classes)
    assert [example.label for example in read_examples(path, TEXT)] == ["yes", "no"]
    ((line, reason),) = faults(parquet_of(path, {"text": ["a", "b", "c"], "label": [1, 0, -1]}, classes))
    assert (line, "the class number -1, which has no name; only 0 to 1" in reason) == (3, True)
    split = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, -1]}, features=classes)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(BadRows, match=r"saved \(train\), line 2: `label` holds the class number -1"):
        read_splits(str(tmp_path / "saved"), TEXT)
    import pyarrow
    from pyarrow import parquet as format

    table = pyarrow.table({"text": ["a"], "label": ["no"]}).replace_schema_metadata({"huggingface": "[1]"})
    format.write_table(table, path)  # which says nothing that is known
    assert [example.label for example in read_examples(path, TEXT)] == ["no"]


def test_class_numbers_within_objects_and_lists_become_names(tmp_path: Path) -> None:
    import datasets

    place, names = datasets.Value("int32"), datasets.ClassLabel(names=["per", "loc"])
    fields = {"start": place, "end": place, "label": names}
    lists = {"start": [0, 7], "end": [3, 11], "label": [0, 1]}
    objects = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    for kind, entities in ((datasets.Sequence(fields), lists), ([fields], objects)):
        features = features_of(entities=kind)
        path = parquet_of(tmp_path / "a.parquet", {"text": ["Ann in Graz"], "entities": [entities]}, features)
        (example,) = read_examples(path, TOKENS)
        assert example.entities == (Entity(0, 3, "per"), Entity(7, 11, "loc"))
        split = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
        datasets.DatasetDict(dict.fromkeys(("train", "dev", "test"), split)).save_to_disk(str(tmp_path / "saved"))
        assert read_splits(str(tmp_path / "saved"), TOKENS).test == [example]
        shutil.rmtree(tmp_path / "saved")
    objects[0]["label"] = -1
    ((_, reason),) = faults(
        parquet_of(tmp_path / "a.parquet", {"text": ["Ann in Graz"], "entities": [objects]}, features), TOKENS
    )
    assert "the class number -1" in reason
    words = datasets.Features(
        {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": datasets.Sequence(names)}
    )
    path = parquet_of(tmp_path / "w.parquet", {"tokens": [["Ann", "in"]], "ner_tags": [[0, 1]]}, words)
    assert [entity.label for entity in read_examples(path, TOKENS)[0].entities or ()] == ["per", "loc"]


def of_one_text(path: Path, text: str) -> Path:
    """A file with a first row, and `text` in the second."""
    rows = [{"text": "a", "label": "x"}, {"text": text, "label": "x"}]
    if path.suffix == ".parquet":
        return parquet(path, rows)
    separator = "\t" if path.suffix == ".tsv" else ","
    table = f"text{separator}label\na{separator}x\n{text}{separator}x\n"
    forms = {
        ".jsonl": lines_of(*rows),
        ".json": json.dumps(rows, indent=0),
        ".txt": f"a\n{text}\n",
        ".conll": f"a O\n\n{text} O\n",
    }
    return written(path, forms.get(path.suffix, table))


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
        assert len(read_examples(written(tmp_path / "train.json", content), TEXT)) == 50
    monkeypatch.setattr(file_formats, "MOST_ARRAY_BYTES", 1000)
    for content in (array, laid_out):
        ((_, reason),) = faults(written(tmp_path / "train.json", content))
        assert "an array of over 1,000 bytes" in reason
        assert "jq -c '.[]' train.json > train.jsonl" in reason
    ((_, reason),) = faults(written(tmp_path / "train.json", json.dumps(rows[0] | {"more": "x" * 2000})))
    assert "is longer than" in reason


@pytest.mark.parametrize("first", ["Rar! said the lion", "BZh is no word", "ARROW1 is a sign"])
def test_a_text_that_begins_as_an_archive_does_is_read(tmp_path: Path, first: str) -> None:
    assert read_texts(written(tmp_path / "a.txt", f"{first}\n")) == [first]


def test_plain_text_is_one_document_a_line(tmp_path: Path) -> None:
    assert read_texts(written(tmp_path / "a.txt", "\ufeffone\n\n  two \n")) == ["one", "two"]


def test_second_texts_of_pairs_are_read_when_asked_for(tmp_path: Path) -> None:
    rows = [{"text": "one", "text_pair": "two"}, {"text": "three"}, {"text": "four", "text_pair": None}]
    path = written(tmp_path / "a.jsonl", lines_of(*rows))
    assert read_texts(path) == ["one", "three", "four"]
    assert read_texts(path, pairs=True) == ["one", "two", "three", "four"]
    table = written(tmp_path / "a.tsv", "text\ttext_pair\none\t\ntwo\tthree\n")
    assert read_texts(table, pairs=True) == ["one", "two", "three"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.txt"])
def test_a_file_of_texts_gives_the_first_before_it_has_read_the_last(tmp_path: Path, name: str) -> None:
    import pyarrow
    from pyarrow import parquet as format

    texts = [f"text {i}" for i in range(30_000)]
    path = tmp_path / name
    if name == "a.parquet":
        format.write_table(pyarrow.table({"text": texts, "more": [0] * len(texts)}), path, row_group_size=2_000)
    else:
        rows = {"a.jsonl": [f'{{"text": "{t}"}}' for t in texts], "a.csv": ["text", *texts], "a.txt": texts}[name]
        path.write_text("\n".join(rows), encoding="utf-8")
    tracemalloc.start()
    try:
        assert next(iter(stream_texts(path))) == "text 0"
        first = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert first < 1_500_000  # all of them are 2 MB as strings alone
    assert list(stream_texts(path)) == read_texts(path) == texts


@given(st.lists(st.sampled_from(bio_tags(["x", "y"])), min_size=1, max_size=12))
def test_tags_are_read_as_the_server_reads_them(tags: list[str]) -> None:
    entities = from_tags(["w"] * len(tags), tags).entities or ()
    assert [(e.start // 2, (e.end - 1) // 2, e.label) for e in entities] == tag_runs(tags)


def test_lists_of_labels_read_alike_from_every_format_that_holds_lists(tmp_path: Path) -> None:
    import datasets

    rows = [{"text": "a", "label": ["y", "x"]}, {"text": "b", "label": []}]
    expected = [Example("a", label=("x", "y")), Example("b", label=())]
    assert read_examples(written(tmp_path / "train.jsonl", lines_of(*rows)), TEXT) == expected
    assert read_examples(parquet(tmp_path / "test.parquet", rows), TEXT) == expected
    numbers = {"text": ["a", "b"], "label": [[1, 0], []]}
    features = features_of(label=datasets.Sequence(datasets.ClassLabel(names=["x", "y"])))
    split = datasets.Dataset.from_dict(numbers, features=features)
    datasets.DatasetDict({"train": split, "validation": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    found = read_splits(str(tmp_path / "saved"), TEXT)
    assert (found.train, found.multi_label, found.labels(TEXT)) == (expected, True, ("x", "y"))
    comma = written(tmp_path / "a.csv", 'text,label\na,"[""x"", ""y""]"\n')
    assert read_examples(comma, TEXT) == [Example("a", label='["x", "y"]')]  # a cell is one label, whatever it holds


def test_the_order_of_a_list_of_labels_says_nothing_and_its_labels_do() -> None:
    one, other, fewer = (Example("a", label=tuple(sorted(names))) for names in (["x", "y"], ["y", "x"], ["x"]))
    assert examples_fingerprint([one]) == examples_fingerprint([other]) != examples_fingerprint([fewer])
    assert examples_fingerprint([Example("a", label=("x",))]) != examples_fingerprint([Example("a", label="x")])


def test_head_and_tail_are_marked_in_what_is_read_whichever_stands_first(tmp_path: Path) -> None:
    first, second = {"start": 0, "end": 4}, {"start": 11, "end": 16}
    rows = [
        {"text": "Rome is in Italy", "head": h, "tail": t, "label": "in"} for h, t in ((first, second), (second, first))
    ]
    found = read_examples(written(tmp_path / "a.jsonl", lines_of(*rows)), TEXT)
    assert found == read_examples(parquet(tmp_path / "a.parquet", rows), TEXT)
    assert [example.text_or_pair for example in found] == [
        "[E1] Rome [/E1] is in [E2] Italy [/E2]",
        "[E2] Rome [/E2] is in [E1] Italy [/E1]",
    ]
    assert [example.text for example in found] == ["Rome is in Italy"] * 2
    touching = {"text": "ab", "head": {"start": 1, "end": 2}, "tail": {"start": 0, "end": 1}, "label": ["x"]}
    assert example_of(touching, TEXT).text_read == "[E2] a [/E2][E1] b [/E1]"
    assert len({examples_fingerprint([example]) for example in (*found, Example("Rome is in Italy", label="in"))}) == 3
