"""Downloads models and data sets from the Hub, after one request that checks the name.

The Hub's library repeats a failing request 6 times over 30 s and logs each, and neither can be configured. So this module
sends one request first; if that fails, only the library's cache is read.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

from compress import distributed
from compress.data.columns import Columns
from compress.data.examples import FURTHER_NAMES, SPLIT_NAMES
from compress.data.labelled_files import LabelledFile
from compress.data.row_fields import Fault, UnreadableFrom, class_names, note, with_class_names
from compress.data.task import Task
from serve.errors import BadInput

log = logging.getLogger("compress")

Kind = Literal["model", "dataset"]

HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
COMMIT = re.compile("[0-9a-f]{7,40}")
ASK_S = 10.0  # timeout of the first request
CALLED: dict[Kind, str] = {"model": "model", "dataset": "data set"}
OFFLINE = "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set, and the local cache does not hold it"
LIBRARIES = ("huggingface_hub", "datasets")


def may_be_on_hub(name: str) -> bool:
    """Whether `name`, which is no local path, may be on the Hub: `owner/name`, or an old name without an owner.

    Names that look like paths are not sent to the Hub: a bare name with a dot, a separator at either end, or a name below an
    existing folder.
    """
    first, separator, _ = name.partition("/")
    if not HUB_NAME.fullmatch(name):
        return False
    return not Path(first).exists() if separator else "." not in name


@cache  # a found model is looked up once; errors are not cached
def download_model(name: str, revision: str = "") -> Path:
    """The folder of the Hub's model `name`, downloaded now or before.

    `revision` is a branch, tag or commit; empty for the main branch. Private models need `HF_TOKEN` or a saved login. Raises
    LookupError: neither the Hub nor the local cache has it; the message gives the reason.
    """
    from huggingface_hub import snapshot_download

    missed = _ask(name, "model", revision)
    with _quiet():
        try:
            return Path(
                snapshot_download(
                    name,
                    revision=revision or None,
                    allow_patterns=["*.json", "*.txt", "*.safetensors", "*.model"],
                    local_files_only=bool(missed),
                )
            )
        except Exception as error:
            # The library raises any kind of error about the name.
            raise LookupError(missed or _in_words(error)) from None


def load_dataset(name: str, revision: str = "") -> Any:
    """The splits of the Hub's data set `name` by name, downloaded now or before.

    `revision` is a branch, tag or commit. Private data sets need `HF_TOKEN` or a saved login. Raises LookupError: neither the Hub
    nor the local cache has it; the message gives the reason.
    """
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE  # HF_DATASETS_OFFLINE sets it as well
    missed = OFFLINE if offline else _ask(name, "dataset", revision)
    with _quiet():
        try:
            datasets.config.HF_HUB_OFFLINE = offline or bool(missed)
            splits = datasets.load_dataset(name, revision=revision or None)
        except Exception as error:
            # The library raises any kind of error about the name: a broken cache, unknown files.
            raise LookupError(missed or _in_words(error)) from None
        finally:
            datasets.config.HF_HUB_OFFLINE = offline
    # Without the Hub, the library gives whichever revision its cache has. The addresses of the files that it read have their commit.
    if missed and revision and not all(f"@{revision}" in address for address in _addresses(splits)):
        held = (
            "has another revision"
            if COMMIT.fullmatch(revision)
            else f"names its data by commits: give the commit of {revision}"
        )
        raise LookupError(f"{missed}; the local cache {held}")
    return splits


def _addresses(splits: Any) -> list[str]:
    """Where the files of `splits` were read from, as `hf://datasets/NAME@COMMIT/FILE`; `[""]` where that is not known."""
    return [address for each in splits.values() for address in each.info.download_checksums or {}] or [""]


def _ask(name: str, kind: Kind, revision: str = "") -> str:
    """Why the Hub does not provide `name`, as text; empty if it does."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        return OFFLINE
    if distributed.main():
        # A warning, so that it is seen where a program has set up no logging.
        log.warning("%s is not a local folder; looking for a %s of that name on the Hub.", name, CALLED[kind])
    try:
        HfApi().repo_info(name, revision=revision or None, repo_type=kind, timeout=ASK_S)
    except RepositoryNotFoundError:
        return "the Hub has none of that name that you may read"
    except RevisionNotFoundError:
        return f"the Hub has no revision {revision} of that name"
    except Exception as error:
        # Any other failure: no network, a proxy, a certificate, a name that the library does not accept.
        return f"the Hub does not answer, {_in_words(error)}"
    return ""


def _in_words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which the libraries log nothing; their exceptions carry the same text."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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

    Raises BadInput: the folder or the name cannot be opened.
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
