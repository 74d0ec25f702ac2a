"""Pairs the rows of an input of `annotate` with the lines of its output, to find the rows that still need an answer.

An error line holds the SHA-256 of its row as it was read. When the row has changed, it is answered again.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from serve.errors import BadInput
from stillroom.commands.annotate.reader import InputFile
from stillroom.commands.annotate.rows import InputRow
from stillroom.commands.annotate.writer import AnswerFile

ERROR_LINE = re.compile(rb'\{"error":\{"line":\d+,"row_sha256":"([0-9a-f]{64})",')


class Place(NamedTuple):
    """A row of the input, its line in the output if there is one, and whether the row needs an answer."""

    row: InputRow
    line: bytes | None
    asked: bool


def places(source: InputFile, output: AnswerFile) -> Iterator[Place]:
    """A place for each row of `source`, in order: first those that `output` has a line for.

    Raises:
        BadInput: a line is the answer to another row.
    """
    rows, closing = source.rows(), answer_opening(source.columns.answer)
    for number, line in enumerate(output.lines(), 1):
        row = next(rows, None)
        if row and not row.fault and line.startswith(row.fields + closing):
            yield Place(row, line, asked=False)
        elif row and (error := ERROR_LINE.match(line)):
            yield Place(row, line, asked=error[1].decode() != _fingerprint(row))
        else:
            which = f"row {number:,}" + (f" ({source.unit} {row.line:,})" if row else ", which does not exist,")
            raise BadInput(
                f"line {number:,} of {output.name} is not the answer to {which} of {source.name}: one of the files was "
                "changed. Give the original input, another --output, or --restart to overwrite the output"
            )
    for row in rows:
        yield Place(row, None, asked=True)


def answer_opening(field: str) -> bytes:
    """The JSON between a row's fields and the value of `field`, its answer."""
    return b"," + msgspec.json.encode(field) + b":"


def error_line(row: InputRow, code: str, message: str) -> bytes:
    """The output line of a row that has no answer."""
    error = {"line": row.line, "row_sha256": _fingerprint(row), "code": code, "message": message}
    return msgspec.json.encode({"error": error}) + b"\n"


def _fingerprint(row: InputRow) -> str:
    return hashlib.sha256(row.fields).hexdigest()
