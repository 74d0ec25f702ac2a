"""Reads rows of text from a file of any size, one at a time, for `annotate`. A row that cannot be read carries its fault."""

import contextlib
import gzip
import io
import itertools
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from compress.data.file_formats import FIRST_BYTES, MOST_ARRAY_BYTES, format_fault, packing_fault, suffix_of
from compress.data.tables import SEPARATORS, TableRow, column_names, table_rows
from serve.errors import BadInput
from stillroom.verbs.annotate.rows import (
    BOM,
    HEAD,
    TAIL,
    Columns,
    InputRow,
    Line,
    Lines,
    Start,
    decoded,
    faulty,
    json_row_reader,
    table_row,
    text_row,
    too_long,
)

FORMATS = ("jsonl", "json", "csv", "tsv", "txt", "parquet")
STDIN = Path("-")
# Rows of parquet that are in memory as Python objects at once: of a file that is read row by row, and of texts alone for a part.
PARQUET_ROWS, TABLE_ROWS = 1000, 4096
BUFFER_BYTES = 1 << 20
NO_ARRAY = "; give an array of objects, or one object a line"  # for a .json file that does not begin with [
INSTALL_PYARROW = "in a clone of stillroom, pip install '.[build]'"


class InputFile:
    """Rows of a file, or of standard input for `-`, read as they are iterated over; a context manager.

    `format` is one of FORMATS, or None for the one that the name ends with (before `.gz`); `jsonl` for standard input. `opened` gives
    the bytes of a file that is not at `path`, and `name` is what messages call it. Rows are read from `start`. With `texts_only` the
    fields of a row of parquet are those with its texts.

    Raises:
        BadInput: on entry if the file cannot be opened; from `prepare` if its header lacks a column, or the file is not in its
            format; while rows are read, if the file is damaged.
    """

    def __init__(
        self,
        path: Path,
        format: str | None = None,
        columns: Columns | None = None,
        *,
        opened: Callable[[], BinaryIO] | None = None,
        name: str = "",
        start: Start | None = None,
        texts_only: bool = False,
    ) -> None:
        self.path, self.columns = path, columns or Columns()
        self.name = name or ("standard input" if path == STDIN else str(path))
        self._opened, self._start, self._texts_only = opened, start or Start(), texts_only
        self.format = format or format_of(path)
        self.unit = "row" if self.format == "parquet" else "line"
        self._open = contextlib.ExitStack()
        self._lines: Lines | None = None
        self.table: Any = None
        self._size_bytes: int | None = None
        self._rows: Iterator[InputRow] | None = None
        self._counted: tuple[int, int] | None = None  # rows read, and in all, where that is known

    def __enter__(self) -> "InputFile":
        if self._opened:
            self._raw: BinaryIO = self._open.enter_context(self._opened())
            return self
        try:
            self._raw = sys.stdin.buffer if self.path == STDIN else self._open.enter_context(self.path.open("rb"))
        except OSError as error:
            raise BadInput(
                f"--input {self.path} cannot be read ({error.strerror}); give a file of text, or - for standard input"
            ) from error
        if self.path != STDIN and self.path.is_file():
            self._size_bytes = self.path.stat().st_size
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def share_read(self) -> float | None:
        """How much of the file has been read, 0 to 1; None for standard input, whose size is not known."""
        if self._counted:
            return self._counted[0] / max(1, self._counted[1])
        return None if self._size_bytes is None else min(1.0, self._raw.tell() / max(1, self._size_bytes))

    def position(self, rows_before: int) -> Start:
        """Where the next row begins, of which `rows_before` are before it."""
        return Start(rows_before, self._lines.number, self._lines.bytes) if self._lines else Start(rows_before)

    def place(self, line: int) -> str:
        """The file and the row at `line`, for messages."""
        return f"{self.name}, {self.unit} {line}"

    def prepare(self) -> None:
        """Reads up to the first row, so also the header; once."""
        if self._rows is None:
            with self._damage_reported():
                self._rows = self._opened_rows()

    def rows(self) -> Iterator[InputRow]:
        """Its rows, in order. In `.txt` every line is a row; in the other formats blank lines are skipped."""
        self.prepare()
        assert self._rows is not None
        with self._damage_reported():
            yield from self._rows

    def _opened_rows(self) -> Iterator[InputRow]:
        if self.format == "parquet":
            self.table = self._opened_table()
            return self._parquet_rows()
        stream: Any = self._raw
        if self.path.suffix.lower() == ".gz":
            stream = self._open.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=stream), BUFFER_BYTES))
        elif self._opened:
            stream = io.BufferedReader(stream, BUFFER_BYTES)
        if fault := format_fault(stream.peek(FIRST_BYTES)[:FIRST_BYTES], f".{self.format}"):
            raise BadInput(f"{self.name} {fault}")
        if self.format == "jsonl" and re.match(rb"\s*\[\s*\{", stream.peek(FIRST_BYTES).removeprefix(BOM)):
            raise BadInput(f"{self.name} begins as a JSON array; give --format json, or one object a line")
        if self.format == "json" and stream.peek(1).removeprefix(BOM).lstrip().startswith(b"["):
            return self._array_rows(stream)
        lines = self._lines = Lines(stream)
        if self.format in ("csv", "tsv"):
            return self._table_rows(lines)
        if self._start.byte:
            lines.go_to(self._start)
        return self._line_rows(lines)

    def _line_rows(self, lines: Iterable[Line]) -> Iterator[InputRow]:
        read = json_row_reader(self.columns, NO_ARRAY if self.format == "json" else "")
        for line in lines:
            if not line.whole:
                yield faulty(line.number, too_long(), line.read)
            elif self.format == "txt":
                yield text_row(line.number, line.read)
            elif written := line.read.strip():
                yield read(line.number, written)

    @contextlib.contextmanager
    def _damage_reported(self) -> Iterator[None]:
        """Turns the exceptions of a damaged file into BadInput."""
        try:
            yield
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadInput(f"{self.name} {packing_fault(error)}") from error
        except IsADirectoryError as error:
            raise BadInput(f"--input {self.path} is a folder; give a file of text") from error

    def _check_header(self, names: Sequence[str]) -> None:
        """Raises BadInput, with the columns found and those needed, where the header does not fit."""
        wanted, answer = self.columns.text, self.columns.answer
        needed = self.columns.needed()
        if set(needed) <= set(names) and len(set(names)) == len(names) and answer not in names:
            return
        pair = f", --text-pair-column in place of {self.columns.pair}" if self.columns.pair in needed else ""
        found = f"the column{'s' * (len(names) != 1)} {', '.join(names)}" if names else "no columns"
        raise BadInput(
            f"{self.name} has {found}; it needs the column{'s' * (len(needed) != 1)} {' and '.join(needed)} (--text-column names "
            f"another in place of {wanted}{pair}). Each name must occur once, and {answer} must not (--field gives the answers "
            "another name)"
        )

    def _table_rows(self, lines: Lines) -> Iterator[InputRow]:
        read: list[bytes] = []  # the lines of the row that is being read
        texts = _as_text(lines, self.name, read)
        first = next((line for line in texts if line.strip()), "")
        if not first:
            return iter(())
        table = table_rows(itertools.chain([first], texts), self._separator(first))
        top = next(table, TableRow([], 0))
        if top.fault:
            raise BadInput(f"the header of {self.name} {top.fault}")
        header = column_names(top.cells)
        self._check_header([name.encode("utf-8", "replace").decode() for name in header])
        if self._start.byte:
            lines.go_to(self._start)
        return self._rows_under(header, table, read, lines)

    def _separator(self, first: str) -> str:
        """The first of the usual separators that gives all needed columns in the line `first`, else that of the most columns."""
        names = {
            each: column_names(next(table_rows([first], each), TableRow([], 0)).cells)
            for each in SEPARATORS[f".{self.format}"]
        }
        needed = set(self.columns.needed())
        return next(
            (each for each, found in names.items() if needed <= set(found)),
            max(names, key=lambda each: len(names[each])),
        )

    def _rows_under(
        self, header: list[str], table: Iterator[TableRow], read: list[bytes], lines: Lines
    ) -> Iterator[InputRow]:
        while True:
            line = lines.number + 1
            read.clear()
            row = next(table, None)
            if row is None:
                return
            if row.fault:
                yield faulty(line, row.fault, b"".join(read))
            elif row.cells:
                yield table_row(line, header, row.cells, self.columns, b"".join(read))

    def _array_rows(self, stream: BinaryIO) -> Iterator[InputRow]:
        held = stream.read(MOST_ARRAY_BYTES + 1)
        if len(held) > MOST_ARRAY_BYTES:
            raise BadInput(
                f"{self.name} is a JSON array of over {MOST_ARRAY_BYTES:,} bytes, which is the limit; JSON lines have none: "
                f"jq -c '.[]' {self.path.name} > {self.path.with_suffix('.jsonl').name}"
            )
        try:
            elements, _ = decoded(msgspec.json.Decoder(list[msgspec.Raw]).decode, held.removeprefix(BOM))
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{self.name} is neither a JSON array of objects nor JSON lines ({error})") from error
        self.unit = "row"
        return self._element_rows(elements)

    def _element_rows(self, elements: list[msgspec.Raw]) -> Iterator[InputRow]:
        read = json_row_reader(self.columns)
        for number, written in enumerate(elements[self._start.row :], self._start.row + 1):
            self._counted = (number, len(elements))
            yield read(number, bytes(written))

    def _opened_table(self) -> Any:
        """The `pyarrow.parquet.ParquetFile`, whose header is checked."""
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise BadInput(
                f"{self.name} is parquet, and pyarrow, which reads it, is not installed; {INSTALL_PYARROW}, or give another format"
            ) from error
        try:
            # With the default, pre_buffer=True, pyarrow reads the whole file ahead.
            table = self._open.enter_context(parquet.ParquetFile(self._raw, pre_buffer=False))
        except (OSError, ValueError) as error:
            self._raw.seek(0)
            known = format_fault(self._raw.read(FIRST_BYTES), ".parquet")
            raise BadInput(f"{self.name} {known or f'is not a parquet file: {error}'}") from error
        self._check_header(table.schema_arrow.names)
        if table.metadata.num_rows:
            self._check_texts(table.schema_arrow)
        return table

    def _check_texts(self, schema: Any) -> None:
        """Raises BadInput where a column of texts has another type: its values would be answered as they are written in JSON."""
        import pyarrow as pa

        for name in (self.columns.text, self.columns.pair):
            kind = schema.field(name).type if name in schema.names else pa.null()
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if str(kind) not in ("string", "large_string", "string_view", "null"):
                raise BadInput(
                    f"{self.name} has a column {name} of type {kind}, and texts are needed; cast it to string where the file is written"
                )

    def _parquet_rows(self) -> Iterator[InputRow]:
        for _, found in self.batches(row_by_row=True):
            for row in found:
                self._counted = (row.line, self.table.metadata.num_rows)
                yield row

    def batches(self, end: int | None = None, *, row_by_row: bool = False) -> Iterator[tuple[Any, list[InputRow]]]:
        """The rows up to `end` of a parquet file, as Arrow batches and as rows. Row groups outside the range are not read.

        The batches have all columns; where they are read `row_by_row`, they have those that the rows have.
        """
        self.prepare()
        table, begin = self.table, self._start.row
        end = table.metadata.num_rows if end is None else end
        groups: list[int] = []
        before = first = 0
        for group in range(table.metadata.num_row_groups):
            count = table.metadata.row_group(group).num_rows
            if before < end and before + count > begin:
                first = first if groups else before
                groups.append(group)
            before += count
        read, encode = json_row_reader(self.columns), msgspec.json.Encoder(enc_hook=str).encode
        texts = (self.columns.text, self.columns.pair, *((HEAD, TAIL) if self.columns.relations else ()))
        names = [name for name in table.schema_arrow.names if name in texts or not self._texts_only]
        size = PARQUET_ROWS if row_by_row else TABLE_ROWS
        columns = names if row_by_row and self._texts_only else None
        try:
            for batch in table.iter_batches(size, row_groups=groups, columns=columns, use_threads=False):
                skipped, last = max(0, begin - first), min(end - first, batch.num_rows)
                number = first + skipped + 1
                first += batch.num_rows
                if skipped < last:
                    inside = batch.slice(skipped, last - skipped)
                    objects = map(encode, inside.select(names).to_pylist())
                    yield inside, [read(place, written) for place, written in enumerate(objects, number)]
                if first >= end:  # the rest of the row group belongs to other parts
                    return
        except (OSError, ValueError) as error:
            raise BadInput(f"{self.name} is damaged or incomplete: {error}") from error


def format_of(path: Path) -> str:
    """The format that the file's name ends with; `jsonl` for standard input."""
    return "jsonl" if path == STDIN else suffix_of(path).removeprefix(".")


def _as_text(lines: Iterable[Line], name: str, read: list[bytes]) -> Iterator[str]:
    """Lines for `csv`, kept in `read` as bytes. A byte that is not UTF-8 becomes a lone surrogate; `table_row` reports its row."""
    for line in lines:
        if not line.whole:
            raise BadInput(f"{name}, line {line.number}: {too_long()}")
        read.append(line.read)
        yield line.read.decode("utf-8", errors="surrogateescape")
