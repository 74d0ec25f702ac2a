"""The labelled examples that a model is scored on."""

from pathlib import Path
from typing import TYPE_CHECKING

from serve.errors import BadInput
from stillroom.verbs.evaluate import Evaluation

if TYPE_CHECKING:
    from compress.data.examples import Example
    from compress.data.task import Task


def examples_of(data: Path, given: Evaluation, task: "Task", notes: list[str] | None = None) -> "list[Example]":
    """The labelled examples of `data`: a file, or the split that is asked for of a folder. `notes` gets what was left out.

    BadInput if it has none.
    """
    from compress.data.columns import columns_of
    from compress.data.datasets_library import is_saved_dataset
    from compress.data.labelled_files import read_examples
    from compress.data.splits import read_splits, split_files

    file, columns = file_of(data, given.split), columns_of(given)
    if file.is_dir() and not is_saved_dataset(file):
        return read_examples(split_files(file, given.split), task, columns, notes)
    if file.is_dir():
        splits = read_splits(str(file), task, columns)
        if given.split == "validation" and splits.held_out:
            raise BadInput(
                f"--data {data} has no validation split. Give another --split, or a file of labelled examples."
            )
        found: list[Example] = getattr(splits, given.split)
        if notes is not None:
            notes.extend(splits.notes)
        return found
    return read_examples(file, task, columns, notes)


def file_of(data: Path, split: str) -> Path:
    """The file of examples: `data` itself, or the file of `split` in the folder `data`; the folder if its split has several files, or
    `datasets` wrote it.
    """
    from compress.data.datasets_library import is_saved_dataset
    from compress.data.file_formats import SUFFIXES
    from compress.data.labelled_files import check_there
    from compress.data.splits import check_no_single, split_files, what_is_in

    if not data.is_dir():
        check_there(data)
        if split != "test":
            raise BadInput(
                f"--split is {split}, and --data {data} is one file. Leave it out, or give a folder of splits."
            )
        return data
    if is_saved_dataset(data):
        return data
    check_no_single(data)
    if files := split_files(data, split):
        return files[0] if len(files) == 1 else data
    raise BadInput(
        f"--data {data} has no file {split} with one of the endings {', '.join(SUFFIXES)}. "
        f"Give another --split, or a file of labelled examples.{what_is_in(data)}"
    )
