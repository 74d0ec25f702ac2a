"""Reads the rows of a file by its suffix: JSON lines, a JSON array, CSV, TSV, parquet, CoNLL columns."""

import codecs
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
from compress.data.tables import SEPARATORS, TableRow, table_rows
from serve.errors import BadInput

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".conll")
MOST_LINE_BYTES = 8 * MOST_CHARACTERS  # a character of JSON may take six bytes: \u00e9
MOST_ARRAY_BYTES = 2**30  # 1 GiB; a JSON array is held whole, as it cannot be read line by line
TOO_LONG = f"is longer than {MOST_CHARACTERS:,} characters, the most that are allowed; split it"
BLANK = re.compile(r"[ \t\r\n]*")


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
        return _conll_rows(path, columns, faults)
    if suffix == ".parquet":
        return _parquet_rows(path, columns, task, faults)
    if suffix in SEPARATORS:
        return _table_rows(path, columns, task, faults)
    if suffix == ".json" and task == "question-answering" and _begins_with(path) == b"{":
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
    if path.stat().st_size > MOST_ARRAY_BYTES:
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
    if path.stat().st_size > MOST_ARRAY_BYTES:
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
    """The rows of a table, each with the line on which it begins; a quoted cell may have several lines."""
    if task == "question-answering":
        faults.append(
            Fault(
                str(path),
                None,
                "is a table, whose cells cannot hold answers; save it as JSON lines, parquet or SQuAD's JSON",
            )
        )
        return
    if task == "token-classification":
        reason = "is a table, whose cells cannot hold tags or entities; save it as JSON lines, parquet or .conll"
        faults.append(Fault(str(path), None, reason))
        return
    for _ in lines_in(path):  # raises where the file is not UTF-8
        pass
    separator, header, fault = _header(path, columns, task)
    if lacking := fault or (columns.fault(header, task) if header else None):
        faults.append(Fault(str(path), 1 if fault else None, lacking))
    if lacking or not header:
        return
    fewest = 1 + max(header.index(getattr(columns, name)) for name in columns.needed(header, task))
    end, first = 0, True
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in table_rows(file, separator):
            line, end = end + 1, end + row.lines
            if row.fault:
                note(faults, Fault(str(path), line, row.fault))
            elif not row.cells or first:  # blank lines are skipped
                first = first and not row.cells
            elif fewest <= len(row.cells) <= len(header):
                yield line, dict(zip(header, row.cells, strict=False))
            else:
                note(faults, Fault(str(path), line, _wrong_width(row.cells, header)))


def _header(path: Path, columns: Columns, task: Task | None) -> tuple[str, list[str], str | None]:
    """The separator and the column names: by the first usual separator that gives all needed columns.

    If none does, by the one that gives the most columns. A blank file has no names, and neither has a header that cannot be read: then
    the third is its fault.
    """
    found: list[tuple[str, list[str], str | None]] = []
    for separator in SEPARATORS[path.suffix]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            row = next((row for row in table_rows(file, separator) if row.cells or row.fault), TableRow([], 0))
        names = [name.strip() for name in row.cells]
        if names and not columns.missing(names, task):
            return separator, names, None
        found.append((separator, names, row.fault))
    return max(found, key=lambda each: len(each[1]))


def _wrong_width(cells: Sequence[str], header: Sequence[str]) -> str:
    fields = "1 field" if len(cells) == 1 else f"{len(cells)} fields"
    quote = "; quote texts that hold the separator" if len(cells) > len(header) else ""
    return f"has {fields}, but the header has {len(header)}{quote}"


def looks_like_columns(path: Path) -> bool:
    """Whether the first 50 lines of a text file are columns: equally many in each line, and at least 2."""
    lines = [line.split() for line in islice(lines_in(path), 50) if line.strip()]
    return bool(lines) and len({len(columns) for columns in lines}) == 1 and len(lines[0]) >= 2


def _conll_rows(path: Path, columns: Columns, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    """Sentences of lines with columns separated by blanks, first the token, last its tag; a blank line ends a sentence."""
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
    """The lines of a UTF-8 file without their line feeds; other line ends are kept.

    Lines must be shorter than `most` bytes, by default `MOST_LINE_BYTES`.

    Raises:
        UnreadableFrom: at the first line that is not UTF-8 or too long.
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
