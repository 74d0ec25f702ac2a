"""Reads splits by the `datasets` library: from a folder that it saved, or by a name on the Hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.data.columns import Columns
from compress.data.examples import FURTHER_NAMES, SPLIT_NAMES
from compress.data.hub import load_dataset, may_be_on_hub
from compress.data.labelled_files import LabelledFile
from compress.data.row_fields import Fault, UnreadableFrom, class_names, note, with_class_names
from compress.data.task import Task
from serve.errors import BadInput


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` saved splits in `folder`, together or each in a folder of its own."""
    return (folder / "dataset_dict.json").is_file() or any(_saved_splits(folder))


def is_saved_split(folder: Path) -> bool:
    """Whether `folder` is one data set that `datasets` saved, without splits."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _saved_splits(folder: Path) -> Iterator[Path]:
    """The folders in `folder` that `datasets` saved and that have the name of a split."""
    names = {name for each in (SPLIT_NAMES, FURTHER_NAMES) for names in each.values() for name in names}
    return (each for each in folder.iterdir() if each.name.lower() in names and is_saved_split(each))


def read_datasets(
    data: str, task: Task, columns: Columns, revision: str
) -> tuple[dict[str, list[LabelledFile]], list[str]]:
    """The examples and faults of each split, by its name, and the names of all splits that are there.

    Raises:
        BadInput: the folder or the name cannot be opened.
    """
    loaded = _saved_dataset(data) if Path(data).is_dir() else _hub_dataset(data, revision)
    readers: dict[str, list[LabelledFile]] = {}
    for split, names in SPLIT_NAMES.items():
        name = next((name for name in (*names, *FURTHER_NAMES[split]) if name in loaded), None)
        if name is None:
            continue
        reader = LabelledFile(f"{data} ({name})", task, columns)
        readers[split] = [reader]
        rows = loaded[name]
        if reason := columns.fault(rows.column_names, task):
            reader.faults.append(Fault(reader.file, None, reason))
            continue
        try:
            _read_rows(rows, reader)
        except UnreadableFrom as error:
            reader.faults += error.faults
    return readers, [*map(str, loaded)]


def _read_rows(rows: Any, reader: LabelledFile) -> None:
    names = class_names(rows.features.to_dict())
    for number, row in enumerate(rows, 1):
        try:
            named = with_class_names(row, names)
        except ValueError as reason:
            note(reader.faults, Fault(reader.file, number, str(reason)))
        else:
            reader.add(named, number)


def _saved_dataset(folder: str) -> Any:
    import datasets

    try:
        if (Path(folder) / "dataset_dict.json").is_file():
            return {name.lower(): split for name, split in datasets.load_from_disk(folder).items()}
        return {each.name.lower(): datasets.load_from_disk(str(each)) for each in _saved_splits(Path(folder))}
    except Exception as error:
        # `datasets` raises any kind of error about the folder: missing files, or files of a later version.
        raise BadInput(
            f"--data {folder} holds a data set that was saved, but `datasets` cannot open it ({type(error).__name__}: {error}). "
            "Save it again with save_to_disk, or give a folder with train, validation and test files."
        ) from None


def _hub_dataset(name: str, revision: str) -> Any:
    if not may_be_on_hub(name):
        raise BadInput(
            f"--data {name} does not exist. Give a folder with train, validation and test files, or a `datasets` name."
        )
    try:
        return load_dataset(name, revision)
    except LookupError as reason:
        raise BadInput(
            f"--data {name} is neither a local folder nor a data set that can be read from the Hub ({reason}). "
            "Give a folder with train, validation and test files."
        ) from None
