"""What an output of `annotate` holds already, beside the rows of the input: which of them are still to be asked.

An error in a row's place has the SHA-256 of what was read of that row. When the row has changed it is asked again.
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
    """A row of the input, the line that the output has for it if any, and whether it is to be asked."""

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
            which = f"row {number:,}" + (f" ({source.unit} {row.line:,})" if row else ", which it does not have")
            raise BadInput(
                f"line {number:,} of {output.name} is not the answer to {which} of {source.name}: one of the two was "
                "changed. Give the input that it was begun with, another --output, or --restart to begin it anew"
            )
    for row in rows:
        yield Place(row, None, asked=True)


def answer_opening(field: str) -> bytes:
    """What stands between a row's fields and its answer, whose name is `field`."""
    return b"," + msgspec.json.encode(field) + b":"


def error_line(row: InputRow, code: str, message: str) -> bytes:
    """The line in the place of a row that has no answer."""
    error = {"line": row.line, "row_sha256": _fingerprint(row), "code": code, "message": message}
    return msgspec.json.encode({"error": error}) + b"\n"


def _fingerprint(row: InputRow) -> str:
    return hashlib.sha256(row.fields).hexdigest()
