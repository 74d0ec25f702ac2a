"""Splits that the `datasets` library gives: of a folder that it saved, or of a name on the Hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.data.examples import SPLITS, Example, Task
from compress.data.hub import load_dataset, may_be_on_hub
from compress.data.labelled_files import LabelledFile, faults_of
from compress.data.row_faults import Fault
from serve.errors import BadInput


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` saved `folder`."""
    return (folder / "dataset_dict.json").is_file()


def read_datasets(data: str, task: Task) -> tuple[dict[str, list[Example]], list[Fault]]:
    """The examples of each split by its name, and what is wrong with rows."""
    loaded = _saved_dataset(data) if Path(data).is_dir() else _hub_dataset(data)
    readers: dict[str, LabelledFile] = {}
    for name in SPLITS:
        if name not in loaded:
            continue
        readers[name] = reader = LabelledFile(f"{data} ({name})", task)
        named = _class_names(loaded[name].features)
        for number, row in enumerate(loaded[name], 1):
            try:
                reader.add({key: named[key](value) if key in named else value for key, value in row.items()}, number)
            except (ValueError, IndexError, KeyError):
                reader.faults.append(Fault(reader.file, number, "holds a class number that has no name"))
    return {name: reader.examples for name, reader in readers.items()}, faults_of(list(readers.values()))


def _saved_dataset(folder: str) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(folder)
    except Exception as error:
        # Whatever `datasets` raises (files that are missing, or of a version to come) is about the folder given.
        raise BadInput(
            f"--data {folder} holds a dataset_dict.json, and cannot be opened by `datasets` ({type(error).__name__}: {error}). "
            "Save it again with save_to_disk, or give a folder with train, validation and test files."
        ) from None


def _hub_dataset(name: str) -> Any:
    if not may_be_on_hub(name):
        raise BadInput(
            f"--data {name} is not there. Give a folder with train, validation and test files, or a `datasets` name."
        )
    try:
        return load_dataset(name)
    except LookupError as reason:
        raise BadInput(
            f"--data {name} is neither a folder here nor a data set that the Hub gives ({reason}). "
            "Give a folder with train, validation and test files."
        ) from None


def _class_names(features: Any) -> dict[str, Callable[[Any], Any]]:
    """For columns that hold class numbers, the function that turns them into names."""
    named: dict[str, Callable[[Any], Any]] = {}
    for column, feature in features.items():
        if hasattr(feature, "int2str"):
            named[column] = feature.int2str
        elif hasattr(getattr(feature, "feature", None), "int2str"):
            # `int2str` of a list gives the list of names.
            named[column] = feature.feature.int2str
    return named
