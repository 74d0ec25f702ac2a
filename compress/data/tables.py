"""Reads the rows of a table of text (CSV, TSV) by one strict rule, for training and for `annotate`.

A quote opens a cell only at its start, is doubled within it, and closes it before a separator or a line end. A quote that was meant
as text opens a cell too, and may close one some rows later: such a cell is a fault.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from compress.data.fields import MOST_CHARACTERS

SEPARATORS = {".csv": ",;\t", ".tsv": "\t;,"}  # the usual one first
DOUBLE_IT = (
    'within a quoted cell write a quote as two (""), and not as \\"; put a text that begins with a quote into quotes'
)


class TableRow(NamedTuple):
    """The cells of a row, or why it cannot be read; and of how many lines it is. A blank line has no cells."""

    cells: list[str]
    lines: int
    fault: str | None = None


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
        if width and _swallows_rows(read, separator, width, cells):
            reason = (
                f"has a quote that opens a cell and one that closes it {_below(len(read))}, so that {len(read)} rows "
                f"would be read as one; {DOUBLE_IT}. If it is one cell, give JSON lines"
            )
            yield TableRow([], len(read), reason)
            continue
        width = width or len(cells)
        yield TableRow(cells, len(read))


def _swallows_rows(lines: Sequence[str], separator: str, width: int, cells: Sequence[str]) -> bool:
    """Whether each of the lines that were read as one row of `cells` is a row of its own, of `width` fields.

    Between tabs that is never chance. Between commas it may be, in a text of several lines: so no field may be empty or have a blank
    around it, as parts of a sentence have, and beside the text fields must look like those of the row: numbers, or words that begin
    with the same case. Only the row itself decides, so that it is read alike from wherever the reading begins.
    """
    if len(lines) < 2 or width < 2 or len(cells) != width:
        return False
    rows = [line.rstrip("\r\n").split(separator) for line in lines]
    if any(len(row) != width for row in rows):
        return False
    if separator == "\t":
        return True
    if not all(field and field == field.strip() for row in rows for field in row):
        return False
    opened = next((place for place, field in enumerate(rows[0]) if field.startswith('"')), 0)
    beside = [place for place in range(width) if place != opened]
    return all(_shape(row[place]) == _shape(cells[place]) for row in rows for place in beside)


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
    return f"cannot be read as a row of a table ({said})"
