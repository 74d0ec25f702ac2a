"""Rows of the suites' files as they are published, in the form that the data folders of every verb have."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from compress.data.columns import USUAL
from compress.data.conll import conll_rows
from compress.data.file_formats import lines_in, squad_rows
from compress.data.row_faults import Fault, UnreadableFrom
from serve.errors import BadInput
from serve.wording import counted

SHORT_ROWS = 0.01  # most of a file's rows that may be left out for lacking columns; QQP's and CoLA's have some
SHOWN_LINES = 5


@dataclass(frozen=True)
class Columns:
    """Where a table of tab-separated lines has text, second text and label: by the names in its header, or by place without one."""

    text: str | int
    label: str | int
    text_pair: str | int | None = None
    header: bool = True
    names: Mapping[str, str] = field(default_factory=dict)
    """Other names of labels in this file, by the one that is written there."""
    only: tuple[str, str] | None = None
    """A column and the value that it must have."""


@dataclass
class Rows:
    """The rows of one file, and what was left out."""

    rows: list[dict[str, Any]]
    warnings: list[str]


def table_rows(file: Path, columns: Columns, *, numbers: bool = False) -> Rows:
    """The rows of a table; `numbers` tells that labels are numbers.

    Raises:
        BadInput: it has no such column, no row, a label that is no number, or too many rows lack columns.
    """
    lines = (line.split("\t") for line in _lines(file))  # quotes are text
    at = _places(file, next(lines, []), columns) if columns.header else _by_place(columns)
    rows, short, count = [], list[int](), 0
    for number, cells in enumerate(lines, 2 if columns.header else 1):
        if columns.only and len(cells) > at["only"] and cells[at["only"]] != columns.only[1]:
            continue
        count += 1
        wanted = {name: cells[place].strip() for name, place in at.items() if name != "only" and place < len(cells)}
        if len(wanted) < len(at) - ("only" in at) or not all(wanted.values()):
            short.append(number)
            continue
        label = columns.names.get(wanted["label"], wanted["label"])
        rows.append({**wanted, "label": _number(file, number, label) if numbers else label})
    if not rows:
        raise BadInput(f"{file} has no rows. Give the file as it was published.")
    shown = ", ".join(map(str, short[:SHOWN_LINES])) + (", ..." if short[SHOWN_LINES:] else "")
    if len(short) > SHORT_ROWS * count + 1:
        raise BadInput(
            f"{file}: {len(short):,} of {count:,} rows lack a text or a label (lines {shown}). Give the file as it was published."
        )
    lacking = counted(len(short), "row without a text or a label was", "rows without a text or a label were")
    left = [f"{file.parent.name}/{file.name}: {lacking} left out (lines {shown})"]
    return Rows(rows, left if short else [])


def tagged_rows(file: Path, *, prefix: str = "") -> Rows:
    """The sentences of lines with a word first and its tag last, by blanks or tabs; `prefix` is removed from each word.

    Raises:
        BadInput: a line has no tag, or there is no sentence.
    """
    faults: list[Fault] = []
    found = conll_rows(file, partial(lines_in, file), USUAL, faults)
    try:
        rows: list[dict[str, Any]] = [dict(row) for _, row in found if isinstance(row, dict)]
    except UnreadableFrom as fault:
        faults += fault.faults
    if faults:
        raise BadInput(f"{faults[0]}. Give the file as it was published.")
    for row in rows:
        row["tokens"] = [word.removeprefix(prefix) or word for word in row["tokens"]]
    if not rows:
        raise BadInput(f"{file} has no sentences. Give the file as it was published.")
    return Rows(rows, [])


def question_rows(file: Path, *, language: str = "") -> Rows:
    """The questions of SQuAD's JSON; with a `language` they are scored by MLQA's rules for it.

    Raises:
        BadInput: it is not SQuAD's JSON, or has no question.
    """
    faults: list[Fault] = []
    found = squad_rows(file, USUAL, faults)
    rows: list[dict[str, Any]] = [{**row, "language": language} for _, row in found or () if isinstance(row, dict)]
    if faults or not rows:
        what = str(faults[0]) if faults else f"{file} has no questions under data, paragraphs and qas"
        raise BadInput(f"{what}. Give the file as it was published.")
    return Rows(rows, [])


def _lines(file: Path) -> Iterator[str]:
    try:
        for line in lines_in(file):
            yield line.rstrip("\r")
    except UnreadableFrom as fault:
        raise BadInput(str(fault.faults[0])) from None


def _by_place(columns: Columns) -> dict[str, int]:
    found = {"text": columns.text, "text_pair": columns.text_pair, "label": columns.label}
    return {name: place for name, place in found.items() if isinstance(place, int)}


def _places(file: Path, header: list[str], columns: Columns) -> dict[str, int]:
    asked = {"text": columns.text, "text_pair": columns.text_pair, "label": columns.label}
    asked |= {"only": columns.only[0]} if columns.only else {}
    names = [name.strip().lstrip("\ufeff") for name in header]
    if lacks := [str(name) for name in asked.values() if name is not None and name not in names]:
        raise BadInput(
            f"{file} lacks the columns {', '.join(lacks)}; its first line has {', '.join(names) or 'nothing'}. Give the file as it was "
            "published."
        )
    return {name: names.index(str(column)) for name, column in asked.items() if column is not None}


def _number(file: Path, line: int, label: str) -> float:
    try:
        return float(label)
    except ValueError:
        raise BadInput(f"{file}, line {line}: {label!r} is no number. Give the file as it was published.") from None
