"""Faults of files of examples: each is named by its line and by what is wrong there."""

import json
from pathlib import Path
from typing import Any

import pytest
from data_files import TEXT, TOKENS, faults, lines_of, parquet, written

from compress.data.columns import Columns
from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
from compress.data.splits import read_splits
from compress.data.task import Task
from compress.data.texts import read_texts
from compress.tasks import QUESTION_ANSWERING
from serve.errors import BadInput

CONTEXT = "the kettle is sent to Oslo"
RELATION = {"text": "Rome is in Italy", "head": {"start": 0, "end": 4}, "tail": {"start": 11, "end": 16}, "label": "in"}
FINE: dict[str, dict[str, Any]] = {
    "label": {"text": "fine", "label": "x"},
    "list": {"text": "fine", "label": []},
    "entities": {"text": "fine", "entities": []},
    "answers": {"question": "a", "context": "b", "answers": []},
    "relation": RELATION,
}
TASKS: dict[str, Task] = {"entities": TOKENS, "answers": QUESTION_ANSWERING}


def asked(**row: Any) -> dict[str, Any]:
    return {"question": "where", "context": CONTEXT} | row


def entity(start: object, end: object, label: str = "x") -> dict[str, Any]:
    return {"start": start, "end": end, "label": label}


# The kind of the rows around it, the row, and the words of its fault that tell what is wrong.
ROWS: list[tuple[str, Any, str]] = [
    ("entities", [1], "is list, not an object"),
    ("entities", "{bad", "is not JSON"),
    ("entities", {"entities": []}, "has no `text`"),
    ("entities", {"text": 5, "entities": []}, "`text` is int"),
    ("entities", {"text": " ", "entities": []}, "`text` is empty"),
    ("entities", {"text": "a\ud800", "entities": []}, "half of a surrogate pair at 1"),
    ("entities", {"text": "ab", "entities": {}}, "`entities` is dict"),
    ("entities", {"text": "ab", "entities": [entity(0, 3)]}, "past the end of the text (2 code points)"),
    ("entities", {"text": "ab", "entities": [entity(1, 1)]}, "0 <= start < end"),
    ("entities", {"text": "ab", "entities": [entity(True, 1)]}, "whole numbers"),
    ("entities", {"text": "a b", "entities": [entity(1, 2)]}, "only whitespace"),
    ("entities", {"text": "abc", "entities": [entity(0, 2), entity(1, 3, "y")]}, "overlap: x 0..2 and y 1..3"),
    ("entities", {"text": "ab", "entities": [entity(0, 1, " x")]}, "begins or ends with space"),
    ("entities", {"tokens": ["a"], "tags": ["O", "O"]}, "1 tokens but 2 tags"),
    ("entities", {"tokens": ["a"], "tags": ["B-city "]}, "begins or ends with space"),
    ("entities", {"tokens": ["in", " "], "tags": ["O", "B-city"]}, "only blanks"),
    ("entities", {"tokens": ["in", "\u00a0"], "tags": ["O", "B-city"]}, "only blanks"),
    ("entities", {"tokens": ["in", "Rome"], "tags": ["O", "B- city"]}, "'B- city', whose label begins with space"),
    ("entities", {"tokens": ["in", "Rome"], "tags": ["O", "I-\tcity"]}, "whose label begins with space"),
    ("entities", {"tokens": ["in", "Rome"], "tags": ["O", "U-\u00a0city"]}, "whose label begins with space"),
    ("entities", {"tokens": ["a", "b"], "tags": ["O", "B-ORG|B-LOC"]}, "is several tags"),
    ("entities", {"tokens": ["a", "b"], "tags": ["O", "B-city,B-org"]}, "is several tags"),
    ("entities", {"tokens": ["a", "b"], "tags": ["O", "O|O"]}, "is several tags"),
    ("entities", {"tokens": ["a", "b"], "tags": ["O", "B-a;I-b"]}, "is several tags"),
    ("entities", {"tokens": ["a", "b"], "tags": ["O", "B-city, O"]}, "is several tags"),
    ("entities", {"tokens": ["a", "b"], "ner_tags": [0, 1]}, "`ner_tags` holds a number"),
    ("entities", {"text": "a"}, "no `text` with `entities`, and no `tokens` with `tags` (its fields: text)"),
    ("entities", {"words": ["Ana", "is"], "labels": ["B-x", "O"]}, "--tokens-column words --tags-column labels"),
    ("entities", {"text": ["Ana", "is"], "label": ["B-x", "O"]}, "--tokens-column text --tags-column label"),
    ("entities", {"data": {"text": "Ana is"}, "annotations": [{"result": []}]}, "Label Studio"),
    ("list", {"text": "a", "label": ["x", 1]}, "no names for class numbers"),
    ("list", {"text": "a", "label": ["x", ""]}, "`label` holds ''"),
    ("list", {"text": "a", "label": ["y", "x", "y"]}, "`label` holds 'y' twice"),
    ("list", {"text": "a", "label": {"x": 1}}, "`label` holds {'x': 1}"),
    ("list", {"text": "a", "label": ["\ud800"]}, "half of a surrogate pair"),
    ("list", {"text": "b", "label": ["x "]}, "begins or ends with space"),
    ("label", {"text": "a", "label": 3}, "holds a number"),
    ("label", {"text": "a", "label": "\ud800"}, "half of a surrogate pair"),
    ("label", {"text": "a", "text_pair": "\ud800", "label": "x"}, "half of a surrogate pair"),
    ("label", {"text": None, "label": "x"}, "`text` is null"),
    ("label", {"text": float("nan"), "label": "x"}, "`text` is NaN"),
    ("label", {"text": " \u200b ", "label": "x"}, "`text` is empty"),
    ("label", {"text": "a", "label": " "}, "`label` holds ' '"),
    ("label", {"text": "a", "label": float("nan")}, "`label` holds NaN"),
    ("label", {"text": "a", "label": {"x": 0.9, "y": 0.1}}, "--teacher-labels"),
    ("label", {"text": "a b", "sport": 1, "art": 0}, "has 0 or 1 in sport, art"),
    ("label", {"text": "a", "cats": {"x": 1.0, "y": 0.0}}, "has `cats` as spaCy writes them"),
    ("relation", RELATION | {"tail": None}, "`tail` is None"),
    ("relation", RELATION | {"head": "Rome"}, "`head` is 'Rome'"),
    ("relation", RELATION | {"head": {"start": 0}}, "`head` is {'start': 0}"),
    ("relation", RELATION | {"head": {"start": True, "end": 4}}, "`head` is at True..4: whole numbers"),
    ("relation", RELATION | {"head": {"start": 4, "end": 4}}, "`head` is at 4..4: 0 <= start < end"),
    ("relation", RELATION | {"tail": {"start": 11, "end": 17}}, "`tail` ends at 17, past the end"),
    ("relation", RELATION | {"head": {"start": 4, "end": 5}}, "`head` at 4..5 covers only whitespace"),
    ("relation", RELATION | {"head": {"start": 8, "end": 12}}, "`head` 8..12 and `tail` 11..16 overlap"),
    ("relation", RELATION | {"head": {"start": 0, "end": 3, "text": "Rome"}}, "its end looks inclusive"),
    ("relation", RELATION | {"text": "[E2] is in Italy"}, "`text` holds [E2]"),
    ("relation", RELATION | {"text_pair": "It is."}, "both `text_pair` and `head`"),
    ("relation", RELATION | {"head": None, "tail": None}, "no `head` and `tail`, but in 2 other rows"),
    ("answers", asked(), "has no `answers`"),
    ("answers", {"question": "where", "passage": CONTEXT, "answers": []}, "has no `context`"),
    ("answers", asked(question=" ", answers=[]), "`question` is empty"),
    ("answers", asked(answers="Oslo"), "`answers` is str"),
    ("answers", asked(answers=["Oslo"]), "`answers` holds 'Oslo'"),
    ("answers", asked(answers=[{"text": "Rome", "answer_start": 22}]), "and the context has 'Oslo' there"),
    ("answers", asked(answers=[{"text": "Oslo", "answer_start": 24}]), "no place in the context (26 code points)"),
    ("answers", asked(answers=[{"start": 3, "end": 4}]), "only whitespace"),
    ("answers", asked(answers=[{"start": True, "end": 4}]), "no place in the context"),
]


@pytest.mark.parametrize(("kind", "row", "says"), ROWS, ids=[f"{kind}: {says}" for kind, _, says in ROWS])
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, kind: str, row: Any, says: str) -> None:
    path = written(tmp_path / "train.jsonl", lines_of(FINE[kind], row, FINE[kind]))
    ((line, reason),) = faults(path, TASKS.get(kind, TEXT))
    assert (line, says in reason) == (2, True), reason


ROW = '{"text": "a", "label": "x"}'
# A file of a text and its label; entities are in .conll. No line: the fault is the file's.
FILES: list[tuple[str, str | bytes, int | None, str]] = [
    # JSON.
    ("a.json", '[{"text": "a", "label": "x"},\n\n {"text": "b"}]', 3, "has no `label`"),
    ("a.json", f"[\n{ROW}\n,\n3]", 4, "is int, not an object"),
    ("a.json", f"[{ROW},\n]", 2, "not JSON from here on (Expecting value at column 1; remove the comma before it)"),
    ("a.json", f"[{ROW}\n{{}}]", 2, "not JSON from here on (Expecting ',' or ']' at column 1)"),
    ("a.json", f"[{ROW},", 1, "not JSON from here on"),
    ("a.json", "[" * 100_000, 1, "nested too deeply"),
    ("a.json", '{"rows":\n[]}', 1, "(its fields: rows)"),
    ("a.json", "text: a", 1, "an array of objects"),
    ("a.json", "[]", None, "is empty"),
    ("a.jsonl", f"{ROW},\n{ROW}", 1, "comma"),
    ("a.jsonl", f"{ROW} {ROW}", 1, "one object a line"),
    ("a.jsonl", f"// rows\n{ROW}", 1, "no comments"),
    ("a.jsonl", "{'text': 'a', 'label': 'x'}", 1, "double quotes"),
    ("a.jsonl", '{text: "a", "label": "x"}', 1, "double quotes"),
    ("a.jsonl", '{"text": "a", "label": None}', 1, "null, true or false"),
    ("a.jsonl", '{"text": "a', 1, "line break"),
    ("a.jsonl", '{"text": "a\tb", "label": "x"}', 1, "write a tab as \\t"),
    ("a.jsonl", f"[{ROW}]\n[{ROW}]", 2, "one array"),
    ("a.jsonl", f"{ROW}\n{json.dumps(ROW)}", 2, "JSON twice"),
    ("a.jsonl", f'{{"data": [{ROW}]}}', 1, "jq -c '.data[]'"),
    ("a.jsonl", f'{{\n"version": "1", "train": [{ROW}]}}', 1, "a list `train` of objects"),
    ("a.jsonl", f'{{"0": {ROW}, "1": {ROW}}}', 1, "one object of objects"),
    ("a.jsonl", '{"columns": ["text"], "data": [["a"]]}', 1, "orient='split'"),
    ("a.jsonl", '{"text": ["a", "b"], "label": ["x", "y"]}', 1, "`text` is a list"),
    # Tables.
    ("a.csv", "text,label\nfine,ok\nWhere is it, please,status\n", 3, "3 fields, but the header has 2; quote texts"),
    ("a.csv", 'text,label\n"open,ok\n' + "x" * 200_000, 2, "a quote that is not closed"),
    ("a.csv", 'text,label\na,x\nb,"x\nc,x\nd,x\n', 3, "a quote that is not closed"),
    ("a.csv", 'text,label\n"a\nb",x\n"c,x\nd,x\n', 4, "a quote that is not closed"),
    ("a.csv", "sep=;\ntext;label\na;x\n", 1, "is no header"),
    ("a.csv", "# by me\n\ntext,label\na,x\n", 1, "is no header"),
    ("a.csv", "text,label\na,x\ntext,label\nb,y\n", 3, "names the columns again"),
    ("a.csv", "text,label\n1,a,x\n", 2, "an index"),
    ("a.csv", 'text,label\n"a,x"\n', 2, "not the whole line"),
    ("a.csv", "text,sport,art\na,1,0\n", 1, "has 0 or 1 in sport, art"),
    ("a.csv", "", None, "is empty"),
    ("a.csv", "\n\n", None, "is empty"),
    ("a.csv", ",,\na,b,c\n", None, "no column names in its first line"),
    ("a.csv", "text,label,text\na,b,c\n", None, "the column text twice"),
    # Words and tags in columns.
    ("a.conll", "New York B-city\nis O\nbig O\n", 1, "3 columns, and most lines of the file have 2"),
    ("a.conll", "Ana\tN\tB-x\nlives\tO\nhere\tA\tO\n", 2, "2 columns, and most lines of the file have 3"),
    ("a.conll", "Ana\tB-x\nlives\nhere\tO\n", 2, "one column ('lives')"),
    ("a.conll", "Ana\tB-x\n \tO\n", 2, "no word in its first column"),
    ("a.conll", "Ana B-x\n# a note\nhere O\n", 2, "like a comment"),
    ("a.conll", "Ana B-x\rhere O\r", 1, "carriage return"),
    ("a.conll", "1\tAna\tB-x\n2\tlives\tO\n\n1\tHere\tO\n", None, "numbers in its first column"),
    ("a.conll", "7 Ana B-x\n7 lives O\n\n8 Here O\n", None, "numbers in its first column"),
    ("a.conll", "B-x Ana\nO lives\n", None, "holds 'Ana', and tags in column 1 of 2"),
    ("a.conll", "Ana B-x +\nlives O -\n", None, "holds '+', and tags in column 2 of 3"),
    ("a.conll", "Ana x NN\nlives O VB\n", None, "holds 'NN', and tags in column 2 of 3"),
    ("a.conll", "Ana B\nlives O\n", 1, "the tag 'B', a prefix without a label"),
    ("a.conll", "Ana (S(NP*\nis *\n", 1, "'(S(NP*' in its last column"),
    ("a.conll", "Ana (NP*\nis (VP*)\nit *)\n", 2, "within another"),
    ("a.conll", "Ana (NP*)\nis *)\n", 2, "no span is open there"),
    ("a.conll", "Ana (NP*\nis *\n\n", 1, "last span (NP*) is not closed"),
    ("a.conll", "b 0 0 Ana N (TOP(NP* - (PERSON) (1)\nb 0 1 is V (VP*)) - * -\n", None, "'(PERSON)' in column 8 of 9"),
    ("a.conll", "Sentence #\tWord\tPOS\tTag\nS: 1\tAna\tN\tB-per\n\tis\tV\tO\n", None, "column 2 (word) of 4"),
    ("a.conll", "Sentence\tWord\tTag\nS: 1\tAna\tB-per\n\tis\tO\n", None, "column 2 (word) of 3"),
    ("a.conll", "Tag\tWord\nB-per\tAna\nO\tis\n", None, "column 2 (word) of 2 and tags in column 1 (tag)"),
    (
        "a.conll",
        "word\tner\tpos\tlemma\nAna\tB-per\tN\tana\nis\tO\tV\tbe\n",
        None,
        "column 1 (word) of 4 and tags in column 2",
    ),
    # What the bytes are.
    ("a.jsonl", b"", None, "is empty"),
    ("a.jsonl", b"\xff\xfa\x00", 1, "is not UTF-8 text (byte 0"),
    ("a.jsonl", '{"text": "a"}'.encode("utf-16"), None, "is UTF-16"),
    ("a.csv", "text,label".encode("utf-16-be"), None, "is UTF-16"),
    ("a.jsonl", '{"text": "a"}'.encode("utf-32"), None, "is UTF-32"),
    ("a.csv", "text,é".encode("utf-32-be"), None, "is UTF-32"),
    ("a.csv", "text,é".encode("cp1252"), 1, "iconv -f CP1252"),
    ("a.csv", b"text,label\na\x00b,x\n", 2, "a byte 0 (byte 12"),
    ("a.csv.gz", b"text,label\n", None, "damaged or incomplete"),
    ("a.parquet.gz", b"", None, "Give it without gzip"),
    ("a.xlsx", b"PK", None, "ends in .xlsx"),
    ("a.parquet", b"nope", None, "not a parquet file"),
    ("a.jsonl", b"PK\x03\x04\x14\x00", None, "a zip archive"),
    ("a.parquet", b"PK\x03\x04\x14\x00", None, "a zip archive"),
    ("a.conll", b"PAR1\x15\x04", None, "is parquet"),
    ("a.json", b"\x80\x04\x95\x00", None, "a pickle"),
    ("a.jsonl", b"\x1f\x8b\x08\x00", None, "gzip"),
    ("a.csv", b"\n<!DOCTYPE html>", None, "HTML"),
    ("a.csv", b"version https://git-lfs.github.com/spec/v1\n", None, "git lfs pull"),
    ("a.tsv", b"#FORMAT=WebAnno TSV 3.3\n\n#Text=Ana\n1-1\t0-3\tAna\tperson\n", None, "INCEpTION"),
    ("a.conll", b"#FORMAT=WebAnno TSV 3.3\n", None, "INCEpTION"),
]


@pytest.mark.parametrize(("name", "content", "line", "says"), FILES, ids=[f"{each[0]}: {each[3]}" for each in FILES])
def test_a_bad_file_is_named_by_its_line(
    tmp_path: Path, name: str, content: str | bytes, line: int | None, says: str
) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(BadInput) as caught:
        read_examples(path, TOKENS if name.endswith("conll") else TEXT)
    assert name in caught.value.message
    assert says in caught.value.message
    assert [each.line for each in getattr(caught.value, "faults", [])] in ([line], [] if line is None else [line])


def test_all_bad_rows_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        written(tmp_path / f"{name}.jsonl", lines_of({"text": "a", "label": ""}, ROW, {"label": "x"}))
    with pytest.raises(BadRows) as caught:
        read_splits(str(tmp_path), TEXT)
    assert [(Path(f.file).name, f.line) for f in caught.value.faults] == [
        (f"{name}.jsonl", line) for name in ("train", "validation", "test") for line in (1, 3)
    ]


def test_a_file_whose_every_row_is_bad_is_given_up_and_the_others_are_read(tmp_path: Path) -> None:
    written(tmp_path / "train.jsonl", '{"words": "x"}\n' * 3_000)
    written(tmp_path / "test.jsonl", '{"text": "a", "label": ""}\n')
    with pytest.raises(BadRows) as caught:
        read_splits(str(tmp_path), TEXT)
    assert "train.jsonl: was read only up to line 1000, which has fault number 1,000" in str(caught.value)
    assert "test.jsonl, line 1: `label` holds ''" in str(caught.value)


def test_rows_that_all_lack_a_field_are_told_in_one_line_with_the_flag(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"sentence": "a", "label": "x"}\n' * 30)
    with pytest.raises(BadRows) as caught:
        read_examples(path, TEXT)
    assert len(caught.value.faults) == 30
    _, line = str(caught.value).splitlines()
    assert "lines 1, 2, 3, 4, 5 and 25 more: has no `text` (its fields: sentence, label)" in line
    assert line.endswith("--text-column sentence")


def test_a_row_after_one_of_several_lines_is_named_by_its_own(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'text,label\n"a\nb",x\n\nshort\nlong,x,y\n"c\nd",\n')
    assert [(line, reason.split(",")[0]) for line, reason in faults(path)] == [
        (5, "has 1 field"),
        (6, "has 3 fields"),
        (7, "`label` holds ''; a non-empty string is needed"),
    ]


def test_rows_with_one_label_among_rows_with_lists_are_faults_in_whichever_file_they_stand(tmp_path: Path) -> None:
    listed, single = lines_of(FINE["list"]), lines_of(FINE["label"])
    written(tmp_path / "train.jsonl", listed * 3 + single + listed)
    written(tmp_path / "validation.jsonl", listed)
    written(tmp_path / "test.jsonl", single)
    with pytest.raises(BadRows, match="one string, but in 5 other rows `label` is a list") as caught:
        read_splits(str(tmp_path), TEXT)
    assert [(Path(f.file).name, f.line) for f in caught.value.faults] == [("train.jsonl", 4), ("test.jsonl", 1)]
    ((line, reason),) = faults(written(tmp_path / "few.jsonl", listed + single * 2))
    assert (line, "`label` is a list, but in 2 other rows one string" in reason) == (1, True)


def test_files_that_are_not_utf8_are_named_together_each_with_its_line_and_other_faults(tmp_path: Path) -> None:
    latin = '{"text": "Köln", "label": "x"}\n'
    written(tmp_path / "train.jsonl", f'{{"label": "x"}}\n{ROW}\n{latin}{ROW}\n'.encode("latin-1"))
    written(tmp_path / "validation.csv", "text,label\na,x\nKöln,x\n".encode("latin-1"))
    written(tmp_path / "test.jsonl", latin.encode("latin-1"))
    with pytest.raises(BadRows, match=r"line 3: is not UTF-8 text \(byte 54 of the file\)") as caught:
        read_splits(str(tmp_path), TEXT)
    places = [(Path(f.file).name, f.line) for f in caught.value.faults]
    assert places == [("train.jsonl", 1), ("train.jsonl", 3), ("validation.csv", 3), ("test.jsonl", 1)]


def test_texts_without_labels_are_held_to_the_same_rules(tmp_path: Path) -> None:
    path = written(tmp_path / "u.jsonl", '{"text": null}\nnot json\n{"txt": "a"}\n{"text": "fine"}\n')
    with pytest.raises(BadRows) as caught:
        read_texts(path)
    assert sorted(fault.line or 0 for fault in caught.value.faults) == [1, 2, 3]
    with pytest.raises(BadRows, match=r"a.jsonl, line 1: `text_pair` is int"):
        read_texts(written(tmp_path / "a.jsonl", '{"text": "one", "text_pair": 2}'), pairs=True)
    with pytest.raises(BadRows, match=r"a.txt, line 3: is not UTF-8 text \(byte 16 of the file\)"):
        read_texts(written(tmp_path / "a.txt", b"\xef\xbb\xbfone\ntwo\nthree\xff\n"))
    with pytest.raises(BadInput, match="holds no text"):
        read_texts(written(tmp_path / "b.txt", "\n \n"))


def test_a_wrong_header_is_one_fault_that_names_its_columns_and_the_flags(tmp_path: Path) -> None:
    for path in (
        written(tmp_path / "a.csv", "Text,Category\n" + "a,b\n" * 50),
        parquet(tmp_path / "a.parquet", [{"Text": "a", "Category": "b"}] * 50),
    ):
        ((line, reason),) = faults(path)
        assert line is None
        assert reason.startswith("has the columns Text, Category; text and label are needed.")
        assert reason.endswith("--text-column Text --label-column Category")
    ((_, reason),) = faults(written(tmp_path / "a.tsv", "id\ttext\n1\ta\n"), columns=Columns(label="Kind"))
    assert "has the columns id, text; text and Kind are needed" in reason
    assert reason.endswith("--label-column NAME")
    ((_, reason),) = faults(written(tmp_path / "a.csv", "text,entities\na,[]\n" * 9), TOKENS)
    assert "cells cannot hold tags" in reason
    with pytest.raises(BadRows, match=r"u\.csv: has the columns Body; text is needed\..* --text-column Body"):
        read_texts(written(tmp_path / "u.csv", "Body\na\nb\n"))


def test_files_that_cannot_hold_questions_say_why(tmp_path: Path) -> None:
    unanswered = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [{"id": "1", "question": "where"}]}]}]}
    for name, content, says in (
        ("table.csv", "question,context,answers\na,b,c\n", "cells cannot hold answers"),
        ("broken.json", json.dumps({"data": [{"paragraphs": [{"qas": [{}]}]}]}), "is not SQuAD's JSON"),
        ("unanswered.json", json.dumps(unanswered), "has no `answers`"),
    ):
        assert any(says in reason for _, reason in faults(written(tmp_path / name, content), QUESTION_ANSWERING)), name


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.conll", "a.parquet"])
def test_a_file_that_the_system_does_not_let_be_read_is_a_fault_of_the_data(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/proc/self/mem")  # a read of its beginning is an I/O error
    ((line, reason),) = faults(tmp_path / name, TOKENS if name.endswith("conll") else TEXT)
    assert (line, "cannot be read (Input/output error)" in reason) == (None, True)
