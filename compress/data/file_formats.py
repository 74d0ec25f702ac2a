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

from compress.data.columns import Columns, advice_on
from compress.data.conll import conll_rows, layout_of
from compress.data.row_fields import MOST_CHARACTERS, Fault, UnreadableFrom, class_names, note, with_class_names
from compress.data.tables import SEPARATORS, TableRow, column_names, swallows, table_rows
from compress.data.task import Task
from serve.errors import BadInput
from serve.wording import counted

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".conll")
MOST_ARRAY_BYTES = 2**30  # of a JSON array, which is read whole, since it has no lines to split it at
MOST_LINE_BYTES = 8 * MOST_CHARACTERS  # a character of JSON may take six bytes: \u00e9
TOO_LONG = f"is longer than {MOST_CHARACTERS:,} characters, the most that are allowed; split it"
FIRST_ROWS = 5  # of a table, among which its header is looked for
FIRST_BYTES = 512  # of a file, from which its format is told
SAVE_AS_UTF8 = "save the file as UTF-8, such as by `iconv -f CP1252 -t UTF-8` if it comes from Windows"
BLANK = re.compile(r"[ \t\r\n]*")
# What files of other formats begin with, and what to do with them.
BEGINNINGS = {
    b"PK\x03\x04": "a zip archive, as .xlsx, .docx and .npz files are; unpack it, or save the table as CSV",
    b"\xd0\xcf\x11\xe0": "a file of Excel or Word; save the table as CSV",
    b"\x1f\x8b": "packed with gzip; let its name end in .gz, once for each time that it was packed",
    b"BZh91AY&SY": "packed with bzip2; unpack it by `bunzip2`",
    b"\xfd7zXZ\x00": "packed with xz; unpack it by `unxz`",
    b"\x28\xb5\x2f\xfd": "packed with zstd; unpack it by `unzstd`",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"Rar!\x1a\x07": "a RAR archive; unpack it",
    b"PAR1\x15": "parquet; let its name end in .parquet, without .gz",
    b"ARROW1\0\0": "an Arrow file; write it as parquet",
    b"\xff\xff\xff\xff": "an Arrow stream; write it as parquet",
    b"Obj\x01": "Avro; write it as JSON lines or parquet",
    b"SQLite format 3\0": "a database of SQLite; write the table as CSV or JSON lines",
    b"\x89HDF": "HDF5; write it as JSON lines or parquet",
    b"\x93NUMPY": "an array of numpy; write it as JSON lines or parquet",
    b"%PDF-": "a PDF; write its text into JSON lines",
    b"\x89PNG": "a picture, and no text",
    b"version https://git-lfs.": "a pointer of Git LFS, and not the file that it stands for; fetch that by `git lfs pull`",
    b"#FORMAT=WebAnno TSV": "WebAnno TSV of INCEpTION; export the documents as CoNLL 2002, and let their names end in .conll",
}
SAME = {".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".bio": ".conll", ".iob": ".conll", ".iob2": ".conll"}


def suffix_of(path: Path) -> str:
    """The suffix that names the format of a file, one of `SUFFIXES` if it is known: in small letters, and before `.gz`."""
    suffix = Path(path.stem if _is_packed(path) else path.name).suffix.lower()
    return SAME.get(suffix, suffix)


def _is_packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


@contextmanager
def _opened(path: Path) -> "Iterator[io.BufferedReader[Any]]":
    """The bytes of a file, unpacked if it ends in `.gz`. UnreadableFrom where these are damaged or cannot be read."""
    try:
        with path.open("rb") as file:
            if _is_packed(path):
                with gzip.GzipFile(fileobj=file) as packed, io.BufferedReader(packed) as unpacked:
                    yield unpacked
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UnreadableFrom([Fault(str(path), None, packing_fault(error))]) from None
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error}); allow it to be read, or give another file"
        raise UnreadableFrom([Fault(str(path), None, reason)]) from None


def packing_fault(error: Exception) -> str:
    """Why a file that ends in .gz cannot be unpacked."""
    remedy = "let its name end in .gz only if it is packed with gzip, and fetch or pack it again if it is"
    return f"is damaged or incomplete: {error}; {remedy}"


def format_fault(beginning: bytes, suffix: str = "") -> str | None:
    """Why a file with these first bytes is no UTF-8, or in another format than its name says, if they show it; None otherwise.

    A text in `.txt` may begin like HTML. A pickle begins with its protocol, and text in UTF-16 or UTF-32 without a mark with a letter of
    ASCII.
    """
    there = beginning.removeprefix(codecs.BOM_UTF8).lstrip()
    for begins, form in BEGINNINGS.items():
        if (beginning.startswith(begins) or there.startswith(begins)) and not (
            suffix == ".parquet" and begins[:4] == b"PAR1"
        ):
            return f"is {form}"
    if beginning[:1] == b"\x80" and beginning[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "is a pickle of Python; write it as JSON lines or parquet"
    if suffix != ".txt" and re.match(rb"<(!doctype html|html|\?xml)\b", there, re.IGNORECASE):
        return "is HTML or XML, such as the page of a failed download; give JSON lines, CSV, TSV or parquet"
    if beginning[257:262] == b"ustar":
        return "is a tar archive; unpack it"
    if wide := re.match(
        rb"(\xff\xfe\0\0|\0\0\xfe\xff|[^\0]\0{3}|\0{3}[^\0])|[^\0]\0|\0[^\0]|\xff\xfe|\xfe\xff", beginning
    ):
        kind = "UTF-32" if wide[1] else "UTF-16"
        return f"is {kind} text; save the file as UTF-8, such as by `iconv -f {kind} -t UTF-8`"
    return None


def rows_in(
    path: Path, suffix: str, columns: Columns, task: Task | None, faults: list[Fault]
) -> Iterator[tuple[int, object]]:
    """The line number and content of each row of a file in the format of `suffix`.

    `faults` gets rows that do not parse, and tables without the columns that `task` (or without a task, a text) needs. Raises
    UnreadableFrom: the file cannot be read past some line, or has too many faults. BadInput: a parquet file cannot be read.
    """
    if suffix == ".conll":
        return conll_rows(path, partial(lines_in, path), columns, faults)
    if suffix == ".parquet":
        return _parquet_rows(path, columns, task, faults)
    if suffix in SEPARATORS:
        return _table_rows(path, columns, task, faults)
    if suffix == ".json" and task and task.has_contexts and _begins_with(path)[:1] == b"{":
        nested = squad_rows(path, columns, faults)
        if nested is not None:
            return nested
    return _json_rows(path, faults, arrays=suffix == ".json")


def _json_rows(path: Path, faults: list[Fault], *, arrays: bool) -> Iterator[tuple[int, object]]:
    """One value a line; or values of several lines, or those of an array, which with `arrays` every file is that begins with a bracket."""
    begins = _begins_with(path)
    if begins[:1] == b"[" if arrays else begins in (b"[{", b"[["):
        yield from _held_rows(path, faults, in_array=True)
        return
    first = True
    for number, line in enumerate(lines_in(path), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            if (
                first and begins[:1] == b"{" and getattr(error, "pos", 0) >= len(line.rstrip())
            ):  # it goes on in the next line
                yield from _held_rows(path, faults, in_array=False)
                return
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


def _held_rows(path: Path, faults: list[Fault], *, in_array: bool) -> Iterator[tuple[int, object]]:
    """The values of the file, or of its array, each with the line on which it begins. The whole text is held in memory."""
    if _is_larger(path, MOST_ARRAY_BYTES):
        what, parts = ("is an array", "[]") if in_array else ("has objects of several lines and is", "")
        reason = (
            f"{what} of over {MOST_ARRAY_BYTES:,} bytes, the most that are held; give JSON lines, which may have any size: "
            f"jq -c '.{parts}' {path.name} > {path.with_suffix('.jsonl').name}"
        )
        faults.append(Fault(str(path), None, reason))
        return
    text = "\n".join(lines_in(path, MOST_ARRAY_BYTES + 1))
    decode = json.JSONDecoder().raw_decode
    end = text.index("[") + 1 if in_array else 0
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
            comma = text[behind : behind + 1] == ","
            if in_array and not comma and text[behind : behind + 1] != "]":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, behind)
            begins = _past_blank(text, behind + 1) if in_array or comma else behind
            more = comma if in_array else begins < len(text)
            if in_array and not more and begins < len(text):
                raise json.JSONDecodeError(
                    "The array ends before this; give one array, or one object a line", text, begins
                )
    except (ValueError, RecursionError) as error:
        at = getattr(error, "lineno", line)
        faults.append(Fault(str(path), at, f"is not JSON from here on ({_why(error)})"))


def _begins_with(path: Path) -> bytes:
    """The first two bytes of the file that are not blanks or parts of a byte order mark."""
    with _opened(path) as file:
        if file.peek(3).startswith(codecs.BOM_UTF8):
            file.seek(3)
        for piece in iter(partial(file.read, 1 << 16), b""):
            if there := b"".join(piece.split()):
                return there[:2]
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
        before, there = error.doc[: error.pos].rstrip()[-1:], error.doc[error.pos :].lstrip()[:1]
        hints = {
            "a comma is behind the object; remove it": error.msg == "Extra data" and there == ",",
            "give one object a line": error.msg == "Extra data",
            "write a tab as \\t and a line break as \\n": error.msg.startswith("Invalid control"),
            "close the text, and write a line break in it as \\n": error.msg.startswith("Unterminated"),
            "remove the comma before it": before == "," and there in ("]", "}"),
            "JSON has no comments; remove it": there in ("#", "/"),
            "names and texts need double quotes": there == "'"
            or (error.msg.startswith("Expecting property") and there.isalpha()),
            "write null, true or false": there in ("N", "T", "F"),
        }
        hint = next((hint for hint, holds in hints.items() if there and holds), "")
        return f"{error.msg} at column {error.colno}{hint and f'; {hint}'}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _parquet_rows(path: Path, columns: Columns, task: Task | None, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    from pyarrow import parquet

    if _is_packed(path):
        raise BadInput(f"{path} is parquet, which is read from its end and not unpacked. Give it without gzip.")
    with _opened(path) as opened:
        beginning = opened.read(FIRST_BYTES)
    if not beginning.startswith(b"PAR1"):
        known = (
            format_fault(beginning) or "is not a parquet file, which begins with PAR1; give it the suffix of its format"
        )
        raise BadInput(f"{path} {known}.")
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
        raise BadInput(f"{path} is damaged or incomplete: {error}. Fetch or write it again.") from None


def _table_rows(path: Path, columns: Columns, task: Task | None, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    """The rows of a table, each with the line on which it begins; a quoted cell may have several lines."""
    for _ in lines_in(path):  # raises where the file is not UTF-8
        pass
    if task and task.table_fault:
        faults.append(Fault(str(path), None, task.table_fault))
        return
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
            elif len(header) > 1 and column_names(row.cells) == header:
                note(faults, Fault(str(path), line, "names the columns again; remove the line"))
            elif fewest <= len(row.cells) <= len(header):
                cells = dict(zip(header, row.cells, strict=False))
                labels.add(cells.get(columns.label, ""))
                if row.within and columns.label in header:
                    doubtful.append((line, row.lines, row.within[header.index(columns.label)]))
                yield line, cells
            else:
                note(faults, Fault(str(path), line, _wrong_width(row.cells, header, separator)))
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
            first = [*islice((row for row in table_rows(lines, separator) if row.cells or row.fault), FIRST_ROWS)]
        row, *below = first or [TableRow([], 0)]
        names = column_names(row.cells)
        if names and not columns.missing(names, task):
            return separator, names, None
        fault = row.fault
        if any(each.cells and not columns.missing(column_names(each.cells), task) for each in below):
            fault = "is no header, and a line below names the needed columns; remove what is above that line"
        elif below and not fault:
            fault = advice_on(dict(zip(names, below[0].cells, strict=False))) or None
        found.append((separator, names, fault))
    return max(found, key=lambda each: len(each[1]) or 1.5)  # a fault, rather than a line that is one name


@contextmanager
def _opened_text(path: Path) -> Iterator[Iterator[str]]:
    """The lines of a UTF-8 file, with their line ends as they are."""
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        yield text


def _wrong_width(cells: Sequence[str], header: Sequence[str], separator: str) -> str:
    fields = counted(len(cells), "field")
    quote = '; quote texts that hold the separator (by ")' if len(cells) > len(header) else ""
    if len(cells) == len(header) + 1:
        quote += ", or name the column in front, if it is an index"
    elif len(cells) == 1 and separator in cells[0]:
        quote = "; quote each text, and not the whole line"
    return f"has {fields}, but the header has {len(header)}{quote}"


def looks_like_columns(path: Path, *, tagged: bool = False) -> bool:
    """Whether the first 50 lines of a text file are columns: at least 2, with tags last, or without `tagged` equally many in each line."""
    layout = layout_of(lambda: islice(lines_in(path), 50))
    return layout.width > 1 and (layout.tagged or (layout.even and not tagged))


def lines_in(path: Path, most: int | None = None) -> Iterator[str]:
    """The lines of a UTF-8 file, unpacked if it ends in `.gz`, without their line feeds; other line ends are kept.

    Lines must be shorter than `most` bytes, by default `MOST_LINE_BYTES`. Raises UnreadableFrom: at the first line that is not
    UTF-8 or too long.
    """
    with _opened(path) as file:
        beginning = file.peek(FIRST_BYTES)
        if fault := format_fault(beginning[:FIRST_BYTES], suffix_of(path)):
            raise UnreadableFrom([Fault(str(path), None, fault)])
        if beginning.startswith(codecs.BOM_UTF8):
            file.seek(3)
        most = most or MOST_LINE_BYTES
        for number, line in enumerate(iter(partial(file.readline, most), b""), 1):
            if len(line) == most:
                raise UnreadableFrom([Fault(str(path), number, TOO_LONG)])
            try:
                text = line.removesuffix(b"\n").decode()
            except UnicodeDecodeError as error:
                at = file.tell() - len(line) + error.start
                reason = f"is not UTF-8 text (byte {at} of the file); {SAVE_AS_UTF8}"
                raise UnreadableFrom([Fault(str(path), number, reason)]) from None
            if b"\0" in line:
                at = file.tell() - len(line) + line.index(b"\0")
                reason = f"holds a byte 0 (byte {at} of the file), which no text has; the file is damaged, or is UTF-16 or no text"
                raise UnreadableFrom([Fault(str(path), number, reason)])
            yield text
