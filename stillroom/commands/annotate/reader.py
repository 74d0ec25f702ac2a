"""Rows of text from a file of any size, one at a time, for `annotate`: what cannot be read is a row with its fault."""

import contextlib
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from serve.errors import BadInput

FORMATS = ("jsonl", "txt", "csv", "tsv")
STDIN = Path("-")
MOST_LINE_BYTES = 16 * 2**20  # of one row: a file without line ends must not fill the memory
BUFFER_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


class InputRow(NamedTuple):
    """One row: where it begins, its fields as JSON without the closing brace, its text; or its fault."""

    line: int
    fields: bytes
    text: str
    pair: str | None
    fault: str | None


class InputFile:
    """Rows of a file, or of standard input for `-`, read as far as they are asked for; a context manager.

    `format` is one of FORMATS, or None: what the name ends with (before `.gz`), `jsonl` for standard input. `answer_field`
    is where the answer is to stand: a row that has it is at fault.

    Raises:
        BadInput: the file cannot be opened, its format is unknown, or its header has no `text`; while it is read, also
            damaged compression.
    """

    def __init__(self, path: Path, format: str | None = None, *, answer_field: str = "answer") -> None:
        self.path, self.answer_field = path, answer_field
        self.name = "standard input" if path == STDIN else str(path)
        self.format = format or format_of(path)
        if self.format not in FORMATS:
            given = f"--format {format}" if format else f"the name {path}"
            raise BadInput(f"{given} is no known format; give --format one of {', '.join(FORMATS)}")
        if answer_field in ("text", "text_pair", ""):
            raise BadInput(f"--field {answer_field!r} is where the text stands; give another name for the answer")
        self._open = contextlib.ExitStack()
        self.size_bytes: int | None = None

    def __enter__(self) -> "InputFile":
        try:
            self._raw: BinaryIO = (
                sys.stdin.buffer if self.path == STDIN else self._open.enter_context(self.path.open("rb"))
            )
        except OSError as error:
            raise BadInput(
                f"--input {self.path} cannot be read ({error.strerror}); give a file of text, or - for standard input"
            ) from error
        if self.path != STDIN and self.path.is_file():
            self.size_bytes = self.path.stat().st_size
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def share_read(self) -> float | None:
        """How much of the file has been read, 0 to 1; None of standard input, whose end nobody knows."""
        if self.size_bytes is None:
            return None
        return min(1.0, self._raw.tell() / max(1, self.size_bytes))

    def rows(self) -> Iterator[InputRow]:
        """Its rows, in order. Of `.txt` every line is one; blank lines of the other formats are none."""
        stream = self._raw
        if self.path.suffix == ".gz":
            stream = self._open.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=stream), BUFFER_BYTES))
        read = {"txt": _plain_rows, "jsonl": _json_rows}.get(self.format, self._table_rows)
        try:
            yield from read(_lines(stream), self.answer_field)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadInput(f"{self.name} is damaged, or cut off: {error}") from error
        except IsADirectoryError as error:
            raise BadInput(f"--input {self.path} is a folder; give a file of text") from error

    def _table_rows(self, lines: Iterator[tuple[int, bytes | None]], answer_field: str) -> Iterator[InputRow]:
        table = csv.reader(_decoded(lines, self.name), delimiter="\t" if self.format == "tsv" else ",")
        csv.field_size_limit(MOST_LINE_BYTES)
        header = next(table, [])
        wrong = "text" not in header or len(set(header)) < len(header) or answer_field in header
        if wrong:
            raise BadInput(
                f"{self.name} has the columns {', '.join(header) or 'none'}; it needs one called text, each name once, "
                f"and none called {answer_field} (--field gives the answers another name)"
            )
        while True:
            line = table.line_num + 1
            try:
                cells = next(table)
            except StopIteration:
                return
            except csv.Error as error:
                yield _faulty(line, f"is not {self.format.upper()} ({error})")
                continue
            if cells:
                yield _table_row(line, header, cells)


def format_of(path: Path) -> str:
    """The format that a name promises."""
    if path == STDIN:
        return "jsonl"
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.removeprefix(".").lower()


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines with their ends; None for one that is too long to be read."""
    number = 0
    while line := stream.readline(MOST_LINE_BYTES + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(BOM)
        if len(line) > MOST_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(MOST_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        else:
            yield number, line


def _decoded(lines: Iterator[tuple[int, bytes | None]], name: str) -> Iterator[str]:
    """What `csv` reads; a byte that is not UTF-8 becomes half a surrogate pair, and its row is told later."""
    for number, line in lines:
        if line is None:
            raise BadInput(f"{name}, line {number}: {TOO_LONG}")
        yield line.decode("utf-8", errors="surrogateescape")


TOO_LONG = f"is longer than {MOST_LINE_BYTES:,} bytes, which is the most; split it"


def _plain_rows(lines: Iterator[tuple[int, bytes | None]], answer_field: str) -> Iterator[InputRow]:
    encode = msgspec.json.Encoder().encode
    for number, line in lines:
        if line is None:
            yield _faulty(number, TOO_LONG)
            continue
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            yield _faulty(number, f"is not UTF-8 ({error.reason} at byte {error.start})")
            continue
        yield InputRow(number, b'{"text":' + encode(text), text, None, None)


def _json_rows(lines: Iterator[tuple[int, bytes | None]], answer_field: str) -> Iterator[InputRow]:
    # Only these fields are decoded; the others travel as they were written.
    kind: Any = msgspec.defstruct(
        "Row",
        [
            ("text", str),
            ("text_pair", str | None, None),
            ("taken", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET),
        ],
        rename={"taken": answer_field},
    )
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(kind).decode
    for number, line in lines:
        if line is None:
            yield _faulty(number, TOO_LONG)
            continue
        written = line.strip()
        if not written:
            continue
        try:
            written.decode("utf-8")  # fields that are not decoded are not looked at
            row = decode(written)
        except (ValueError, RecursionError) as error:
            yield _faulty(number, _json_fault(written, error))
            continue
        if row.taken is not msgspec.UNSET:
            yield _faulty(
                number, f"has a field {answer_field!r} already; give the answer another name with --field NAME"
            )
            continue
        yield InputRow(number, written[:-1].rstrip(), row.text, row.text_pair, None)


def _json_fault(line: bytes, error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 ({error.reason} at byte {error.start})"
    if isinstance(error, msgspec.ValidationError):
        said = str(error)
        if "required field" in said:
            return 'has no field "text"'
        return f'{said[0].lower()}{said[1:]}; give an object such as {{"text": "..."}}'
    if HALF_A_PAIR.search(line):
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            pass
        else:
            return "has half a surrogate pair, which is no character; write whole characters"
    return f"is not JSON ({error})"


def _table_row(line: int, header: list[str], cells: list[str]) -> InputRow:
    if len(cells) != len(header):
        return _faulty(
            line, f"has {len(cells)} {'column' if len(cells) == 1 else 'columns'}, and the header {len(header)}"
        )
    fields = dict(zip(header, cells, strict=True))
    try:
        encoded = msgspec.json.encode(fields)
    except UnicodeEncodeError:
        return _faulty(line, "is not UTF-8")
    return InputRow(line, encoded[:-1], fields["text"], fields.get("text_pair") or None, None)


def _faulty(line: int, fault: str) -> InputRow:
    return InputRow(line, b"", "", None, fault)
