"""A row of an input for `annotate`: its fields unchanged and its text as the model reads it, or its fault."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import msgspec

from compress.data.row_fields import MOST_CHARACTERS
from serve.errors import BadInput
from serve.tasks.relations import UNMARKED, Part, marked_text
from serve.text.answers import OffsetUnit
from serve.wording import counted

MOST_ROW_BYTES = 8 * MOST_CHARACTERS  # bounds the memory for a file without line ends
SHOWN_FIELDS = 20
NO_NUMBER = re.compile(rb"[:,\[\s](?:NaN|-?Infinity)\b")
# A string, which may lack its end, or one of these words outside of strings. Possessive, so that it takes linear time.
STRING_OR_NO_NUMBER = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|(?<![\w.+-])(?:NaN|-?Infinity)\b', re.DOTALL)
HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
NOT_JSON = "is not JSON ("  # the reason follows, which differs from row to row
PAIR, HEAD, TAIL = "text_pair", "head", "tail"
BOM = b"\xef\xbb\xbf"


class InputRow(NamedTuple):
    """One row: the line where it begins, its fields as JSON without the closing brace, its text; or its fault.

    `fields` of a row with a fault are its bytes as read: the next run compares them to see whether the row has changed.
    """

    line: int
    fields: bytes
    text: str
    pair: str | None
    fault: str | None


@dataclass(frozen=True)
class Columns:
    """The names of a row's fields."""

    text: str = "text"
    pair: str = PAIR
    """The second of two texts. A row may lack a field of this name, but not one of another name."""
    answer: str = "answer"
    """The field for the answer; a row that has it already is faulty."""
    contexts: bool = False
    """Whether the pair is the context of a question, which may be empty and may not be missing."""
    relations: bool = False
    """Whether a row has `head` and `tail`, two parts of its text, for a model of relations."""
    offsets: OffsetUnit = "codepoints"
    """The unit of the offsets in `head` and `tail`."""

    def needed(self) -> list[str]:
        """The names that a table must have."""
        return [self.text, *([self.pair] if self.pair != PAIR else []), *([HEAD, TAIL] if self.relations else [])]

    def taken(self) -> list[str]:
        """The names that neither the text nor the answer may have."""
        return [self.pair, *([HEAD, TAIL] if self.relations else [])]


class Line(NamedTuple):
    """A line of a stream, and its number."""

    number: int
    read: bytes
    """The line with its line end, or the SHA-256 of a line that is too long."""
    whole: bool


class Start(NamedTuple):
    """Where a row begins: the rows, lines and bytes (uncompressed) before it. Lines and bytes only of files that have lines."""

    row: int = 0
    line: int = 0
    byte: int = 0


class Lines:
    """The lines of a stream, from the start or from where `go_to` says; what was read of it so far."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.number, self.bytes = stream, 0, 0

    def go_to(self, start: Start) -> None:
        """The next line is the one at `start`."""
        self.stream.seek(start.byte)
        self.number, self.bytes = start.line, start.byte

    def __iter__(self) -> Iterator[Line]:
        while line := self.stream.readline(MOST_ROW_BYTES + 1):
            self.number += 1
            self.bytes += len(line)
            if self.number == 1:
                line = line.removeprefix(BOM)
            whole = len(line) <= MOST_ROW_BYTES or line.endswith(b"\n")
            if not whole:
                digest = hashlib.sha256(line)
                while rest := self.stream.readline(MOST_ROW_BYTES):
                    self.bytes += len(rest)
                    digest.update(rest)
                    if rest.endswith(b"\n"):
                        break
                line = digest.digest()
            yield Line(self.number, line, whole)


def too_long() -> str:
    """The fault of a row over the limit."""
    return f"is longer than {MOST_ROW_BYTES:,} bytes, which is the limit; split it"


def text_too_long() -> str:
    """The fault of a row with a text over the limit."""
    return f"has a text of more than {MOST_CHARACTERS:,} characters, which is the limit; split it"


def faulty(line: int, fault: str, read: bytes) -> InputRow:
    """The row at `line`, of which `read` was read, with its fault."""
    return InputRow(line, read, "", None, fault)


def json_row_reader(columns: Columns, hint: str = "") -> Callable[[int, bytes], InputRow]:
    """A function from a line's number and its JSON, without blanks round it, to its row.

    `hint` ends the message about a row that is not JSON or has no text.
    """
    # Only these fields are decoded; the others are copied as they were written.
    parts = [(HEAD, Part | None, None), (TAIL, Part | None, None)] if columns.relations else []
    pair: Any = (PAIR, str | None, None) if columns.pair == PAIR else (PAIR, str if columns.contexts else str | None)
    kind: Any = msgspec.defstruct(
        "Row",
        [("text", str), pair, ("taken", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET), *parts],
        rename={"text": columns.text, PAIR: columns.pair, "taken": columns.answer},
        kw_only=True,
    )
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(kind).decode

    def read(line: int, written: bytes) -> InputRow:
        if len(written) > MOST_ROW_BYTES:
            return faulty(line, too_long(), written)
        try:
            written.decode("utf-8")  # msgspec does not check fields that it does not decode
            row, written = decoded(decode, written)
            text = row.text
            if columns.relations:
                if row.head is None or row.tail is None:
                    raise BadInput(UNMARKED)
                text = marked_text(text, row.head, row.tail, unit=columns.offsets)
            if max(len(text), len(row.text_pair or "")) > MOST_CHARACTERS:
                return faulty(line, text_too_long(), written)
        except BadInput as error:
            return faulty(line, error.message, written)
        except (ValueError, RecursionError) as error:
            return faulty(line, _json_fault(written, error, columns, hint), written)
        if row.taken is not msgspec.UNSET:
            fault = f"has a field {columns.answer!r} already; give the answer another name with --field NAME"
            return faulty(line, fault, written)
        if b"\n" in written or b"\r" in written:  # an indented array; a row of the output is one line
            written = msgspec.json.format(written, indent=-1)
        pair = row.text_pair if columns.contexts else row.text_pair or None
        return InputRow(line, written[:-1].rstrip(), text, pair, None)

    return read


def decoded(decode: Callable[[bytes], Any], written: bytes) -> tuple[Any, bytes]:
    """What `decode` makes of `written`, and this; with null in place of NaN and Infinity, which Python writes and JSON does not have.

    All else stays as it was written.

    Raises:
        ValueError: it is not JSON, or not of the type; or RecursionError.
    """
    try:
        return decode(written), written
    except msgspec.DecodeError:
        if not NO_NUMBER.search(written):
            raise
        pieces, end = [], 0
        for found in STRING_OR_NO_NUMBER.finditer(written):
            if written[found.start()] != ord('"'):
                pieces.append(written[end : found.start()])
                end = found.end()
        plain = b"null".join([*pieces, written[end:]])
        return decode(plain), plain


def table_row(line: int, header: list[str], cells: list[str], columns: Columns, read: bytes) -> InputRow:
    """The row of `cells` under `header`; `read` are the lines that it was read from."""
    if len(cells) != len(header):
        fault = f"has {counted(len(cells), 'column')}, and the header has {len(header)}"
        return faulty(line, fault, read)
    fields = dict(zip(header, cells, strict=True))
    try:
        encoded = msgspec.json.encode(fields)
    except UnicodeEncodeError:
        return faulty(line, "is not UTF-8", read)
    if len(encoded) > MOST_ROW_BYTES:
        return faulty(line, too_long(), read)
    pair = fields.get(columns.pair)
    return InputRow(line, encoded[:-1], fields[columns.text], pair if columns.contexts else pair or None, None)


def text_row(line: int, read: bytes) -> InputRow:
    """The row of a line of plain text."""
    try:
        text = read.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        return faulty(line, f"is not UTF-8 ({error.reason} at byte {error.start})", read)
    if len(text) > MOST_CHARACTERS:
        return faulty(line, text_too_long(), read)
    return InputRow(line, b'{"text":' + msgspec.json.encode(text), text, None, None)


def _json_fault(written: bytes, error: Exception, columns: Columns, hint: str) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 ({error.reason} at byte {error.start})"
    if isinstance(error, msgspec.ValidationError):
        said = str(error)
        lacks = next((name for name in columns.needed() if f"required field `{name}`" in said), "")
        if lacks and " - at " not in said:
            names = list(islice(msgspec.json.decode(written, type=dict[str, msgspec.Raw]), SHOWN_FIELDS))
            fields = f"its fields are {', '.join(map(repr, names))}" if names else "it has no fields"
            return f'has no field "{lacks}"; {fields}{hint}'
        nan = " (NaN and Infinity are read as null)" if NO_NUMBER.search(written) else ""
        return f'{said[0].lower()}{said[1:]}{nan}; give an object such as {{"{columns.text}": "..."}}'
    if HALF_A_PAIR.search(written):
        try:
            json.loads(written)
        except (ValueError, RecursionError):
            pass
        else:
            return "has half a surrogate pair, which is not a character; write both halves"
    return f"{NOT_JSON}{error}){hint}"
