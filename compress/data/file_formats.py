"""Reads the rows of a file by its suffix: JSON lines, a JSON array, CSV, TSV, parquet, CoNLL columns."""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from compress.data.class_names import class_names, with_class_names
from compress.data.columns import Columns
from compress.data.conll import conll_rows, layout_of
from compress.data.fields import MOST_CHARACTERS
from compress.data.row_faults import Fault, UnreadableFrom, note
from compress.data.tables import SEPARATORS, TableRow, swallows, table_rows
from compress.data.task import Task
from serve.errors import BadInput
from serve.wording import counted

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".conll")
MOST_ARRAY_BYTES = 2**30  # of a JSON array, which is read whole, since it has no lines to split it at
MOST_LINE_BYTES = 8 * MOST_CHARACTERS  # a character of JSON may take six bytes: \u00e9
TOO_LONG = f"is longer than {MOST_CHARACTERS:,} characters, the most that are allowed; split it"
BLANK = re.compile(r"[ \t\r\n]*")
SAME = {".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".bio": ".conll", ".iob": ".conll", ".iob2": ".conll"}


def suffix_of(path: Path) -> str:
    """The suffix that names the format of a file, one of `SUFFIXES` if it is known: in small letters, and before `.gz`."""
    suffix = Path(path.stem if _is_packed(path) else path.name).suffix.lower()
    return SAME.get(suffix, suffix)


def _is_packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


@contextmanager
def _opened(path: Path) -> "Iterator[io.BufferedReader[Any]]":
    """The bytes of a file, unpacked if it ends in `.gz`. UnreadableFrom where these are damaged."""
    try:
        with path.open("rb") as file:
            if _is_packed(path):
                with gzip.GzipFile(fileobj=file) as packed, io.BufferedReader(packed) as unpacked:
                    yield unpacked
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UnreadableFrom([Fault(str(path), None, f"is damaged or incomplete: {error}")]) from None


def encoding_fault(beginning: bytes) -> str | None:
    """Why a file with these first bytes is no UTF-8, if they show that it is UTF-16; None otherwise."""
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    if beginning.startswith(marks) or (len(beginning) > 1 and (beginning[0] == 0) is not (beginning[1] == 0)):
        return "is UTF-16 text; save the file as UTF-8, such as by `iconv -f UTF-16 -t UTF-8`"
    return None


def rows_in(
    path: Path, suffix: str, columns: Columns, task: Task | None, faults: list[Fault]
) -> Iterator[tuple[int, object]]:
    """The line number and content of each row of a file in the format of `suffix`.

    `faults` gets rows that do not parse, and tables without the columns that `task` (or without a task, a text) needs.

    Raises:
        UnreadableFrom: the file cannot be read past some line, or has too many faults.
        BadInput: a parquet file cannot be read.
    """
    if suffix == ".conll":
        return conll_rows(path, partial(lines_in, path), columns, faults)
    if suffix == ".parquet":
        return _parquet_rows(path, columns, task, faults)
    if suffix in SEPARATORS:
        return _table_rows(path, columns, task, faults)
    if suffix == ".json" and task and task.has_contexts and _begins_with(path) == b"{":
        nested = squad_rows(path, columns, faults)
        if nested is not None:
            return nested
    return _json_rows(path, faults, arrays=suffix == ".json")


def _json_rows(path: Path, faults: list[Fault], *, arrays: bool) -> Iterator[tuple[int, object]]:
    """One value a line; with `arrays`, the values of the array if the file begins with a bracket."""
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


def squad_rows(path: Path, columns: Columns, faults: list[Fault]) -> Iterator[tuple[int, object]] | None:
    """The questions of a file as SQuAD and MLQA publish them, each with its number; None if the file is not one object with `data`."""
    if _is_larger(path, MOST_ARRAY_BYTES):
        return None
    try:
        found = json.loads("\n".join(lines_in(path, MOST_ARRAY_BYTES + 1)))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("data"), list):
        return None
    rows: list[tuple[int, object]] = []
    try:
        for paragraph in (paragraph for article in found["data"] for paragraph in article["paragraphs"]):
            for asked in paragraph["qas"]:
                row = {columns.question: asked["question"], columns.context: paragraph["context"]}
                if asked.get("is_impossible") or "answers" in asked:
                    row[columns.answers] = [] if asked.get("is_impossible") else asked["answers"]
                rows.append((len(rows) + 1, row))
    except (KeyError, TypeError, AttributeError):
        faults.append(
            Fault(
                str(path),
                None,
                f"is not SQuAD's JSON after question {len(rows)}: data, paragraphs, context, qas, question are needed",
            )
        )
        return iter(())
    return iter(rows)


def _array_rows(path: Path, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    """The values of the file's array, each with the line on which it begins. The whole text is held in memory."""
    if _is_larger(path, MOST_ARRAY_BYTES):
        reason = (
            f"is an array of over {MOST_ARRAY_BYTES:,} bytes, the most that are held; give JSON lines, which may have any size: "
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
    """The first byte of the file that is not a blank or part of a byte order mark."""
    with _opened(path) as file:
        if file.peek(3).startswith(codecs.BOM_UTF8):
            file.seek(3)
        for piece in iter(partial(file.read, 1 << 16), b""):
            if there := piece.strip(b" \t\r\n"):
                return there[:1]
    return b""


def _is_larger(path: Path, most: int) -> bool:
    """Whether the file has more than `most` bytes once it is unpacked."""
    if not _is_packed(path):
        return path.stat().st_size > most
    with _opened(path) as file:
        return file.seek(most + 1) > most


def _past_blank(text: str, at: int) -> int:
    blank = BLANK.match(text, at)
    return blank.end() if blank else at


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _parquet_rows(path: Path, columns: Columns, task: Task | None, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    from pyarrow import parquet

    if _is_packed(path):
        raise BadInput(f"{path} is parquet, which is read from its end and not unpacked. Give it without gzip.")
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
    """The rows of a table, each with the line on which it begins; a quoted cell may have several lines."""
    if task and task.table_fault:
        faults.append(Fault(str(path), None, task.table_fault))
        return
    for _ in lines_in(path):  # raises where the file is not UTF-8
        pass
    separator, header, fault = _header(path, columns, task)
    if lacking := fault or (columns.fault(header, task) if header else None):
        faults.append(Fault(str(path), 1 if fault else None, lacking))
    if lacking or not header:
        return
    fewest = 1 + max(header.index(getattr(columns, name)) for name in columns.needed(header, task))
    labels: set[str] = set()
    # Rows that may be several: the line, of how many lines, the labels within.
    doubtful: list[tuple[int, int, Sequence[str]]] = []
    end, first = 0, True
    with _opened_text(path) as lines:
        for row in table_rows(lines, separator):
            line, end = end + 1, end + row.lines
            if row.fault:
                note(faults, Fault(str(path), line, row.fault))
            elif not row.cells or first:  # blank lines are skipped
                first = first and not row.cells
            elif fewest <= len(row.cells) <= len(header):
                cells = dict(zip(header, row.cells, strict=False))
                labels.add(cells.get(columns.label, ""))
                if row.within and columns.label in header:
                    doubtful.append((line, row.lines, row.within[header.index(columns.label)]))
                yield line, cells
            else:
                note(faults, Fault(str(path), line, _wrong_width(row.cells, header)))
    labels.discard("")
    for line, count, within in (each for each in doubtful if not labels.isdisjoint(each[2])):
        note(faults, Fault(str(path), line, swallows(count, 1 + len(within))))


def _header(path: Path, columns: Columns, task: Task | None) -> tuple[str, list[str], str | None]:
    """The separator and the column names: by the first usual separator that gives all needed columns.

    If none does, by the one that gives the most columns. A blank file has no names, and neither has a header that cannot be read: then
    the third is its fault.
    """
    found: list[tuple[str, list[str], str | None]] = []
    for separator in SEPARATORS[suffix_of(path)]:
        with _opened_text(path) as lines:
            row = next((row for row in table_rows(lines, separator) if row.cells or row.fault), TableRow([], 0))
        names = [name.strip() for name in row.cells]
        if names and not columns.missing(names, task):
            return separator, names, None
        found.append((separator, names, row.fault))
    return max(found, key=lambda each: len(each[1]))


@contextmanager
def _opened_text(path: Path) -> Iterator[Iterator[str]]:
    """The lines of a UTF-8 file, with their line ends as they are."""
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        yield text


def _wrong_width(cells: Sequence[str], header: Sequence[str]) -> str:
    fields = counted(len(cells), "field")
    quote = "; quote texts that hold the separator" if len(cells) > len(header) else ""
    return f"has {fields}, but the header has {len(header)}{quote}"


def looks_like_columns(path: Path, *, tagged: bool = False) -> bool:
    """Whether the first 50 lines of a text file are columns: at least 2, with tags last, or without `tagged` equally many in each line."""
    layout = layout_of(lambda: islice(lines_in(path), 50))
    return layout.width > 1 and (layout.tagged or (layout.even and not tagged))


def lines_in(path: Path, most: int | None = None) -> Iterator[str]:
    """The lines of a UTF-8 file, unpacked if it ends in `.gz`, without their line feeds; other line ends are kept.

    Lines must be shorter than `most` bytes, by default `MOST_LINE_BYTES`.

    Raises:
        UnreadableFrom: at the first line that is not UTF-8 or too long.
    """
    with _opened(path) as file:
        beginning = file.peek(3)
        if fault := encoding_fault(beginning):
            raise UnreadableFrom([Fault(str(path), None, fault)])
        if beginning.startswith(codecs.BOM_UTF8):
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
