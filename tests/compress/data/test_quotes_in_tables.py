"""Quotes in tables: the rows and texts of the file, or a fault that names the quote, in training and in `annotate` alike."""

import csv
from pathlib import Path
from typing import Any

import pytest

from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
from compress.tasks import TEXT_CLASSIFICATION
from stillroom.verbs.annotate.reader import InputFile


def trained_on(path: Path) -> tuple[list[str], list[tuple[Any, str]]]:
    """The texts of the file, or where it has faults their lines and reasons."""
    try:
        return [example.text for example in read_examples(path, TEXT_CLASSIFICATION)], []
    except BadRows as error:
        return [], [(fault.line, fault.reason) for fault in error.faults]


def annotated(path: Path) -> tuple[list[str], list[tuple[Any, str]]]:
    """The texts of the file without those of faulty rows, and the faults."""
    with InputFile(path) as source:
        rows = list(source.rows())
    return [row.text for row in rows if not row.fault], [(row.line, row.fault) for row in rows if row.fault]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_texts_with_quotes_and_line_ends_are_read_as_they_are_meant(tmp_path: Path, separator: str) -> None:
    texts = {
        '"Dear Sir, I want\nmy money; back\tnow"': "Dear Sir, I want\nmy money; back\tnow",
        '"Hi,\nI am late"': "Hi,\nI am late",
        '"one,\r\n\r\ntwo"': "one,\r\n\r\ntwo",
        '"Great,loved it\nWould buy again"': "Great,loved it\nWould buy again",
        '"he said ""hi"""': 'he said "hi"',
        'a 5" pipe': 'a 5" pipe',
        'they "like" it': 'they "like" it',
    }
    path = tmp_path / "a.csv"
    rows = "".join(f"{cell}{separator}pos\n" for cell in texts)
    path.write_text(f"text{separator}label\n{rows}", encoding="utf-8", newline="")
    assert trained_on(path) == annotated(path) == ([*texts.values()], [])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('"He said \\"hi\\" twice",pos\n', "goes on behind a quote"),
        ('"ends so \\"",pos\nb,neg\n"c d",pos\n', "goes on behind a quote 2 lines below"),
        ('"a quoted start,pos\nb,neg\nends so",neg\n', "so that 3 rows would be read as one"),
        ('",pos\n",neg\n', "so that 2 rows would be read as one"),
        ('"I like it,1\nfine,0\nAll is well",-1\n', "so that 3 rows would be read as one"),
        ('"left open,pos\nb,neg\n', "has a quote that is not closed before the end of the file"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_an_unescaped_quote_is_a_fault_and_swallows_no_rows(tmp_path: Path, row: str, reason: str, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    end = "" if "not closed" in reason else "last,pos\n"
    content = f"text,label\nfirst,pos\n{row}{end}"
    path.write_text(content if suffix == ".csv" else content.replace(",", "\t"), encoding="utf-8")
    _, faults = trained_on(path)
    texts, same = annotated(path)
    assert texts == ["first", *(["last"] if end else [])]
    assert faults == same
    ((line, said),) = faults
    assert line == 3
    assert reason in said


@pytest.mark.parametrize(
    ("header", "row", "below"),
    [
        ("text,label", '"Wow he said,pos\r\n\r\nthis is fine,neg\r\n\r\nlast one",pos\r\n', 4),
        ("text,label", '"Wow he said,pos\r\r\nthis is fine,neg\r\r\nlast one",pos\r\r\n', 4),
        ("text,label", '"Wow he said,Good\r\n\r\nthis is fine,pos\r\n\r\nlast one",neg\r\n', 4),
        ("text\tlabel", '"Wow he said\tpos\n\nthis is fine\tneg\nlast one"\tpos\n', 3),
        ("text\tlabel\tnote", '"Wow he said\tpos\nthis is fine\tneg\nlast one"\tpos\n', 2),
        ("text\tlabel\tnote", '"Wow he said\tpos\nthis is fine\tneg\tn\nlast one"\tpos\tn\n', 2),
        ("label\ttext", 'pos\t"Wow he said\n\nneg\tthis is fine\npos\tlast one"\n', 3),
    ],
)
def test_quotes_over_blank_lines_and_short_rows_are_faults(tmp_path: Path, header: str, row: str, below: int) -> None:
    path = tmp_path / ("a.tsv" if "\t" in header else "a.csv")
    ok = "pos\tok\n" if header.startswith("label") else "ok\tpos\n" if "\t" in header else "ok,pos\r\n"
    path.write_text(f"{header}\n{row}{ok}", encoding="utf-8", newline="")
    ((line, reason),) = trained_on(path)[1]
    assert (line, f"closes it {below} lines below, so that 3 rows would be read as one" in reason) == (2, True)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_of_several_lines_between_tabs_are_no_rows(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.tsv"
    texts = [f"Hi,{end}{end}I am late", f"one{end}two", f"a{end}tab\there{end}or there"]
    notes = [f"my{end}note", f"its{end}{end}note", "x"]
    rows = "".join(f'"{text}"\tpos\t"{note}"{end}' for text, note in zip(texts, notes, strict=True))
    path.write_text(f"text\tlabel\tnote{end}{rows}{end}", encoding="utf-8", newline="")
    assert trained_on(path) == annotated(path) == (texts, [])


@pytest.mark.parametrize(
    "rows",
    [
        '"I like,positive\nfine by me,not sure\nall well",positive\n',
        '"I like,not sure\nall well",positive\n',
        '"I like,Positive\nall well",neutral\n',
        '"I like,Positive\nfine,neutral\nso so,not sure\nall well",neutral\n',
    ],
)
@pytest.mark.parametrize("label_first", [False, True])
def test_quotes_over_lines_with_known_labels_are_faults(tmp_path: Path, rows: str, label_first: bool) -> None:
    content = f"text,label\nfirst,positive\n{rows}last,not sure\nand,Positive\nso,neutral\n"
    if label_first:
        content = "".join(f"{label},{text}\n" for text, label in (line.split(",") for line in content.splitlines()))
    path = tmp_path / "a.csv"
    path.write_text(content, encoding="utf-8")
    ((line, reason),) = trained_on(path)[1]
    assert line == 3
    assert f"so that {rows.count(chr(10))} rows would be read as one" in reason


def test_texts_of_several_lines_with_a_comma_each_are_no_rows(tmp_path: Path) -> None:
    texts = [
        "Ann Lee\nMill Lane 3,York\nEngland,UK",
        "Ann: late again,are you?\nBob: Yes,not sure why\nAnn: Fine,good",
        "size,price\n10,20\n30,40",
        "Not bad,not sure,\nI am,neutral, you know",
        "Was it good?,\nno,positive I am",
    ]
    path = tmp_path / "a.csv"
    labels = ["Positive", "not sure", "neutral", "positive", "good one"]
    rows = "".join(f'"{text}",{label}\n' for text, label in zip(texts, labels, strict=True))
    path.write_text(f"text,label\n{rows}", encoding="utf-8")
    assert trained_on(path) == annotated(path) == (texts, [])


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ('label,text\nx, "a, b"\n', 2, "has a blank between a separator and a quote"),
        ('label,text\nx, "a b"\n', 2, "has a blank between a separator and a quote"),
        ('id,text,label\n1,"a,x\n2,b\n3,c",y\n4,d,y\n', 2, "so that 2 rows would be read as one"),
    ],
)
def test_quotes_behind_a_blank_or_over_short_rows_are_faults(
    tmp_path: Path, content: str, line: int, reason: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content, encoding="utf-8")
    for _, faults in (trained_on(path), annotated(path)):
        assert [(at, reason in said) for at, said in faults] == [(line, True)], faults


@pytest.mark.parametrize("text", [' "Great product"', ' "tis so', 'says, "hi"'])
def test_texts_with_quotes_that_a_program_wrote_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text", "label"], [text, "x"]])
    assert trained_on(path) == annotated(path) == ([text], [])
