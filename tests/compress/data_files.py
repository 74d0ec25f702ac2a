"""Files of examples that tests write, and what is wrong with them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from compress.data.columns import USUAL, Columns
from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
from compress.data.task import Task
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION

TEXT, TOKENS = TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION


def written(path: Path, content: str | bytes) -> Path:
    """The file `path` of these bytes, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines_of(*rows: Any) -> str:
    """JSON lines; a row that is a string is one already."""
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def saved(path: Path, **splits: Iterable[dict[str, Any]]) -> Path:
    """The rows of each split as `datasets` saves them."""
    import datasets

    made = {name: datasets.Dataset.from_list(list(rows)) for name, rows in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(path))
    return path


def faults(path: Path, task: Task = TEXT, columns: Columns = USUAL) -> list[tuple[int | None, str]]:
    """Line and reason of each fault of the file."""
    with pytest.raises(BadRows) as caught:
        read_examples(path, task, columns)  # type: ignore[arg-type]
    assert all(fault.file == str(path) for fault in caught.value.faults)
    return [(fault.line, fault.reason) for fault in caught.value.faults]
