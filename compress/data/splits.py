"""Reads the three splits of a task: from a folder with a file for each, or by the `datasets` library."""

import hashlib
from collections import Counter
from functools import partial
from pathlib import Path

from compress.data.columns import USUAL, Columns
from compress.data.datasets_library import is_saved_dataset, read_datasets
from compress.data.examples import (
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
from compress.data.file_formats import SAME, SUFFIXES
from compress.data.labelled_files import LabelledFile, faults_of, read_file, read_names
from compress.data.row_faults import BadRows, Fault
from compress.data.teacher_labels import Held, TeacherLabels
from compress.input_errors import Faults
from serve.errors import BadInput


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
    if folder.is_dir() and not is_saved_dataset(folder):
        readers = _read_folder(folder, task, columns)
    else:
        readers = read_datasets(data, task, columns, revision)
    read_names(list(readers.values()))
    faults = faults_of(list(readers.values()))
    faults += [
        Fault(reader.file, None, "is empty: it holds no rows")
        for reader in readers.values()
        if not reader.examples and not reader.faults
    ]
    if faults:
        raise BadRows(faults)
    needed = ("test",) if train_from else ("train", "test")
    for name in needed:
        if name not in readers:
            raise BadInput(
                f"--data {data} has no {name} split (found: {', '.join(readers) or 'no split'}). "
                f"Add a file {name}.jsonl, or one that ends in {', '.join(SUFFIXES[1:-1])} or {SUFFIXES[-1]}."
            )
    found = {name: reader.examples for name, reader in readers.items()}
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
    return Splits(found["train"], found["validation"], found["test"], held_out, digest.hexdigest(), answered)


def split_file(folder: Path, split: str) -> Path | None:
    """The file of `folder` that holds `split`, by any of its names and suffixes; None if there is none.

    Raises:
        BadInput: there are several.
    """
    named = [folder / f"{name}{suffix}" for name in SPLIT_NAMES[split] for suffix in (*SUFFIXES, *SAME, ".txt")]
    files = [path for path in named if path.is_file()]
    if len(files) > 1:
        raise BadInput(
            f"{folder} holds {' and '.join(file.name for file in files)}; {split} needs exactly one file. Remove the others."
        )
    return files[0] if files else None


def _read_folder(folder: Path, task: Task, columns: Columns) -> dict[str, LabelledFile]:
    faults = Faults()
    files = {split: faults.check(partial(split_file, folder, split)) for split in SPLITS}
    faults.raise_if_any()
    return {split: read_file(file, task, columns) for split, file in files.items() if file}


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
