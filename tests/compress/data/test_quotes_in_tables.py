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


def among(rows: str, end: str = "last,pos\n") -> str:
    """A table with these rows behind the first, which is whole."""
    return f"text,label\nfirst,pos\n{rows}{end}"


def among_labels(rows: str) -> str:
    """Rows whose quotes hold lines with a label of the file."""
    return f"text,label\nfirst,positive\n{rows}last,not sure\nand,Positive\nso,neutral\n"


def turned(content: str) -> str:
    """The same table with its two columns in turn."""
    return "".join(f"{label},{text}\n" for text, label in (line.split(",") for line in content.splitlines()))


AMONG = [
    (among('"He said \\"hi\\" twice",pos\n'), 3, "goes on behind a quote"),
    (among('"ends so \\"",pos\nb,neg\n"c d",pos\n'), 3, "goes on behind a quote 2 lines below"),
    (among('"a quoted start,pos\nb,neg\nends so",neg\n'), 3, "so that 3 rows would be read as one"),
    (among('",pos\n",neg\n'), 3, "so that 2 rows would be read as one"),
    (among('"I like it,1\nfine,0\nAll is well",-1\n'), 3, "so that 3 rows would be read as one"),
    (among('"left open,pos\nb,neg\n', ""), 3, "has a quote that is not closed before the end of the file"),
]
LABELS = [
    ('"I like,positive\nfine by me,not sure\nall well",positive\n', 3),
    ('"I like,not sure\nall well",positive\n', 2),
    ('"I like,Positive\nall well",neutral\n', 2),
    ('"I like,Positive\nfine,neutral\nso so,not sure\nall well",neutral\n', 4),
]
AS_ONE = "so that 3 rows would be read as one"
EVERYWHERE: list[tuple[str, int, str]] = [
    *AMONG,
    *((content.replace(",", "\t"), line, says) for content, line, says in AMONG),
    # A blank before a quote, and rows that lack a field.
    ('label,text\nx, "a, b"\n', 2, "has a blank between a separator and a quote"),
    ('label,text\nx, "a b"\n', 2, "has a blank between a separator and a quote"),
    ('id,text,label\n1,"a,x\n2,b\n3,c",y\n4,d,y\n', 2, "so that 2 rows would be read as one"),
]
# Told by the columns of text and label, which `annotate` does not know.
IN_TRAINING: list[tuple[str, int, str]] = [
    *((among_labels(rows), 3, f"so that {count} rows would be read as one") for rows, count in LABELS),
    *((turned(among_labels(rows)), 3, f"so that {count} rows would be read as one") for rows, count in LABELS),
    # Blank lines and short rows hide no quote.
    (
        'text,label\n"Wow he said,pos\r\n\r\nthis is fine,neg\r\n\r\nlast one",pos\r\nok,pos\r\n',
        2,
        f"4 lines below, {AS_ONE}",
    ),
    (
        'text,label\n"Wow he said,pos\r\r\nthis is fine,neg\r\r\nlast one",pos\r\r\nok,pos\r\n',
        2,
        f"4 lines below, {AS_ONE}",
    ),
    (
        'text,label\n"Wow he said,Good\r\n\r\nthis is fine,pos\r\n\r\nlast one",neg\r\nok,pos\r\n',
        2,
        f"4 lines below, {AS_ONE}",
    ),
    ('text\tlabel\n"Wow he said\tpos\n\nthis is fine\tneg\nlast one"\tpos\nok\tpos\n', 2, f"3 lines below, {AS_ONE}"),
    (
        'text\tlabel\tnote\n"Wow he said\tpos\nthis is fine\tneg\nlast one"\tpos\nok\tpos\n',
        2,
        f"2 lines below, {AS_ONE}",
    ),
    (
        'text\tlabel\tnote\n"Wow he said\tpos\nthis is fine\tneg\tn\nlast one"\tpos\tn\nok\tpos\n',
        2,
        f"2 lines below, {AS_ONE}",
    ),
    ('label\ttext\npos\t"Wow he said\n\nneg\tthis is fine\npos\tlast one"\npos\tok\n', 2, f"3 lines below, {AS_ONE}"),
]


@pytest.mark.parametrize(("content", "line", "says"), EVERYWHERE + IN_TRAINING)
def test_a_quote_that_swallows_rows_is_a_fault(tmp_path: Path, content: str, line: int, says: str) -> None:
    path = tmp_path / ("a.tsv" if "\t" in content else "a.csv")
    path.write_text(content, encoding="utf-8", newline="")
    _, faults = trained_on(path)
    assert [(at, says in said) for at, said in faults] == [(line, True)], faults
    if (content, line, says) in EVERYWHERE:
        texts, same = annotated(path)
        assert faults == same
        assert not {"first", "last"} & {*content.replace("\t", "\n").replace(",", "\n").split("\n")} - {*texts}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_of_several_lines_between_tabs_are_no_rows(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.tsv"
    texts = [f"Hi,{end}{end}I am late", f"one{end}two", f"a{end}tab\there{end}or there"]
    notes = [f"my{end}note", f"its{end}{end}note", "x"]
    rows = "".join(f'"{text}"\tpos\t"{note}"{end}' for text, note in zip(texts, notes, strict=True))
    path.write_text(f"text\tlabel\tnote{end}{rows}{end}", encoding="utf-8", newline="")
    assert trained_on(path) == annotated(path) == (texts, [])


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


@pytest.mark.parametrize("text", [' "Great product"', ' "tis so', 'says, "hi"'])
def test_texts_with_quotes_that_a_program_wrote_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text", "label"], [text, "x"]])
    assert trained_on(path) == annotated(path) == ([text], [])
