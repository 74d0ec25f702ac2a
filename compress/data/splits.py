"""Reads the three splits of a task: from a folder with a file for each, or by the `datasets` library."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from compress.data.columns import USUAL, Columns
from compress.data.datasets_library import is_saved_dataset, is_saved_split, read_datasets
from compress.data.examples import (
    FURTHER_NAMES,
    SPLIT_NAMES,
    SPLITS,
    Example,
    Splits,
    Task,
    are_relations,
    check_task,
    examples_fingerprint,
    is_multi_label,
)
from compress.data.file_formats import SUFFIXES, suffix_of
from compress.data.labelled_files import LabelledFile, faults_of, no_rows, read_file
from compress.data.row_faults import BadRows
from compress.data.teacher_labels import Held, TeacherLabels
from compress.input_errors import Faults
from serve.errors import BadInput

PART = re.compile(
    r"-\d+-of-0*([1-9]\d*)(?:-[0-9a-f]+)?"
)  # train-00000-of-00002.parquet, as the Hub names the parts of a split
SHOWN_NAMES = 10


def read_splits(
    data: str,
    task: Task,
    columns: Columns = USUAL,
    *,
    seed: int = 0,
    revision: str = "",
    train_from: TeacherLabels | None = None,
) -> Splits:
    """The splits under `data`: a folder holding `train.*`, `validation.*`, `test.*`, or a `datasets` name or folder.

    Without a validation file a tenth of train (at least 1 row) is held out, chosen by `seed`. `columns` are the names of the
    columns, `revision` is the branch, tag or commit of a data set on the Hub. Where there is no train split, it is the texts of
    `train_from` with a teacher's answers, less those of the other splits.

    Raises:
        BadInput: the folder or name cannot be opened, a split is missing or has two files, or a column was named that the
            task does not read.
        BadRows: rows have faults, all of which it lists, or a split is empty.
    """
    check_task(task)
    columns.refuse_unused(task)
    folder = Path(data)
    if folder.is_file():
        raise BadInput(
            f"--data is the file {data}; a folder with train, validation and test files is needed. "
            f"Give a folder with train.jsonl, validation.jsonl and test.jsonl (or {', '.join(SUFFIXES[1:])})."
        )
    if revision and folder.is_dir():
        raise BadInput(
            f"--data-revision is {revision}, but --data {data} is a local folder; only data sets of the Hub have revisions. Leave it out."
        )
    check_no_single(folder)
    saved = not folder.is_dir() or is_saved_dataset(folder)
    readers, names = (
        read_datasets(data, task, columns, revision) if saved else (_read_folder(folder, task, columns), [])
    )
    several = [reader for parts in readers.values() for reader in parts]
    faults = faults_of(several)
    faults += [fault for parts in readers.values() for fault in no_rows(parts)]
    if faults:
        raise BadRows(faults)
    needed = ("test",) if train_from else ("train", "test")
    for name in needed:
        if name not in readers:
            remedy = f"It has {_some(names)}; give one that name." if saved else f"{_add(name)}{what_is_in(folder)}"
            raise BadInput(f"--data {data} has no {name} split (found: {', '.join(readers) or 'no split'}). {remedy}")
    found = {name: [example for reader in parts for example in reader.examples] for name, parts in readers.items()}
    answered = train_from is not None and "train" not in found
    if train_from and answered:
        found["train"] = _answered(train_from, [example for examples in found.values() for example in examples])
    held_out = "validation" not in found
    if held_out and len(found["train"]) < 2:
        raise BadInput(
            f"--data {data} has 1 text in train and no validation split. Add texts to train, or a file validation.jsonl."
        )
    if held_out:
        found["train"], found["validation"] = hold_out(found["train"], seed)
    digest = hashlib.sha256()
    for name in SPLITS:
        digest.update(examples_fingerprint(found[name]).encode())
    notes = tuple(note for reader in several for note in reader.notes)
    return Splits(found["train"], found["validation"], found["test"], held_out, digest.hexdigest(), answered, notes)


def split_file(folder: Path, split: str) -> Path | None:
    """The file of `folder` that holds `split`, as `split_files`; None if there is none.

    Raises:
        BadInput: there are several.
    """
    files = split_files(folder, split)
    if len(files) > 1:
        raise BadInput(
            f"{folder} holds {split} in {len(files)} files, {_some([file.name for file in files])}, and one file is read here. Join them."
        )
    return files[0] if files else None


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of `folder` that hold `split`, by any of its names and suffixes, in capitals or not: one, or all of its parts.

    Parts are named as the Hub names them (train-00000-of-00002.parquet), or are the files of a folder with the name of the split.

    Raises:
        BadInput: there are several files, or a part is missing.
    """
    for names in (SPLIT_NAMES[split], FURTHER_NAMES[split]):
        named = [(file, *_named(file)) for file in sorted(folder.iterdir())]
        files = [file for file, name, parts in named if name in names and file.is_file() and not parts]
        parts = [(file, count) for file, name, count in named if name in names and file.is_file() and count]
        folders = [[*_files_in(file)] for file, name, _ in named if name in names and file.is_dir()]
        ways = [[file] for file in files] + [each for each in folders if each]
        ways += [[file for file, _ in parts]] if parts else []
        if len(ways) > 1:
            raise BadInput(
                f"{folder} holds {' and '.join(way[0].relative_to(folder).as_posix() for way in ways)}; {split} needs exactly one file. "
                "Remove the others."
            )
        if parts and len(parts) != parts[0][1]:
            there = _some([file.name for file, _ in parts])
            raise BadInput(
                f"{folder} holds {there}, and by these names {split} has {parts[0][1]} parts. Add the others."
            )
        if ways:
            return ways[0]
    return []


def _named(file: Path) -> tuple[str, int]:
    """The name of a file or folder as that of a split, and of how many parts this one is; 0 for a whole one. Empty for other formats."""
    if file.is_dir():
        return file.name.lower(), 0
    suffix = suffix_of(file)
    if suffix not in (*SUFFIXES, ".txt"):
        return "", 0
    stem = Path(file.stem if file.suffix.lower() == ".gz" else file.name).stem.lower()
    part = PART.search(stem)
    return (stem[: part.start()], int(part[1])) if part and part.end() == len(stem) else (stem, 0)


def _files_in(folder: Path) -> Iterator[Path]:
    return (
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and suffix_of(file) in SUFFIXES and file.name[0] != "."
    )


def check_no_single(folder: Path) -> None:
    """Check that `folder` is not one data set without splits.

    Raises:
        BadInput: it is.
    """
    if is_saved_split(folder):
        raise BadInput(
            f"{folder} holds one data set that `datasets` saved with save_to_disk, without splits. Divide it (train_test_split) and save a "
            "DatasetDict with train and test, or write a file of each split (to_json)."
        )


def _add(name: str) -> str:
    return f"Add a file {name}.jsonl, or one that ends in {', '.join(SUFFIXES[1:-1])} or {SUFFIXES[-1]}."


def what_is_in(folder: Path) -> str:
    """What a folder holds that is not read as a split, as a sentence; empty if there is nothing."""
    used = {file for split in SPLITS for file in split_files(folder, split)}
    names = [file.name + "/" * file.is_dir() for file in sorted(folder.iterdir()) if file not in used]
    names = [name for name in names if name[0] != "."]
    within = next((each for each in sorted(folder.iterdir()) if each.is_dir() and split_files(each, "train")), None)
    hint = f" Give --data {within}, which has splits." if within else ""
    return (
        f" It holds {_some(names)}, which {'is' if len(names) == 1 else 'are'} no split that is read.{hint}"
        if names
        else ""
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _read_folder(folder: Path, task: Task, columns: Columns) -> dict[str, list[LabelledFile]]:
    faults = Faults()
    files = {split: faults.check(partial(split_files, folder, split)) for split in SPLITS}
    faults.raise_if_any()
    return {split: [read_file(file, task, columns) for file in parts] for split, parts in files.items() if parts}


def _answered(teacher: TeacherLabels, others: list[Example]) -> list[Example]:
    """The texts of `teacher` with its answers, less those of the `others`, which are of the other splits.

    Raises:
        BadInput: there is none.
    """
    multi_label = is_multi_label(others)
    teacher.check_kind(multi_label=multi_label, relations=are_relations(others))
    held = Held(others)
    texts = teacher.examples(multi_label=multi_label)
    train = [example for example in texts if example not in held]
    if not train:
        raise BadInput(
            f"All {len(texts)} texts of {teacher.name} are in validation or test, and there is no train split: "
            "nothing is left to train on. Add answers to other texts, or a train split."
        )
    return train


def hold_out(train: list[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """Train without a tenth, and this tenth. Questions about one context stay together."""
    if train[0].answers is not None and len({example.text_pair for example in train}) > 1:
        return _hold_out_contexts(train, seed)
    order = sorted(range(len(train)), key=lambda i: hashlib.sha256(f"{seed}:{i}:{train[i].text}".encode()).digest())
    held = set(order[: max(1, len(train) // 10)])
    return [e for i, e in enumerate(train) if i not in held], [e for i, e in enumerate(train) if i in held]


def _hold_out_contexts(train: list[Example], seed: int) -> tuple[list[Example], list[Example]]:
    questions = Counter(example.text_pair for example in train)
    order = sorted(questions, key=lambda context: hashlib.sha256(f"{seed}:{context}".encode()).digest())
    held: set[str | None] = set()
    left = max(1, len(train) // 10)
    for context in order[:-1]:
        held.add(context)
        left -= questions[context]
        if left <= 0:
            break
    return [e for e in train if e.text_pair not in held], [e for e in train if e.text_pair in held]
