"""The texts that `profile` times, scores and calibrates on: a file, a folder of splits, or generated messages."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from compress.data.columns import USUAL, Columns
from compress.data.examples import Example, check_kind, clusters_of
from compress.data.file_formats import rows_in, suffix_of
from compress.data.labelled_files import read_examples
from compress.data.sampler import subset
from compress.data.splits import split_file
from compress.data.task import Task
from compress.data.texts import read_texts
from compress.models.configurations import LONGEST_TEXT
from compress.tasks import LABELLED, task_named
from latency.measure.interleave import Progress, Worker
from serve.errors import BadInput
from serve.text.entity_markers import knows_markers
from serve.text.tokenizer import load_tokenizer

TIMED_TEXTS = 1_000  # at most; all texts are scored
CALIBRATION_TEXTS = 128  # for int8 graphs that are made only for timing
SAMPLE_TEXTS = 400  # of the built-in sample

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Given:
    """The texts that are timed and scored."""

    texts: list[str | tuple[str, str]]
    source: str
    calibration: list[str]
    """Texts that a checkpoint's int8 graph is calibrated on."""
    examples: list[Example] | None
    """With labels, one for each text, in the order of the file; None: without."""
    notes: list[str]
    calibrated_apart: bool
    """Whether `calibration` is a split of its own."""
    places: tuple[int, ...] = ()
    """The index of each text in the file, once an order is drawn."""

    @property
    def plain(self) -> list[str]:
        """The texts without their pairs."""
        return [text if isinstance(text, str) else text[0] for text in self.texts]

    def drawn(self, seed: int) -> "Given":
        """The same with the timed texts first, in random order, and at most CALIBRATION_TEXTS to calibrate on.

        Both are drawn with `seed`, since a file may be sorted by label or length.
        """
        timed = subset(range(len(self.texts)), TIMED_TEXTS, seed)
        random.Random(seed).shuffle(timed)
        first = set(timed)
        places = (*timed, *(place for place in range(len(self.texts)) if place not in first))
        return replace(
            self,
            texts=[self.texts[place] for place in places],
            calibration=subset(self.calibration, CALIBRATION_TEXTS, seed),
            places=places,
        )

    def as_in_the_file(self, answers: Sequence[Answer]) -> list[Answer]:
        """Answers to `texts`, in the order of the file and of `examples`."""
        return [answers[i] for i in sorted(range(len(self.places)), key=self.places.__getitem__)]


def given_texts(data: str, task: str | None, columns: Columns = USUAL) -> Given:
    """The texts of the file `data`, or of the test split in the folder `data`, with labels where it has them.

    int8 graphs made only for timing are calibrated on the folder's train split, else on the texts themselves. Without
    `data`, the texts are generated messages to a shop's support. BadInput for a file without texts.
    """
    if not data:
        from stillroom.inputs.sample_texts.messages import support_messages

        seen: set[str] = set()
        texts = [message["text"] for message in support_messages("test", SAMPLE_TEXTS, 0, seen)]
        train = [message["text"] for message in support_messages("train", SAMPLE_TEXTS, 0, seen)]
        note = "No --data was given: the texts are generated messages to a shop's support, so there is no metric."
        return Given(list(texts), "generated support messages", train, None, [note], calibrated_apart=True)
    path = Path(data)
    folder, file = (path, _split(path, "test")) if path.is_dir() else (None, path)
    examples, notes = _labelled(file, task, columns)
    texts_or_pairs: list[str | tuple[str, str]] = (
        [example.text_or_pair for example in examples] if examples else list(read_texts(file, columns))
    )
    if folder:
        to_calibrate = _split(folder, "train")
        labelled, _ = _labelled(to_calibrate, task, columns)
        calibration = [example.text_read for example in labelled] if labelled else read_texts(to_calibrate, columns)
    else:
        calibration = [text if isinstance(text, str) else text[0] for text in texts_or_pairs]
    return Given(texts_or_pairs, file.name, calibration, examples, notes, calibrated_apart=folder is not None)


def _split(folder: Path, name: str) -> Path:
    found = split_file(folder, name)
    if not found:
        raise BadInput(f"--data {folder} has no file {name}.*; give a folder of splits, or one file.")
    return found


def _labelled(file: Path, task: str | None, columns: Columns) -> tuple[list[Example] | None, list[str]]:
    """The examples of `file` if it has labels for `task`, else a note why there is no metric."""
    if task is None:
        return None, ["The models do not share one task, so there is no metric."]
    if task not in LABELLED:
        return None, ["Vectors have no labels, so there is no metric; `stillroom evaluate --teacher` compares them."]
    notes: list[str] = []
    try:
        examples = read_examples(file, LABELLED[task], columns, notes)
    except BadInput as error:
        if suffix_of(file) == ".txt":
            return None, [f"No metric: {file.name} is plain text."]
        # If a column was named or the first row has labels, missing labels are an error and not a file without labels.
        if columns != USUAL or not _lacks_labels(file, LABELLED[task]):
            raise
        return None, [f"No metric: {file.name} has no labels for {task} ({error.message.splitlines()[-1].strip()})."]
    return examples, notes


def _lacks_labels(file: Path, task: Task) -> bool:
    """Whether the first row of `file` lacks a field that `task` needs."""
    for _, row in rows_in(file, suffix_of(file), USUAL, None, []):
        return isinstance(row, dict) and bool(USUAL.missing([*row], task))
    return True


def metrics_of(
    workers: Mapping[str, Worker], given: Given, progress: Progress
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The task metric of every candidate that reads text, from the answers of its timed process.

    And by name why there is no metric, for candidates with another kind of labels.
    """
    found: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    if given.examples is None:
        return found, refused
    for i, (name, worker) in enumerate(workers.items()):
        progress(i, len(workers), name)
        reads = worker.candidate.reads
        if reads is None:
            continue
        task = task_named(reads.task, multi_label=reads.multi_label)
        if task.has_contexts:
            refused[name] = (
                "No metric: contexts are cut here, and a bundle reads them in windows; `stillroom evaluate` scores it."
            )
            continue
        if task.has_kinds:
            markers = knows_markers(load_tokenizer(reads.folder, LONGEST_TEXT))
            try:
                check_kind(given.examples, name, multi_label=reads.multi_label, markers=markers)
            except BadInput as error:
                refused[name] = f"No metric: {error.message}"
                continue
        gold = [task.gold_of(example) for example in given.examples]
        answers = given.as_in_the_file(worker.answers())
        said = [task.prediction_of(answer, example) for answer, example in zip(answers, given.examples, strict=True)]
        reached = task.metric.score(gold, said, clusters=clusters_of(given.examples))
        found[name] = {
            "name": task.metric.name,
            "value": reached.value,
            "low": reached.low,
            "high": reached.high,
            "examples": len(given.examples),
        }
    return found, refused
