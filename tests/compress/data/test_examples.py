import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.data.examples import Entity, Example, examples_fingerprint
from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
from compress.data.rows import example_of
from compress.data.splits import read_splits
from compress.data.tags import from_tags
from compress.data.texts import read_texts, stream_texts
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from serve.errors import BadInput
from serve.text.labels import bio_tags
from serve.text.spans import tag_runs

TOKENS, TEXT = TOKEN_CLASSIFICATION, TEXT_CLASSIFICATION
# The relations of Hendrickx et al. 2010 as JSON lines, where somebody has them.
SEMEVAL = Path(os.environ.get("SEMEVAL2010_TASK8", "not given"))


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_one_set_of_examples_reads_alike_from_every_format(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": 'to Rome, "now"', "label": "book"}, {"text": "stop\tit", "label": "cancel"}]
    jsonl = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    comma = written(tmp_path, "a.csv", '\ufefftext,label\r\n"to Rome, ""now""",book\r\n"stop\tit",cancel\r\n')
    tabs = written(tmp_path, "a.tsv", 'text\tlabel\n"to Rome, ""now"""\tbook\n"stop\tit"\tcancel\n')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    expected = [Example('to Rome, "now"', label="book"), Example("stop\tit", label="cancel")]
    for path in (jsonl, comma, tabs, tmp_path / "a.parquet"):
        assert read_examples(path, TEXT_CLASSIFICATION) == expected, path.name


def test_conll_columns_become_text_with_offsets(tmp_path: Path) -> None:
    path = written(
        tmp_path, "a.conll", "-DOCSTART- X O\n\nfly VB O\nto TO O\nNew NNP B-city\nYork NNP I-city\n\nhi UH O\n"
    )
    assert read_examples(path, TOKEN_CLASSIFICATION) == [
        Example("fly to New York", entities=(Entity(7, 15, "city"),)),
        Example("hi", entities=()),
    ]


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        pytest.param(["B-x", "I-x", "B-x"], [(0, 3), (4, 5)], id="BIO"),
        pytest.param(["B-x", "E-x", "S-x"], [(0, 3), (4, 5)], id="BIOES"),
        pytest.param(["x", "x", "O"], [(0, 3)], id="IO"),
        pytest.param(["I-x", "O", "I-x"], [(0, 1), (4, 5)], id="I-without-its-B"),
    ],
)
def test_every_tag_scheme_gives_its_spans(tags: list[str], spans: list[tuple[int, int]]) -> None:
    assert [(e.start, e.end) for e in from_tags(["a", "b", "c"], tags).entities or ()] == spans


@given(st.lists(st.sampled_from(bio_tags(["x", "y"])), min_size=1, max_size=12))
def test_tags_are_read_as_the_server_reads_them(tags: list[str]) -> None:
    entities = from_tags(["w"] * len(tags), tags).entities or ()
    assert [(e.start // 2, (e.end - 1) // 2, e.label) for e in entities] == tag_runs(tags)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        pytest.param("[1]", "is list, not an object", id="not-an-object"),
        pytest.param("{bad", "is not JSON", id="not-json"),
        pytest.param('{"entities": []}', "has no `text`", id="no-text"),
        pytest.param('{"text": 5, "entities": []}', "`text` is int, not a string", id="text-is-a-number"),
        pytest.param('{"text": " ", "entities": []}', "`text` is empty", id="blank-text"),
        pytest.param('{"text": "a\\ud800", "entities": []}', "half of a surrogate pair at 1", id="lone-surrogate"),
        pytest.param('{"text": "ab", "entities": {}}', "`entities` is dict, not a list", id="entities-not-a-list"),
        pytest.param(
            '{"text": "ab", "entities": [{"start": 0, "end": 3, "label": "x"}]}',
            r"ends at 3, past the end of the text \(2 code points\)",
            id="past-the-end",
        ),
        pytest.param(
            '{"text": "ab", "entities": [{"start": 1, "end": 1, "label": "x"}]}',
            "0 <= start < end is needed",
            id="no-width",
        ),
        pytest.param(
            '{"text": "ab", "entities": [{"start": true, "end": 1, "label": "x"}]}',
            "whole numbers",
            id="start-is-a-bool",
        ),
        pytest.param(
            '{"text": "a b", "entities": [{"start": 1, "end": 2, "label": "x"}]}',
            "covers only whitespace",
            id="only-whitespace",
        ),
        pytest.param(
            '{"text": "abc", "entities": [{"start": 0, "end": 2, "label": "x"}, {"start": 1, "end": 3, "label": "y"}]}',
            "entities overlap: x 0..2 and y 1..3",
            id="overlap",
        ),
        pytest.param('{"tokens": ["a"], "tags": ["O", "O"]}', "has 1 tokens but 2 tags", id="tags-do-not-fit"),
        pytest.param(
            '{"text": "a"}',
            "has no `text` with `entities`, and no `tokens` with `tags` .its fields: text",
            id="no-entities",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_reason(tmp_path: Path, row: str, reason: str) -> None:
    path = written(tmp_path, "train.jsonl", '{"text": "fine", "entities": []}\n' + row + "\n")
    with pytest.raises(BadRows, match=rf"train\.jsonl, line 2: .*{reason}"):
        read_examples(path, TOKEN_CLASSIFICATION)


def test_all_bad_rows_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        written(tmp_path, f"{name}.jsonl", '{"text": "a", "label": ""}\n{"text": "b", "label": "x"}\n{"label": "x"}\n')
    with pytest.raises(BadRows) as caught:
        read_splits(str(tmp_path), TEXT_CLASSIFICATION)
    assert [(Path(f.file).name, f.line) for f in caught.value.faults] == [
        (f"{name}.jsonl", line) for name in ("train", "validation", "test") for line in (1, 3)
    ]


def test_a_csv_without_its_label_column_says_what_it_has(tmp_path: Path) -> None:
    path = written(tmp_path, "train.csv", "text,intent\nhello,greet\n")
    with pytest.raises(
        BadRows, match=r"csv: has the columns text, intent; text and label are needed\. Rename"
    ) as caught:
        read_examples(path, TEXT_CLASSIFICATION)
    assert len(caught.value.faults) == 1
    assert "or give --label-column intent" in str(caught.value)


def test_a_csv_with_a_nameless_column_of_row_numbers_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, "train.csv", ",text,label\n0,hello,greet\n1,bye,leave\n")
    assert [(e.text, e.label) for e in read_examples(path, TEXT_CLASSIFICATION)] == [
        ("hello", "greet"),
        ("bye", "leave"),
    ]


def test_a_csv_row_whose_text_holds_an_unquoted_comma_is_a_fault_and_not_another_label(tmp_path: Path) -> None:
    path = written(tmp_path, "train.csv", "text,label\nfine,ok\nWhere is it, please,status\n")
    with pytest.raises(BadRows, match="line 3: has 3 fields, but the header has 2; quote texts"):
        read_examples(path, TEXT_CLASSIFICATION)


def test_a_quote_that_never_closes_is_a_fault(tmp_path: Path) -> None:
    path = written(tmp_path, "train.csv", 'text,label\n"open,ok\n' + "x" * 200_000)
    with pytest.raises(BadRows, match="line 2: has a quote that is not closed before the end of the file"):
        read_examples(path, TEXT_CLASSIFICATION)


def test_half_a_surrogate_pair_is_found_wherever_it_hides(tmp_path: Path) -> None:
    for row in ('{"text": "a", "label": "\\ud800"}', '{"text": "a", "text_pair": "\\ud800", "label": "x"}'):
        with pytest.raises(BadRows, match="half of a surrogate pair"):
            read_examples(written(tmp_path, "train.jsonl", row), TEXT_CLASSIFICATION)


def test_unlabelled_rows_that_hold_no_text_are_faults(tmp_path: Path) -> None:
    with pytest.raises(BadRows) as caught:
        read_texts(written(tmp_path, "u.jsonl", '{"text": null}\nnot json\n{"txt": "a"}\n{"text": "fine"}\n'))
    assert [fault.line for fault in caught.value.faults] == [2, 1, 3] or [f.line for f in caught.value.faults] == [
        1,
        2,
        3,
    ]


def test_lists_of_labels_read_alike_from_every_format_that_holds_lists(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "a", "label": ["y", "x"]}, {"text": "b", "label": []}]
    folder = tmp_path / "files"
    folder.mkdir()
    written(folder, "train.jsonl", "\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "test.parquet")
    numbers = {"text": ["a", "b"], "label": [[1, 0], []]}
    names = datasets.Sequence(datasets.ClassLabel(names=["x", "y"]))
    split = datasets.Dataset.from_dict(
        numbers, features=datasets.Features({"text": datasets.Value("string"), "label": names})
    )
    datasets.DatasetDict({"train": split, "validation": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    expected = [Example("a", label=("x", "y")), Example("b", label=())]
    assert read_examples(folder / "train.jsonl", TEXT_CLASSIFICATION) == expected
    assert read_examples(folder / "test.parquet", TEXT_CLASSIFICATION) == expected
    found = read_splits(str(tmp_path / "saved"), TEXT_CLASSIFICATION)
    assert found.train == expected
    assert found.multi_label
    assert found.labels(TEXT_CLASSIFICATION) == ("x", "y")
    comma = written(tmp_path, "a.csv", 'text,label\na,"[""x"", ""y""]"\n')
    assert read_examples(comma, TEXT_CLASSIFICATION) == [
        Example("a", label='["x", "y"]')
    ]  # a cell is one label, whatever it holds


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ('["x", 1]', "`label` holds a number, but the file has no names for class numbers; write"),
        ('["x", ""]', "`label` holds ''; a non-empty string is needed"),
        ('["y", "x", "y"]', "`label` holds 'y' twice"),
        ('{"x": 1}', r"`label` holds \{'x': 1\}; a non-empty string is needed, or a list of them"),
        ('["\\ud800"]', "`label` holds half of a surrogate pair"),
    ],
)
def test_a_bad_list_of_labels_is_a_fault(tmp_path: Path, label: str, reason: str) -> None:
    path = written(tmp_path, "train.jsonl", f'{{"text": "a", "label": []}}\n{{"text": "a", "label": {label}}}\n')
    with pytest.raises(BadRows, match=rf"train\.jsonl, line 2: {reason}"):
        read_examples(path, TEXT_CLASSIFICATION)


def test_rows_with_one_label_among_rows_with_lists_are_faults_in_whichever_file_they_stand(tmp_path: Path) -> None:
    listed = '{"text": "a", "label": ["x"]}\n'
    single = '{"text": "b", "label": "x"}\n'
    written(tmp_path, "train.jsonl", listed * 3 + single + listed)
    written(tmp_path, "validation.jsonl", listed)
    written(tmp_path, "test.jsonl", single)
    with pytest.raises(BadRows, match="one string, but in 5 other rows `label` is a list; give all rows") as caught:
        read_splits(str(tmp_path), TEXT_CLASSIFICATION)
    assert [(Path(f.file).name, f.line) for f in caught.value.faults] == [("train.jsonl", 4), ("test.jsonl", 1)]
    with pytest.raises(BadRows, match="but in 1 other row "):
        read_examples(written(tmp_path, "two.jsonl", listed + single), TEXT_CLASSIFICATION)
    with pytest.raises(BadRows, match=r"line 1: `label` is a list, but in 2 other rows one string"):
        read_examples(written(tmp_path, "train.jsonl", listed + single * 2), TEXT_CLASSIFICATION)


def test_the_order_of_a_list_of_labels_says_nothing_and_its_labels_do() -> None:
    one, other, fewer = (Example("a", label=tuple(sorted(names))) for names in (["x", "y"], ["y", "x"], ["x"]))
    assert examples_fingerprint([one]) == examples_fingerprint([other]) != examples_fingerprint([fewer])
    assert examples_fingerprint([Example("a", label=("x",))]) != examples_fingerprint([Example("a", label="x")])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("train.jsonl", b"", "is empty: it holds no rows", id="an-empty-file"),
        pytest.param("train.jsonl", b"\xff\xfa\x00", "line 1: is not UTF-8 text .byte 0", id="not-utf8"),
        pytest.param("train.jsonl", '{"text": "a"}'.encode("utf-16"), "is UTF-16 text; save", id="utf16"),
        pytest.param("train.csv", "text,label".encode("utf-16-be"), "is UTF-16 text; save", id="utf16-without-a-mark"),
        pytest.param("train.csv.gz", b"text,label\n", "is damaged or incomplete", id="not-gzip"),
        pytest.param("train.parquet.gz", b"", r"is parquet, .* Give it without gzip", id="parquet-in-gzip"),
        pytest.param("train.xlsx", b"PK", r"ends in \.xlsx\. Give labelled examples as \.jsonl", id="a-spreadsheet"),
        pytest.param("train.parquet", b"nope", "is not a parquet file", id="not-parquet"),
        pytest.param("train.jsonl", '{"text": "a"}'.encode("utf-32"), "is UTF-32 text; save", id="utf32"),
        pytest.param("train.csv", "text,é".encode("utf-32-be"), "is UTF-32 text; save", id="utf32-without-a-mark"),
        pytest.param("train.csv", "text,é".encode("cp1252"), "not UTF-8 text .*iconv -f CP1252", id="windows"),
        pytest.param("train.csv", b"text,label\na\x00b,x\n", "line 2: holds a byte 0 .byte 12 of", id="byte-0"),
        pytest.param("train.jsonl", b"PK\x03\x04\x14\x00", "is a zip archive, as .xlsx", id="a-zip-archive"),
        pytest.param("train.parquet", b"PK\x03\x04\x14\x00", "is a zip archive, as .xlsx", id="no-parquet-but-zip"),
        pytest.param("train.conll", b"PAR1\x15\x04", r"is parquet; let its name end in \.parquet", id="parquet"),
        pytest.param("train.json", b"\x80\x04\x95\x00", "is a pickle of Python; write", id="pickle"),
        pytest.param("train.jsonl", b"\x1f\x8b\x08\x00", r"is packed with gzip; let its name end in \.gz", id="gzip"),
        pytest.param("train.csv", b"\n<!DOCTYPE html>", "is HTML or XML", id="a-page"),
        pytest.param("train.csv", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull", id="git-lfs"),
        pytest.param("train.conll", b"#FORMAT=WebAnno TSV 3.3\n", "WebAnno TSV of INCEpTION; export", id="inception"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_examples(written(tmp_path, name, content), TEXT_CLASSIFICATION)


def test_files_that_are_not_utf8_are_named_together_each_with_its_line_and_other_faults(tmp_path: Path) -> None:
    good = '{"text": "a", "label": "x"}\n'
    latin = '{"text": "Köln", "label": "x"}\n'
    written(tmp_path, "train.jsonl", ('{"label": "x"}\n' + good + latin + good).encode("latin-1"))
    written(tmp_path, "validation.csv", "text,label\na,x\nKöln,x\n".encode("latin-1"))
    written(tmp_path, "test.jsonl", latin.encode("latin-1"))
    with pytest.raises(BadRows, match=r"4 faults(?s:.*)line 3: is not UTF-8 text \(byte 54 of the file\)") as caught:
        read_splits(str(tmp_path), TEXT_CLASSIFICATION)
    places = [(Path(f.file).name, f.line) for f in caught.value.faults]
    assert places == [("train.jsonl", 1), ("train.jsonl", 3), ("validation.csv", 3), ("test.jsonl", 1)]


def test_a_folder_without_a_test_split_says_what_it_found(tmp_path: Path) -> None:
    written(tmp_path, "train.jsonl", '{"text": "a", "label": "x"}\n')
    with pytest.raises(BadInput, match=r"has no test split \(found: train\)"):
        read_splits(str(tmp_path), TEXT_CLASSIFICATION)


def test_without_validation_a_tenth_of_train_is_held_out_the_same_each_time(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"t{i}", "label": "x"}) + "\n" for i in range(50))
    written(tmp_path, "train.jsonl", rows)
    written(tmp_path, "test.jsonl", rows)
    first, second = read_splits(str(tmp_path), TEXT_CLASSIFICATION), read_splits(str(tmp_path), TEXT_CLASSIFICATION)
    assert first.held_out
    assert len(first.validation) == 5
    assert first.validation == second.validation
    assert not set(first.validation) & set(first.train)


def test_a_dataset_saved_by_datasets_reads_with_its_class_names(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("string")),
            "ner_tags": datasets.Sequence(datasets.ClassLabel(names=["O", "B-city"])),
        }
    )
    rows = {"tokens": [["to", "Rome"]], "ner_tags": [[0, 1]]}
    split = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": split, "validation": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    found = read_splits(str(tmp_path / "saved"), TOKEN_CLASSIFICATION)
    assert found.train == [Example("to Rome", entities=(Entity(3, 7, "city"),))]


def test_a_name_that_nobody_knows_says_what_to_give() -> None:
    with pytest.raises(BadInput, match="neither a local folder nor a data set that can be read from the Hub"):
        read_splits("absent", TEXT_CLASSIFICATION)


def test_plain_text_is_one_document_a_line(tmp_path: Path) -> None:
    assert read_texts(written(tmp_path, "a.txt", "one\n\n  two \n")) == ["one", "two"]
    with pytest.raises(BadInput, match=r"holds no text\. Give a file"):
        read_texts(written(tmp_path, "b.txt", "\n \n"))


def test_second_texts_of_pairs_are_read_when_asked_for(tmp_path: Path) -> None:
    rows = [{"text": "one", "text_pair": "two"}, {"text": "three"}, {"text": "four", "text_pair": None}]
    path = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_texts(path) == ["one", "three", "four"]
    assert read_texts(path, pairs=True) == ["one", "two", "three", "four"]
    assert read_texts(written(tmp_path, "a.tsv", "text\ttext_pair\none\t\ntwo\tthree\n"), pairs=True) == [
        "one",
        "two",
        "three",
    ]
    with pytest.raises(BadRows, match=r"a.jsonl, line 1: `text_pair` is int, not a string"):
        read_texts(written(tmp_path, "a.jsonl", '{"text": "one", "text_pair": 2}'), pairs=True)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.txt"])
def test_a_file_of_texts_gives_the_first_before_it_has_read_the_last(tmp_path: Path, name: str) -> None:
    import pyarrow
    from pyarrow import parquet

    texts = [f"text {i}" for i in range(30_000)]
    path = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(pyarrow.table({"text": texts, "more": [0] * len(texts)}), path, row_group_size=2_000)
    else:
        rows = {"a.jsonl": [f'{{"text": "{t}"}}' for t in texts], "a.csv": ["text", *texts], "a.txt": texts}[name]
        path.write_text("\n".join(rows), encoding="utf-8")
    tracemalloc.start()
    try:
        for text in stream_texts(path):
            assert text == "text 0"
            break
        first = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert first < 1_500_000  # all of them are 2 MB as strings alone
    assert list(stream_texts(path)) == read_texts(path) == texts


def test_a_file_whose_every_row_is_bad_is_given_up(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"words": "x"}\n' * 5_000)
    with pytest.raises(BadRows) as raised:
        read_texts(path)
    assert "a.jsonl: was read only up to line 1000, which has fault number 1,000" in str(raised.value)


def test_bytes_that_are_no_utf8_are_named_by_their_place_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\n" + b"three\xff\n")
    with pytest.raises(
        BadInput, match=r"a.txt, line 3: is not UTF-8 text \(byte 16 of the file\); save the file as UTF-8"
    ):
        read_texts(path)
    path.write_bytes(b"\xef\xbb\xbfone\ntwo")
    assert read_texts(path) == ["one", "two"]


RELATION = {"text": "Rome is in Italy", "head": {"start": 0, "end": 4}, "tail": {"start": 11, "end": 16}, "label": "in"}


def test_head_and_tail_are_marked_in_what_is_read_whichever_stands_first(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    turned = RELATION | {"head": RELATION["tail"], "tail": RELATION["head"]}
    touching = {"text": "ab", "head": {"start": 1, "end": 2}, "tail": {"start": 0, "end": 1}, "label": ["x"]}
    jsonl = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, [RELATION, turned])))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([RELATION, turned]), tmp_path / "a.parquet")
    found = read_examples(jsonl, TEXT_CLASSIFICATION)
    assert found == read_examples(tmp_path / "a.parquet", TEXT_CLASSIFICATION)
    assert [example.text_or_pair for example in found] == [
        "[E1] Rome [/E1] is in [E2] Italy [/E2]",
        "[E2] Rome [/E2] is in [E1] Italy [/E1]",
    ]
    assert [example.text for example in found] == ["Rome is in Italy"] * 2
    assert example_of(touching, TEXT_CLASSIFICATION).text_read == "[E2] a [/E2][E1] b [/E1]"
    assert len({examples_fingerprint([example]) for example in (*found, Example("Rome is in Italy", label="in"))}) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tail": None}, "`tail` is None; an object with `start` and `end` is needed"),
        ({"head": "Rome"}, "`head` is 'Rome'; an object with `start` and `end` is needed \\(CSV"),
        ({"head": {"start": 0}}, r"`head` is \{'start': 0\}; an object"),
        ({"head": {"start": True, "end": 4}}, r"`head` is at True\.\.4: whole numbers are needed"),
        ({"head": {"start": 4, "end": 4}}, r"`head` is at 4\.\.4: 0 <= start < end"),
        ({"tail": {"start": 11, "end": 17}}, r"`tail` ends at 17, past the end of the text \(16 code points\)"),
        ({"head": {"start": 4, "end": 5}}, r"`head` at 4\.\.5 covers only whitespace"),
        ({"head": {"start": 8, "end": 12}}, r"`head` 8\.\.12 and `tail` 11\.\.16 overlap"),
        ({"text": "[E2] is in Italy"}, r"`text` holds \[E2\], which stillroom adds"),
        ({"text_pair": "It is."}, "has both `text_pair` and `head`"),
        ({"head": None, "tail": None}, "has no `head` and `tail`, but in 2 other rows has `head` and `tail`"),
    ],
)
def test_a_bad_relation_is_named_by_file_line_and_reason(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    rows = [RELATION, RELATION | changes, RELATION]
    with pytest.raises(BadRows, match=rf"train\.jsonl, line 2: {reason}") as caught:
        read_examples(written(tmp_path, "train.jsonl", "\n".join(map(json.dumps, rows))), TEXT_CLASSIFICATION)
    assert len(caught.value.faults) == 1


def test_a_lone_field_called_head_is_no_relation(tmp_path: Path) -> None:
    assert read_examples(written(tmp_path, "a.csv", "text,label,head\na,x,1\n"), TEXT_CLASSIFICATION) == [
        Example("a", label="x")
    ]


@pytest.mark.skipif(not SEMEVAL.is_dir(), reason="SEMEVAL2010_TASK8 names no folder of it")
def test_semeval_reads_whole_with_eighteen_directed_relations_and_other() -> None:
    splits = read_splits(str(SEMEVAL), TEXT_CLASSIFICATION)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (7_200, 800, 2_717)
    assert splits.relations
    assert not splits.multi_label
    labels = splits.labels(TEXT_CLASSIFICATION)
    assert (len(labels), labels[0], "Other" in labels) == (19, "Cause-Effect(e1,e2)", True)
    assert all(example.text_read.replace("[E1] ", "").count("[E1]") == 0 for example in splits.test)
