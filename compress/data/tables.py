"""Reads the rows of a table of text (CSV, TSV) by one strict rule, for training and for `annotate`.

A quote opens a cell only at its start, is doubled within it, and closes it before a separator or a line end. A quote that was meant
as text opens a cell too, and may close one some rows later: such a cell is a fault.
"""

import csv
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from compress.data.row_fields import MOST_CHARACTERS, UNSEEN

SEPARATORS = {".csv": ",;\t|", ".tsv": "\t;,|"}  # the usual one first
BLANK_BEFORE_QUOTE = (
    "has a blank between a separator and a quote, so that the quote does not open a cell; remove these blanks"
)
LINE_END = re.compile(r"[\r\n]+")
DOUBLE_IT = (
    'within a quoted cell write a quote as two (""), and not as \\"; put a text that begins with a quote into quotes'
)


class TableRow(NamedTuple):
    """The cells of a row, or why it cannot be read; and of how many lines it is. A blank line has no cells."""

    cells: list[str]
    lines: int
    fault: str | None = None
    within: Sequence[Sequence[str]] = ()
    """By column what its cell would be in other rows, if each line of the row but blank ones were a row; nothing where they cannot be."""


def column_names(cells: Iterable[str]) -> list[str]:
    """The names in a header, without blanks and what cannot be seen around them, such as a second byte order mark."""
    return [cell.strip().strip(UNSEEN).strip() for cell in cells]


def _has_blank_before_quote(cell: str) -> bool:
    """Whether a cell was meant to be quoted, but has a blank before its quote."""
    there = cell.strip(" ")
    return cell[:1] == " " and there[:1] == '"' and (there.count('"') % 2 == 1 or there[1:].endswith('"'))


def _loses_a_quote(cells: Sequence[str], lines: Sequence[str], separator: str) -> bool:
    """Whether a cell of the row that was read of `lines` would be another one if the blanks before its quote were not there."""
    other = next(csv.reader(lines, delimiter=separator, skipinitialspace=True), [])
    return any(_has_blank_before_quote(cell) and [cell] != other[at : at + 1] for at, cell in enumerate(cells))


def swallows(lines: int, rows: int) -> str:
    """The fault of a row of `lines`, blank ones too, that is several `rows`."""
    return (
        f"has a quote that opens a cell and one that closes it {_below(lines)}, so that {rows} rows "
        f"would be read as one; {DOUBLE_IT}. If it is one cell, give JSON lines"
    )


def table_rows(lines: Iterable[str], separator: str) -> Iterator[TableRow]:
    """The rows in `lines`, which keep their line ends; the header is the first. After a fault the next line begins a row.

    A line is taken only when its row is asked for.
    """
    csv.field_size_limit(MOST_CHARACTERS)  # applies to the process: the module has no other setting
    read: list[str] = []  # the lines of the row

    def kept() -> Iterator[str]:
        for line in lines:
            read.append(line)
            yield line

    table = csv.reader(kept(), delimiter=separator, strict=True)
    width = 0
    while True:
        read.clear()
        try:
            cells = next(table)
        except StopIteration:
            return
        except csv.Error as error:
            yield TableRow([], len(read), _why(error, len(read)))
            continue
        if any(map(_has_blank_before_quote, cells)) and _loses_a_quote(cells, read, separator):
            yield TableRow([], len(read), BLANK_BEFORE_QUOTE)
            continue
        if width and not any(cells[width:]):
            del cells[width:]  # separators at the end of the line
        rows = _rows_within(read, separator, width, cells) if width and len(read) > 1 else []
        if rows and (separator == "\t" or _are_rows(rows, cells)):
            yield TableRow([], len(read), swallows(len(read), len(rows)))
            continue
        width = width or len(cells)
        yield TableRow(cells, len(read), within=_swallowed(rows))


def _rows_within(lines: Sequence[str], separator: str, width: int, cells: Sequence[str]) -> list[list[str]]:
    """The fields of each of the lines that were read as one row of `cells`, without blank ones; none where these can be no rows.

    Between commas the first, the last and most lines must have `width` fields; others are left out. Between tabs one is enough, or one of
    as many as the row.
    """
    lines = [line for line in lines if line.strip()]
    rows = [line.rstrip("\r\n").split(separator) for line in lines]
    if separator == "\t":
        return rows if _has_row_in_a_cell(cells, {width, len(cells)}) else []
    whole = [row for row in rows if len(row) == width]
    are_rows = (
        len(rows) > 1 < width == len(cells) and 2 * len(whole) > len(rows) and len(rows[0]) == len(rows[-1]) == width
    )
    return whole if are_rows else []


def _has_row_in_a_cell(cells: Sequence[str], widths: Collection[int]) -> bool:
    """Whether a line that is read with tabs in a cell of several lines has as many fields as a row, with cells beside it."""
    for place, cell in enumerate(cells):
        first, *more = LINE_END.split(cell)
        fields = [first.count("\t") + 1 + place, *(line.count("\t") + 1 for line in more)]
        fields[-1] += len(cells) - 1 - place
        if more and any("\t" in line and count in widths for line, count in zip([first, *more], fields, strict=True)):
            return True
    return False


def _are_rows(rows: Sequence[Sequence[str]], cells: Sequence[str]) -> bool:
    """Whether each of the `rows` of fields between commas that were read as one row of `cells` is a row of its own.

    It may be chance, in a text of several lines: so beside the text one of the row's own values must be there again; or no field
    may be empty or have a blank around it, as parts of a sentence have, and beside the text fields must look like those of the row:
    numbers, or words that begin with the same case. Only the row itself decides, so that it is read alike from wherever the reading
    begins. A reader of whole files also looks for labels of other rows `within` a row.
    """
    if any(cell and cell in there for cell, there in zip(cells, _swallowed(rows), strict=True)):
        return True
    if not all(field and field == field.strip() for row in rows for field in row):
        return False
    beside = [place for place in range(len(cells)) if place != _opened(rows)]
    return all(_shape(row[place]) == _shape(cells[place]) for row in rows for place in beside)


def _swallowed(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """By column the fields that became part of the quoted cell: none of its own column, those of later rows before it."""
    opened = _opened(rows) if rows else 0
    return [
        [] if place == opened else [row[place] for row in (rows[1:] if place < opened else rows[:-1])]
        for place in range(len(rows[0]) if rows else 0)
    ]


def _opened(rows: Sequence[Sequence[str]]) -> int:
    """The column whose quote is left open at the end of the first line."""
    return next((place for place, field in enumerate(rows[0]) if field.count('"') % 2), 0)


def _shape(value: str) -> tuple[bool, bool, bool]:
    return value.removeprefix("-").replace(".", "", 1).isdigit(), " " in value, value[:1].isupper()


def _below(lines: int) -> str:
    return "1 line below" if lines == 2 else f"{lines - 1} lines below"


def _why(error: csv.Error, lines: int) -> str:
    said = str(error)
    if "field limit" in said:
        return f"has a cell of more than {MOST_CHARACTERS:,} characters, which is the limit; is a quote left open?"
    if "end of data" in said:
        return "has a quote that is not closed before the end of the file; close it, or double it if it is part of the text"
    if "expected after" in said:
        where = f" {_below(lines)}" if lines > 1 else ""
        return f"has a quoted cell that goes on behind a quote{where}; {DOUBLE_IT}"
    if "new-line character" in said:
        return "has a carriage return that is no end of a line; save the file with line feeds at the ends of lines"
    return f"cannot be read as a row of a table ({said})"
