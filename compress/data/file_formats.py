"""The rows of a file, by its suffix: JSON lines, a JSON array, CSV, TSV, parquet, CoNLL columns."""

import codecs
import csv
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path

from compress.data.class_names import class_names, with_class_names
from compress.data.columns import Columns
from compress.data.examples import Task
from compress.data.fields import MOST_CHARACTERS
from compress.data.row_faults import Fault, UnreadableFrom, note
from serve.errors import BadInput

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".conll")
SEPARATORS = {".csv": ",;\t", ".tsv": "\t;,"}  # the usual one first
MOST_LINE_BYTES = 8 * MOST_CHARACTERS  # six of them spell one character of JSON: \u00e9
MOST_ARRAY_BYTES = 2**30  # a JSON array has no lines at which it could be read in pieces: it is held whole
TOO_LONG = f"is longer than {MOST_CHARACTERS:,} characters, which are the most; split it"
BLANK = re.compile(r"[ \t\r\n]*")


def rows_in(
    path: Path, suffix: str, columns: Columns, task: Task | None, faults: list[Fault]
) -> Iterator[tuple[int, object]]:
    """Line number and content of each row of a file in the format of `suffix`.

    Rows that do not parse go to `faults`, and so does a table without the columns that `task` needs, or its texts without one.

    Raises:
        UnreadableFrom: the file is not text from some line on.
        BadInput: it is no parquet file.
    """
    if suffix == ".conll":
        return _conll_rows(path, columns, faults)
    if suffix == ".parquet":
        return _parquet_rows(path, columns, task, faults)
    if suffix in SEPARATORS:
        return _table_rows(path, columns, task, faults)
    return _json_rows(path, faults, arrays=suffix == ".json")


def _json_rows(path: Path, faults: list[Fault], *, arrays: bool) -> Iterator[tuple[int, object]]:
    """One value a line; or with `arrays`, where the file begins with a bracket, the values of that array."""
    if arrays and _begins_with(path) == b"[":
        yield from _array_rows(path, faults)
        return
    first = True
    for number, line in enumerate(lines_in(path), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = f"is not JSON ({_why(error)})"
            if arrays and first:
                faults.append(
                    Fault(str(path), number, f"{reason}; an array of objects is needed, or one object a line")
                )
                return
            note(faults, Fault(str(path), number, reason))
        first = False


def _array_rows(path: Path, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    """The values of the array that the file is, each with the line that it begins on. The file's text is held whole."""
    if path.stat().st_size > MOST_ARRAY_BYTES:
        reason = (
            f"is an array of over {MOST_ARRAY_BYTES:,} bytes, which is the most; give JSON lines, which may be of any size: "
            f"jq -c '.[]' {path.name} > {path.with_suffix('.jsonl').name}"
        )
        faults.append(Fault(str(path), None, reason))
        return
    text = "\n".join(lines_in(path, MOST_ARRAY_BYTES + 1))
    decode = json.JSONDecoder().raw_decode
    end = text.index("[") + 1
    line = 1 + text.count("\n", 0, end)
    begins = _past_blank(text, end)
    try:
        more = text[begins : begins + 1] != "]"
        while more:
            line += text.count("\n", end, begins)
            value, end = decode(text, begins)
            yield line, value
            line += text.count("\n", begins, end)
            behind = _past_blank(text, end)
            more = text[behind : behind + 1] == ","
            if not more and text[behind : behind + 1] != "]":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, behind)
            begins = _past_blank(text, behind + 1)
    except (ValueError, RecursionError) as error:
        at = getattr(error, "lineno", line)
        faults.append(Fault(str(path), at, f"is not JSON from here on ({_why(error)})"))


def _begins_with(path: Path) -> bytes:
    """The first byte of the file that is no blank and no byte order mark."""
    with path.open("rb") as file:
        if file.peek(3).startswith(codecs.BOM_UTF8):
            file.seek(3)
        for piece in iter(partial(file.read, 1 << 16), b""):
            if there := piece.strip(b" \t\r\n"):
                return there[:1]
    return b""


def _past_blank(text: str, at: int) -> int:
    blank = BLANK.match(text, at)
    return blank.end() if blank else at


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _parquet_rows(path: Path, columns: Columns, task: Task | None, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if lacking := columns.fault(schema.names, task):
                faults.append(Fault(str(path), None, lacking))
                return
            written = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
            info = written.get("info") if isinstance(written, dict) else None
            names = class_names(info.get("features") or {} if isinstance(info, dict) else {})
            batches = file.iter_batches(batch_size=1_000)
            for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1):
                try:
                    yield number, with_class_names(row, names)
                except ValueError as wrong:
                    note(faults, Fault(str(path), number, str(wrong)))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not a parquet file: {error}") from None


def _table_rows(path: Path, columns: Columns, task: Task | None, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    """A row of cells a line, or more lines where a quoted cell has several; the line is that of its beginning."""
    if task == "token-classification":
        reason = "is a table, whose cells hold no lists of tags or entities; save it as JSON lines, parquet or .conll"
        faults.append(Fault(str(path), None, reason))
        return
    for _ in lines_in(path):  # it is UTF-8, or this says where it is not
        pass
    csv.field_size_limit(MOST_CHARACTERS)  # a setting of the process, as the module has no other
    end = 0
    try:
        separator, header = _header(path, columns, task)
        if not header:
            return
        if lacking := columns.fault(header, task):
            faults.append(Fault(str(path), None, lacking))
            return
        fewest = 1 + max(header.index(getattr(columns, name)) for name in columns.needed(header, task))
        cells: list[str] = []
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.reader(file, delimiter=separator)
            _first_row(table)
            end = table.line_num
            for cells in table:
                line, end = end + 1, table.line_num
                if fewest <= len(cells) <= len(header):
                    yield line, dict(zip(header, cells, strict=False))
                elif cells:  # a blank line is no row
                    note(faults, Fault(str(path), line, _wrong_width(cells, header)))
        if cells and "\n" in cells[-1] and _left_open(path, separator, line):
            if faults and faults[-1].line == line:
                faults.pop()  # of its number of fields, which the quote decided
            reason = "has a quote that nothing closes up to the end of the file; close it, or double it if it is part of the text"
            faults.append(Fault(str(path), line, reason))
    except csv.Error as error:
        reason = f"cannot be read as a table from here on ({error})"
        if "field limit" in str(error):
            reason = f"has a cell of more than {MOST_CHARACTERS:,} characters, and is read no further ({error}): is a quote left open?"
        faults.append(Fault(str(path), end + 1, reason))


def _header(path: Path, columns: Columns, task: Task | None) -> tuple[str, list[str]]:
    """The separator, and the names of the columns: of the usual separators the first that finds all that are needed.

    If none does, the one that finds the most. No names stand in a file that is blank.
    """
    found: list[tuple[str, list[str]]] = []
    for separator in SEPARATORS[path.suffix]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = [name.strip() for name in _first_row(csv.reader(file, delimiter=separator))]
        if not columns.missing(names, task):
            return separator, names
        found.append((separator, names))
    return max(found, key=lambda each: len(each[1]))


def _first_row(table: Iterator[list[str]]) -> list[str]:
    return next((cells for cells in table if cells), [])


def _wrong_width(cells: Sequence[str], header: Sequence[str]) -> str:
    fields = "1 field" if len(cells) == 1 else f"{len(cells)} fields"
    quote = ": quote a text that holds the separator" if len(cells) > len(header) else ""
    return f"has {fields}, its header {len(header)}{quote}"


def _left_open(path: Path, separator: str, line: int) -> bool:
    """Whether the row that begins on `line`, the last one, has a quote that nothing closes."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for _ in csv.reader(islice(file, line - 1, None), delimiter=separator, strict=True):
                pass
        except csv.Error as error:
            return "end of data" in str(error)
    return False


def looks_like_columns(path: Path) -> bool:
    """Whether the first lines of a text file are columns, of which there are as many in each."""
    lines = [line.split() for line in islice(lines_in(path), 50) if line.strip()]
    return bool(lines) and len({len(columns) for columns in lines}) == 1 and len(lines[0]) >= 2


def _conll_rows(path: Path, columns: Columns, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    """Columns separated by blanks: the first is the token, the last its tag; a blank line ends a sentence."""
    tokens: list[str] = []
    tags: list[str] = []
    start = 1
    for number, line in enumerate(chain(lines_in(path), [""]), 1):
        cells = line.split()
        if not cells:
            if tokens:
                yield start, {columns.tokens: tokens, columns.tags: tags}
            tokens, tags, start = [], [], number + 1
        elif cells[0] == "-DOCSTART-":
            continue
        elif len(cells) < 2:
            reason = f"has one column ({cells[0]!r}); a token and its tag are needed"
            note(faults, Fault(str(path), number, reason))
        else:
            tokens.append(cells[0])
            tags.append(cells[-1])


def lines_in(path: Path, most: int | None = None) -> Iterator[str]:
    """The lines of a UTF-8 file, each without the line feed that ends it; other ends of line stand as they are.

    A line is shorter than `most` bytes, MOST_LINE_BYTES where none is given.

    Raises:
        UnreadableFrom: at the first line that is not UTF-8, or that does not end.
    """
    with path.open("rb") as file:
        if file.peek(3).startswith(codecs.BOM_UTF8):
            file.seek(3)
        most = most or MOST_LINE_BYTES
        for number, line in enumerate(iter(partial(file.readline, most), b""), 1):
            if len(line) == most:
                raise UnreadableFrom([Fault(str(path), number, TOO_LONG)])
            try:
                yield line.removesuffix(b"\n").decode()
            except UnicodeDecodeError as error:
                at = file.tell() - len(line) + error.start
                reason = f"is not UTF-8 text (byte {at} of the file); save the file as UTF-8"
                raise UnreadableFrom([Fault(str(path), number, reason)]) from None
