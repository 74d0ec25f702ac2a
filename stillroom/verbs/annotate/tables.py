"""The answers of `annotate` as a parquet file, or the vectors as a numpy array, made from its lines.

The lines stay beside the table as OUTPUT.rows.jsonl, so that a stopped run, or one whose input has grown, goes on there.
"""

import base64
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np

from serve.bundle.manifest import Manifest
from serve.errors import BadInput
from serve.files import disk_errors_reported, replacing
from serve.tasks import task_of

if TYPE_CHECKING:
    import pyarrow as pa

ARRAY, TABLE = ".npy", ".parquet"
SUFFIXES = (ARRAY, TABLE)
ROWS = 4096  # of one group of the parquet file, and read at once
ERROR = "error"


def rows_beside(output: Path) -> Path:
    """The file of lines that `output` is made from."""
    return output.with_name(f"{output.name}.rows.jsonl")


def write_array(rows: Path, out: Path, field: str, width: int, count: int) -> None:
    """The vectors in `field` of `rows` as the file `out`, float32 (rows, width); rows of NaN where there is an error.

    Raises:
        BadInput: the disk is full.
    """
    with _replacing(out) as partial:
        array = np.lib.format.open_memmap(partial, mode="w+", dtype="<f4", shape=(count, width))
        for place, row in enumerate(_read(rows)):
            array[place] = _numbers(row[field]["embedding"]) if ERROR not in row else np.nan
        array.flush()
        del array


def write_table(rows: Path, out: Path, field: str, manifest: Manifest, source: Path) -> None:
    """The rows and their answers as the parquet file `out`: the columns of the input, and the answer's under `field`.

    Columns of a parquet input keep their types. Those of other files get the type that all of their values have. Where a row has an
    error, its answer is null and the column `error` has the message.

    Raises:
        BadInput: a column has values of types that do not fit together, the input has changed meanwhile, or the disk is full.
    """

    with_errors = any(ERROR in row and field not in row for row in _read(rows))
    schema = None if source.suffix.lower() == TABLE else _schema_of(rows, field)
    groups = (
        (
            columns,
            [row.get(field) for row in read],
            [row[ERROR]["message"] if field not in row else None for row in read],
        )
        for columns, read in _groups(rows, field, schema, source)
    )
    with _replacing(out) as partial:
        write_groups(partial, groups, field, manifest, with_errors=with_errors)


def write_groups(
    path: Path,
    groups: "Iterable[tuple[pa.Table, Sequence[dict[str, Any] | None], Sequence[str | None]]]",
    field: str,
    manifest: Manifest,
    *,
    with_errors: bool,
) -> int:
    """Writes groups of rows as the parquet file `path`: their columns, a column of their answers, and perhaps one of their errors.

    Returns how many rows there are. An answer is JSON; a vector is base64 in it, and a list of float32 in the column.
    """
    import pyarrow as pa
    from pyarrow import parquet

    kind = pa.list_(pa.float32()) if manifest.vector_width else _arrow_type(task_of(manifest).answer_type)
    writer, count = None, 0
    try:
        for columns, answers, errors in groups:
            held = [each and _numbers(each["embedding"]) for each in answers] if manifest.vector_width else answers
            table = columns.append_column(field, pa.array(held, kind))
            table = table.append_column(ERROR, pa.array(errors, pa.string())) if with_errors else table
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
            count += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return count


def _groups(
    rows: Path, field: str, schema: "pa.Schema | None", source: Path
) -> "Iterator[tuple[pa.Table, list[dict[str, Any]]]]":
    """Groups of rows: their columns but the answer, and the rows."""
    import pyarrow as pa
    from pyarrow import parquet

    read = _read(rows)
    if schema is None:
        with parquet.ParquetFile(source) as file:
            if not file.metadata.num_rows:
                yield file.schema_arrow.empty_table(), []
            for batch in file.iter_batches(batch_size=ROWS):
                group = list(itertools.islice(read, batch.num_rows))
                if len(group) < batch.num_rows:
                    raise BadInput(f"{source} was changed while it was annotated; give the same command again")
                yield pa.Table.from_batches([batch]), group
        return
    empty = True
    while group := list(itertools.islice(read, ROWS)):
        empty = False
        yield pa.Table.from_pylist([_without(row, field) for row in group], schema), group
    if empty:
        yield pa.Table.from_pylist([], schema), []


def _schema_of(rows: Path, field: str) -> "pa.Schema":
    """The schema that all rows fit, without the answer."""
    import pyarrow as pa

    found = pa.schema([])
    read = _read(rows)
    while group := [_without(row, field) for row in itertools.islice(read, ROWS)]:
        names = list(dict.fromkeys(name for row in group for name in row))
        try:
            columns = [pa.array([row.get(name) for row in group]) for name in names]
            part = pa.schema([pa.field(name, column.type) for name, column in zip(names, columns, strict=True)])
            found = pa.unify_schemas([found, part], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise BadInput(
                f"the rows cannot be columns of one table ({error}); give --output a name that ends in .jsonl, or values of one type in "
                "each field"
            ) from None
    return found


def _arrow_type(kind: Any) -> "pa.DataType":
    """The type of a column with values of `kind`: a TypedDict, a list, a plain type, or one of these or None."""
    import pyarrow as pa

    plain = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    if kind in plain:
        return plain[kind]
    if is_typeddict(kind):
        fields = sorted(get_type_hints(kind).items(), key=lambda field: field[0] == "truncated")  # the last one
        return pa.struct([(name, _arrow_type(each)) for name, each in fields])
    inner = next(each for each in get_args(kind) if each is not type(None))
    return pa.list_(_arrow_type(inner)) if get_origin(kind) is list else _arrow_type(inner)


def _numbers(vector: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(vector), dtype="<f4")


def _without(row: dict[str, Any], field: str) -> dict[str, Any]:
    """The row as it was read: without its answer, and of a row with an error nothing, as the line holds nothing of it."""
    return {name: value for name, value in row.items() if name != field} if field in row else {}


def _read(rows: Path) -> Iterator[dict[str, Any]]:
    with rows.open("rb") as file:
        for line in file:
            yield json.loads(line)


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """As `replacing`, with a message to the user where the disk refuses."""
    with disk_errors_reported(out, otherwise="give another file as --output"), replacing(out) as beside:
        yield beside
