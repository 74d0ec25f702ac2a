"""Reads the three splits of a task: from a folder with a file for each, or by the `datasets` library."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from compress.data.columns import USUAL, Columns
from compress.data.examples import (
    FURTHER_NAMES,
    SPLIT_NAMES,
    SPLITS,
    Example,
    Splits,
    are_relations,
    classes_of,
    examples_fingerprint,
    is_multi_label,
    normalised,
    normalised_text,
    number_of,
)
from compress.data.file_formats import SUFFIXES, suffix_of
from compress.data.hub import is_saved_dataset, is_saved_split, read_datasets
from compress.data.labelled_files import ENTITIES_AS_JSON, LabelledFile, faults_of, no_rows, read_file, read_names
from compress.data.row_fields import BadRows
from compress.data.task import Task
from compress.data.teacher_labels import CachedLabels, TeacherLabels
from compress.input_errors import Faults
from serve.errors import BadInput
from serve.wording import counted

# train-00000-of-00002.parquet, or with a hash behind it: how the Hub names the parts of a split.
PART = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})(?:-[0-9a-f]+)?")
SHOWN_NAMES = 10
HELD_OUT = 0.1  # share of train for validation, where that has no file
APART = 0.25  # share of validation for promises alone
LEAST_CHOSEN_ON = 300  # texts that this leaves for choices
HALF = 0.5


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
    `train_from` with a teacher's answers, less those of the other splits. Raises BadInput: the folder or name cannot be opened, a
    split is missing or has two files, or a column was named that the task does not read. BadRows: rows have faults, all of which
    it lists, or a split is empty.
    """
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
    read_names(several)
    faults = faults_of(several)
    faults += [fault for parts in readers.values() for fault in no_rows(parts)]
    if faults:
        raise BadRows(faults)
    needed = ("test",) if train_from else ("train", "test")
    for name in needed:
        if name not in readers:
            divide = "give one that name, or divide one by train_test_split"
            add = f"Add a file {name}.jsonl, or one that ends in {', '.join(SUFFIXES[1:-1])} or {SUFFIXES[-1]}."
            remedy = f"It has {_some(names)}; {divide}." if saved else f"{add}{what_is_in(folder)}"
            raise BadInput(f"--data {data} has no {name} split (found: {', '.join(readers) or 'no split'}). {remedy}")
    found = {name: [example for reader in parts for example in reader.examples] for name, parts in readers.items()}
    answered = train_from is not None and "train" not in found
    if train_from and answered:
        found["train"] = _answered(train_from, [example for examples in found.values() for example in examples])
    notes = [note for reader in several for note in reader.notes]
    packed = [] if saved else [reader.file for reader in several if Path(f"{reader.file}.gz").is_file()]
    notes += [f"{file}.gz is not read, since {Path(file).name} is beside it." for file in packed]
    return splits_of(found, data, seed, answered=answered, notes=notes)


def splits_of(
    found: dict[str, list[Example]], data: str, seed: int, *, answered: bool = False, notes: Sequence[str] = ()
) -> Splits:
    """The splits `found` in `data` by name; where there is none for validation, a part of train is held out.

    Raises BadInput: train has one text, however often, and validation none.
    """
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
    return Splits(
        found["train"], found["validation"], found["test"], held_out, digest.hexdigest(), answered, tuple(notes)
    )


def split_file(folder: Path, split: str) -> Path | None:
    """The file of `folder` that holds `split`, as `split_files`; None if there is none. Raises BadInput: there are several."""
    files = split_files(folder, split)
    if len(files) > 1:
        raise BadInput(
            f"{folder} holds {split} in {len(files)} files, {_some([file.name for file in files])}, and one file is read here. Join them."
        )
    return files[0] if files else None


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of `folder` that hold `split`, by any of its names and suffixes, in capitals or not: one, or all of its parts.

    Parts are named as the Hub names them (train-00000-of-00002.parquet); or where no file holds train, they are those of a folder
    with a usual name of the split. Of a file and the same packed with gzip the first is read. Raises BadInput: there are several
    files, or a part is missing.
    """
    there = _unpacked_first(folder)
    named = [(file, *_split_and_part(file)) for file in there if file.is_file()]
    for names in (SPLIT_NAMES[split], FURTHER_NAMES[split]):
        if found := _whole_or_parts(folder, split, [(file, part) for file, name, part in named if name in names]):
            return found
        if names is SPLIT_NAMES[split] and not any(name in SPLIT_NAMES["train"] for _, name, _ in named):
            within = [each for each in there if each.is_dir() and each.name.lower() in names]
            if found := [file for each in within for file in _rows_in(each, split)]:
                return found
    return []


def _unpacked_first(folder: Path) -> list[Path]:
    """What is in a folder, less files packed with gzip beside the same unpacked."""
    there = sorted(folder.iterdir())
    return [file for file in there if file.suffix.lower() != ".gz" or file.with_suffix("") not in there]


def _whole_or_parts(folder: Path, what: str, files: Sequence[tuple[Path, tuple[int, int] | None]]) -> list[Path]:
    """The one whole file among `files` of `folder`, or all parts of `what`.

    Raises BadInput: there are several files, or a part is missing.
    """
    whole = [file for file, part in files if not part]
    parts = [(file, part) for file, part in files if part]
    if len(whole) + bool(parts) > 1:
        several = [file.name for file in (*whole, *(file for file, _ in parts[:1]))]
        raise BadInput(f"{folder} holds {' and '.join(several)}; {what} needs exactly one file. Remove the others.")
    if not parts:
        return whole
    count = parts[0][1][1]
    if {part[1] for _, part in parts} - {count} or not len(parts) == len({part for _, part in parts}) == count:
        there = {part for _, part in parts}
        name = parts[0][0].name.rsplit("-of-", 1)[0].rsplit("-", 1)[0]
        lacks = list(
            islice((f"{name}-{i:05}-of-{count:05}" for i in range(count) if (i, count) not in there), SHOWN_NAMES)
        )
        raise BadInput(
            f"{folder} holds {_some([file.name for file, _ in parts])}, and by these names {what} has {count} parts. "
            + (f"Add {', '.join(lacks)}." if lacks else "Remove the others.")
        )
    return [file for file, _ in parts]


def _split_and_part(file: Path) -> tuple[str, tuple[int, int] | None]:
    """The name of a file as that of a split, and which part it is, of how many; None for a whole one. No name for other formats."""
    if suffix_of(file) not in (*SUFFIXES, ".txt"):
        return "", None
    stem = Path(file.stem if file.suffix.lower() == ".gz" else file.name).stem.lower()
    part = PART.fullmatch(stem)
    return (part[1], (int(part[2]), int(part[3]))) if part else (stem, None)


def _rows_in(folder: Path, split: str) -> list[Path]:
    """The files of rows in the folder of a split: of each name one, or all of its parts. BadInput as `split_files`."""
    named: dict[str, list[tuple[Path, tuple[int, int] | None]]] = {}
    for each in _unpacked_first(folder):
        if each.is_file() and suffix_of(each) in SUFFIXES and each.name[0] != ".":
            name, part = _split_and_part(each)
            named.setdefault(name, []).append((each, part))
    return sorted(file for name, files in named.items() for file in _whole_or_parts(folder, f"{split}/{name}", files))


def check_no_single(folder: Path) -> None:
    """Check that `folder` is not one data set without splits. Raises BadInput: it is."""
    if is_saved_split(folder):
        raise BadInput(
            f"{folder} holds one data set that `datasets` saved with save_to_disk, without splits. Divide it (train_test_split) and save a "
            "DatasetDict with train and test, or write a file of each split (to_json)."
        )


def what_is_in(folder: Path) -> str:
    """What a folder without the split that is looked for holds, as a sentence; empty if there is nothing else than other splits."""
    used = {file for split in SPLITS for file in _split_files_if_any(folder, split)}
    other = [each for each in sorted(folder.iterdir()) if each not in used and each.name[0] != "."]
    if not other:
        return ""
    within = [each for each in other if each.is_dir() and _split_files_if_any(each, "train")]
    hint = f" Give --data {within[0]}, which has splits." if within else ""
    if {each.suffix for each in other} & {".ann", ".spacy"}:
        hint = f" Files of brat and spaCy are not read. {ENTITIES_AS_JSON}"
    names = _some([each.name + "/" * each.is_dir() for each in other])
    return f" It holds {names}, which {'are' if other[1:] else 'is'} no split that is read.{hint}"


def _split_files_if_any(folder: Path, split: str) -> list[Path]:
    try:
        return split_files(folder, split)
    except (BadInput, OSError):
        return []


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

    Raises BadInput: there is none.
    """
    multi_label = is_multi_label(others)
    teacher.check_kind(multi_label=multi_label, relations=are_relations(others))
    held = CachedLabels(others)
    texts = teacher.examples(multi_label=multi_label)
    train = [example for example in texts if example not in held]
    if not train:
        raise BadInput(
            f"All {len(texts)} texts of {teacher.name} are in validation or test, and there is no train split: "
            "nothing is left to train on. Add answers to other texts, or a train split."
        )
    return train


def hold_out(train: list[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """Train without a tenth, and this tenth, as `parts_of` chooses it. Raises BadInput: there is only one text, however often."""
    held = parts_of(train, (1 - HELD_OUT, HELD_OUT), seed) == 1
    if not held.any() or held.all():
        raise BadInput(
            f"All {len(train):,} rows of train have one text, and there is no validation split. Add texts to train, or a file "
            "validation.jsonl."
        )
    return [e for e, out in zip(train, held, strict=True) if not out], [
        e for e, out in zip(train, held, strict=True) if out
    ]


def set_apart(splits: Splits, seed: int) -> Splits:
    """`splits` with a quarter of validation in `apart`; as they are where that leaves validation fewer than `LEAST_CHOSEN_ON` texts.

    Of the quarter, texts that train or test has too are left out; if it has no others, the splits are as they are too.
    """
    quarter = parts_of(splits.validation, (1 - APART, APART), seed) == 1
    known = {normalised(example) for example in (*splits.train, *splits.test)}
    apart = [e for e, ours in zip(splits.validation, quarter, strict=True) if ours and normalised(e) not in known]
    if not apart or (~quarter).sum() < LEAST_CHOSEN_ON:
        return splits
    return replace(
        splits,
        validation=[e for e, ours in zip(splits.validation, quarter, strict=True) if not ours],
        apart=apart,
        fingerprint=hashlib.sha256(f"{splits.fingerprint} {examples_fingerprint(apart)}".encode()).hexdigest(),
        notes=(
            *splits.notes,
            f"{counted(len(apart), 'text of validation is', 'texts of validation are')} set apart for promises: nothing else reads them.",
        ),
    )


def parts_of(examples: Sequence[Example], shares: Sequence[float], seed: int) -> np.ndarray:
    """The part (from 0) of each example, (examples,), at random by `seed`.

    Examples with one text (`normalised_text`), or with one context if they are questions, share a part. Each part gets its share of every
    class or range of numbers, to the nearest text. Where the first share is more than a half, as that of train, the first part has every
    label.

    Args:
        examples: all of one kind.
        shares: of each part; they sum to 1.
        seed: two seeds give two divisions.
    """
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(_group_names(examples)):
        groups.setdefault(name, []).append(i)
    labels = {name: {label for i in group for label in _labels_of(examples[i])} for name, group in groups.items()}
    texts = Counter(label for each in labels.values() for label in each)
    numbers = isinstance(examples[0].label, float)

    def place(name: str) -> tuple[float, str, bytes]:
        drawn = hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogatepass")).digest()
        if numbers:
            return sum(number_of(examples[i]) for i in groups[name]) / len(groups[name]), "", drawn
        rarest = min(labels[name], key=lambda label: (texts[label], label), default="")
        return texts[rarest], rarest, drawn

    parts = np.zeros(len(examples), dtype=np.int64)
    filled, known = np.zeros(len(shares)), set[str]()
    order = sorted(groups, key=place)
    for number, name in enumerate(order):
        # The part that lacks most of its share of the texts until here: of one class after the other, so of each class too.
        lacking = np.asarray(shares) * (filled.sum() + len(groups[name])) - filled
        part = int(lacking.argmax())
        if HALF < shares[0] < 1:
            none_yet = number and number == len(order) - 1 and not filled[1:].any()
            part = 1 if none_yet else part if labels[name] <= known or numbers else 0
            known |= labels[name] if part == 0 else set()
        filled[part] += len(groups[name])
        parts[groups[name]] = part
    return parts


def _group_names(examples: Sequence[Example]) -> list[str]:
    """What examples of one group have in common."""
    first = examples[0]
    if first.answers is not None and len({example.text_pair for example in examples}) > 1:
        return [normalised_text(example.text_pair or "") for example in examples]
    if first.answers is None and first.label is None and first.entities is None:  # the second text is to be generated
        return [normalised_text(example.text) for example in examples]
    # Relations of one sentence differ in what is marked alone.
    return [f"{normalised_text(example.text)}\0{normalised_text(example.text_pair or '')}" for example in examples]


def _labels_of(example: Example) -> set[str]:
    """The names of its classes, or of what its entities are."""
    if example.entities is not None:
        return {entity.label for entity in example.entities}
    return set() if example.label is None or isinstance(example.label, float) else {*classes_of(example)}
