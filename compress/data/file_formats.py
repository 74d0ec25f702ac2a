"""The rows of a file, by its suffix: JSON lines, CSV, TSV, parquet, CoNLL columns."""

import codecs
import csv
import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from compress.data.row_faults import Fault, NotText, note
from serve.errors import BadInput

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".conll")


def rows_in(path: Path, suffix: str, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    """Line number and content of each row of a file in the format of `suffix`; rows that do not parse go to `faults`."""
    if suffix == ".conll":
        yield from _conll_rows(path, faults)
    elif suffix == ".parquet":
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path) as file:
                batches = file.iter_batches(batch_size=1_000)
                yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} is not a parquet file: {error}") from None
    elif suffix in (".csv", ".tsv"):
        yield from _table_rows(path, faults)
    else:
        for number, line in enumerate(lines_in(path), 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                note(faults, Fault(str(path), number, f"is not JSON ({error.msg} at column {error.colno})"))


def _table_rows(path: Path, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    for _ in lines_in(path):  # it is UTF-8, or this says where it is not
        pass
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, delimiter="," if path.suffix == ".csv" else "\t")
        try:
            for row in table:
                if None in row:
                    wanted = len(table.fieldnames or ())
                    reason = f"has {wanted + len(row[None])} fields, its header {wanted}: quote a text that holds the separator"
                    note(faults, Fault(str(path), table.line_num, reason))
                else:
                    yield table.line_num, {name: value for name, value in row.items() if value is not None}
        except csv.Error as error:
            reason = f"is not a table from here on ({error}): is a quote left open?"
            faults.append(Fault(str(path), table.line_num, reason))


def looks_like_columns(path: Path) -> bool:
    """Whether the first lines of a text file are columns, of which there are as many in each."""
    lines = [line.split() for line in islice(lines_in(path), 50) if line.strip()]
    return bool(lines) and len({len(columns) for columns in lines}) == 1 and len(lines[0]) >= 2


def _conll_rows(path: Path, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    """Columns separated by blanks: the first is the token, the last its tag; a blank line ends a sentence."""
    tokens: list[str] = []
    tags: list[str] = []
    start = 1
    for number, line in enumerate(chain(lines_in(path), [""]), 1):
        columns = line.split()
        if not columns:
            if tokens:
                yield start, {"tokens": tokens, "tags": tags}
            tokens, tags, start = [], [], number + 1
        elif columns[0] == "-DOCSTART-":
            continue
        elif len(columns) < 2:
            reason = f"has one column ({columns[0]!r}); a token and its tag are needed"
            note(faults, Fault(str(path), number, reason))
        else:
            tokens.append(columns[0])
            tags.append(columns[-1])


def lines_in(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, each without the line feed that ends it; other ends of line stand as they are.

    Raises:
        NotText: at the first line that is not UTF-8.
    """
    position = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            start = position
            position += len(line)
            if start == 0:
                line = line.removeprefix(codecs.BOM_UTF8)  # noqa: PLW2901 - what is read is the line without it
            try:
                yield line.removesuffix(b"\n").decode()
            except UnicodeDecodeError as error:
                at = position - len(line) + error.start
                reason = f"is not UTF-8 text (byte {at} of the file); save the file as UTF-8"
                raise NotText([Fault(str(path), number, reason)]) from None
