"""The labelled examples that a model is scored on."""

from pathlib import Path
from typing import TYPE_CHECKING

from serve.errors import BadInput
from stillroom.settings.evaluate import Evaluation

if TYPE_CHECKING:
    from compress.data.examples import Example, Task


def examples_of(data: Path, given: Evaluation, task: "Task") -> "list[Example]":
    """The labelled examples of `data`: a file, or the split that is asked for of a folder. BadInput if it has none."""
    from compress.data.columns import columns_of
    from compress.data.labelled_files import read_examples
    from compress.data.splits import read_splits

    file, columns = file_of(data, given.split), columns_of(given)
    if file.is_dir():
        splits = read_splits(str(file), task, columns)
        if given.split == "validation" and splits.held_out:
            raise BadInput(
                f"--data {data} has no validation split. Give another --split, or a file of labelled examples."
            )
        found: list[Example] = getattr(splits, given.split)
        return found
    return read_examples(file, task, columns)


def file_of(data: Path, split: str) -> Path:
    """The file of examples: `data` itself, or the file of `split` in the folder `data`; the folder itself if `datasets` wrote it."""
    from compress.data.datasets_library import is_saved_dataset
    from compress.data.file_formats import SUFFIXES
    from compress.data.labelled_files import check_there
    from compress.data.splits import split_file

    if not data.is_dir():
        check_there(data)
        if split != "test":
            raise BadInput(
                f"--split is {split}, and --data {data} is one file. Leave it out, or give a folder of splits."
            )
        return data
    if is_saved_dataset(data):
        return data
    if file := split_file(data, split):
        return file
    raise BadInput(
        f"--data {data} has no file {split} with one of the endings {', '.join(SUFFIXES)}. "
        "Give another --split, or a file of labelled examples."
    )
