"""Opens and checks what two models are compared on: the models, their common tokenizer, the texts, and the pairs of layers."""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from compress.data.answer_rows import read_asked
from compress.data.columns import Columns, columns_of
from compress.data.examples import Example
from compress.data.file_formats import SUFFIXES, looks_like_columns, rows_in, suffix_of
from compress.data.labelled_files import check_there, read_examples
from compress.data.row_fields import UnreadableFrom
from compress.data.task import Task
from compress.input_errors import Faults
from compress.models.initialise import differing_tokenizers
from compress.models.pretrained import Opened, check_labels, open_model, open_tokenizer
from compress.models.shapes import spread_layers
from compress.tasks import LABELLED, TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from serve.errors import BadInput
from stillroom.verbs.explain import Explaining

NAMED = 5  # labels that only one model has


class LayerPair(NamedTuple):
    """A layer of the teacher beside one of the student; both count from 1."""

    teacher: int
    student: int


class Inputs(NamedTuple):
    """The opened inputs. `task` is that of both models' heads, None if they have no heads for the same labels."""

    teacher: Opened
    student: Opened
    tokenizer: Tokenizer
    max_length: int
    pairs: list[LayerPair]
    examples: list[Example]
    texts_in_data: int
    has_spans: bool
    task: Task | None
    why_no_answers: str
    notes: list[str]
    """What was left out of the file, one sentence each."""


def open_inputs(teacher: str, student: str, given: Explaining) -> Inputs:
    """The models, texts and pairs of layers that `given` names.

    Raises:
        BadInput: every fault found, in one message; or tokenizers that differ.
    """
    faults, columns, notes = Faults(), columns_of(given), list[str]()
    theirs = faults.check(lambda: open_model(teacher, role="TEACHER"))
    ours = faults.check(lambda: open_model(student, role="STUDENT"))
    task, why = faults.check(lambda: _task_of(theirs, ours)) or (None, "") if theirs and ours else (None, "")
    read = faults.check(lambda: _examples(Path(given.data), task, columns, notes))
    pairs = faults.check(lambda: _pairs(given.layers, theirs, ours)) if theirs and ours else None
    faults.raise_if_any()
    assert theirs
    assert ours
    assert read
    assert pairs
    if reason := differing_tokenizers(theirs, ours):
        raise BadInput(
            f"TEACHER {teacher} and STUDENT {student} have different tokenizers: {reason.rstrip('.')}. Attention is compared token by "
            "token, so both need the same. Give a student of this teacher, before its vocabulary was trimmed."
        )
    examples, has_spans = read
    tokenizer = open_tokenizer(theirs)
    max_length = min(given.max_length, theirs.most_tokens, ours.most_tokens)
    tokenizer.enable_truncation(max_length)
    chosen = _drawn(examples, given.most_texts, given.seed)
    return Inputs(theirs, ours, tokenizer, max_length, pairs, chosen, len(examples), has_spans, task, why, notes)


def _examples(path: Path, task: Task | None, columns: Columns, notes: list[str]) -> tuple[list[Example], bool]:
    """The texts of the file, and whether its first row has entities or tags. `notes` gets what was left out."""
    check_there(path)
    suffix = suffix_of(path)
    has_spans = suffix == ".txt" and looks_like_columns(path)
    if suffix in SUFFIXES:
        row = None
        with suppress(UnreadableFrom):  # the reader of texts tells where
            _, row = next(rows_in(path, suffix, columns, TOKEN_CLASSIFICATION, []), (0, None))
        tags = isinstance(row, dict) and columns.tags_in(row) and columns.tokens in row
        fields: dict[str, Any] = row if isinstance(row, dict) else {}
        name = columns.entities_in(fields)
        # An empty list under the name of a label says nothing of what its column holds.
        has_spans = bool(tags) or (name is not None and (name not in ("label", "labels") or bool(fields[name])))
    if has_spans:
        return read_examples(path, TOKEN_CLASSIFICATION, columns, notes), True
    return read_asked(path, task or TEXT_CLASSIFICATION, columns, "--data"), False


def _pairs(asked: Sequence[str], teacher: Opened, student: Opened) -> list[LayerPair]:
    """The pairs of layers in `asked`; without any, the deeper model's layers that are evenly spread over the other's."""
    theirs, ours = teacher.config.num_hidden_layers, student.config.num_hidden_layers
    if not asked:
        deeper = spread_layers(max(theirs, ours), min(theirs, ours))
        spread = enumerate(deeper, 1)
        return [LayerPair(deep, i) if theirs >= ours else LayerPair(i, deep) for i, deep in spread]
    faults, found = Faults(), []
    for text in asked:
        if not re.fullmatch(r"[0-9]{1,4}:[0-9]{1,4}", text):
            message = f"--layer {text} is not a layer of the teacher, a colon and a layer of the student. Give it as {theirs}:{ours}."
            faults.messages.append(message)
            continue
        pair = LayerPair(*map(int, text.split(":")))
        if not (1 <= pair.teacher <= theirs and 1 <= pair.student <= ours):
            faults.messages.append(
                f"--layer {text} names a layer that is not there: the teacher has {theirs} layers and the student {ours}. Give one from "
                f"1:1 to {theirs}:{ours}."
            )
        found.append(pair)
    faults.raise_if_any()
    return list(dict.fromkeys(found))


def _task_of(teacher: Opened, student: Opened) -> tuple[Task | None, str]:
    """The task that both models have a head for, with the same labels; otherwise None, and why as text.

    Raises:
        BadInput: both have a head for it, and labels of one cannot be read.
    """
    for kind in LABELLED.values():
        theirs, ours = teacher.head_for(kind), student.head_for(kind)
        if theirs and ours:
            task = kind.with_multi_label(teacher.multi_label)
            check_labels(theirs, task, f"TEACHER {teacher.name}")
            check_labels(ours, task, f"STUDENT {student.name}")
            if task.has_contexts:
                return None, "what a model answers to questions is not compared here"
            if not task.names_labels:  # its one label is a name without meaning
                return task, ""
            if apart := sorted(set(theirs) ^ set(ours)):
                more = " and others" if apart[NAMED:] else ""
                return None, f"only one of the two models has the labels {', '.join(apart[:NAMED])}{more}"
            if teacher.multi_label is not student.multi_label:
                return None, "only one of the two models gives a text any number of labels"
            return task, ""
    return None, "the two models have no heads for the same task"


def _drawn(examples: list[Example], most: int, seed: int) -> list[Example]:
    """At most so many of `examples`, in their order. A hash of its text and `seed` decides about each, so their order does not."""

    def key(i: int) -> bytes:
        text = f"{seed}\n{examples[i].text_read}\n{examples[i].text_pair}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    return [examples[i] for i in sorted(sorted(range(len(examples)), key=key)[:most])]
