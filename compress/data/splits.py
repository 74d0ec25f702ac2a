"""The three splits of a task: a folder with a file each, or what the `datasets` library gives."""

import hashlib
from pathlib import Path

from compress.data.datasets_library import is_saved_dataset, read_datasets
from compress.data.examples import SPLITS, Example, Splits, Task, check_task, examples_fingerprint
from compress.data.file_formats import SUFFIXES
from compress.data.labelled_files import LabelledFile, faults_of, read_file
from compress.data.row_faults import BadRows, Fault
from serve.errors import BadInput


def read_splits(data: str, task: Task, *, seed: int = 0) -> Splits:
    """The splits under `data`: a folder holding `train.*`, `validation.*`, `test.*`, or a `datasets` name or folder.

    Without a validation file a tenth of train (at least one row) is held out, chosen by `seed`.

    Raises:
        BadInput: the folder or name cannot be opened, or a split is missing.
        BadRows: rows that cannot be read, all of them, or an empty split.
    """
    check_task(task)
    folder = Path(data)
    if folder.is_file():
        raise BadInput(
            f"--data is the file {data}; a folder holding train, validation and test files is needed. "
            f"Give its folder, with files named train.jsonl, validation.jsonl, test.jsonl (or {', '.join(SUFFIXES[1:])})."
        )
    if folder.is_dir() and not is_saved_dataset(folder):
        found, faults = _read_folder(folder, task)
    else:
        found, faults = read_datasets(data, task)
    for name in ("train", "test"):
        if name not in found:
            raise BadInput(
                f"--data {data} has no {name} split (found: {', '.join(found) or 'none'}). "
                f"Add a file {name}.jsonl, or one ending in {', '.join(SUFFIXES[1:])}."
            )
    faults += [Fault(f"{data} ({name})", None, "is empty: it holds no rows") for name in found if not found[name]]
    if faults:
        raise BadRows(faults)
    held_out = "validation" not in found
    if held_out and len(found["train"]) < 2:
        raise BadInput(
            f"--data {data} has one text in train and no validation split; more texts are needed, or a file validation.jsonl."
        )
    if held_out:
        found["train"], found["validation"] = _hold_out(found["train"], seed)
    digest = hashlib.sha256()
    for name in SPLITS:
        digest.update(examples_fingerprint(found[name]).encode())
    return Splits(found["train"], found["validation"], found["test"], held_out, digest.hexdigest())


def _read_folder(folder: Path, task: Task) -> tuple[dict[str, list[Example]], list[Fault]]:
    readers: dict[str, LabelledFile] = {}
    for name in SPLITS:
        files = [folder / f"{name}{suffix}" for suffix in (*SUFFIXES, ".txt")]
        files = [path for path in files if path.is_file()]
        if len(files) > 1:
            raise BadInput(
                f"{folder} holds {' and '.join(f.name for f in files)}: one file a split is needed. Remove one."
            )
        if files:
            readers[name] = reader = read_file(files[0], task)
            if not reader.examples and not reader.faults:
                reader.faults.append(Fault(str(files[0]), None, "is empty: it holds no rows"))
    if faults := faults_of(list(readers.values())):
        raise BadRows(faults)
    return {name: reader.examples for name, reader in readers.items()}, []


def _hold_out(train: list[Example], seed: int) -> tuple[list[Example], list[Example]]:
    order = sorted(range(len(train)), key=lambda i: hashlib.sha256(f"{seed}:{i}:{train[i].text}".encode()).digest())
    held = set(order[: max(1, len(train) // 10)])
    return [e for i, e in enumerate(train) if i not in held], [e for i, e in enumerate(train) if i in held]
