"""`select`: from a bank of unlabelled texts, those like the labelled ones, and of these the ones that a model is least sure of."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.data.answer_rows import read_asked
from compress.data.columns import Columns, columns_of
from compress.data.examples import Example, Splits, check_kind, normalised
from compress.data.label_checks import some
from compress.data.splits import read_splits
from compress.data.task import Task
from compress.evaluation.predictions import row_logits
from compress.input_errors import Faults
from compress.models import answering, sentence_encoder
from compress.models.answering import AnsweringModel
from compress.models.sentence_encoder import sentence_vectors
from compress.progress import Advance, Notify, advancing, message, silent
from compress.runs.hardware import device_here, same_bits
from compress.settings import Selecting
from compress.tasks import task_named, task_of
from serve.bundle.cpu import available_cores
from serve.errors import BadInput
from serve.files import JSON_LINES, output, replacing
from serve.options import rule_faults
from serve.text.answers import softmax

if TYPE_CHECKING:
    from compress.models.sentence_encoder import SentenceEncoder


SHARD_TEXTS = 4_096
BLOCK = 4_096  # vectors whose products with all others are in memory at once


def select(settings: Selecting, notify: Notify = silent) -> dict[str, Any]:
    """Write the texts of a bank that are nearest to the labelled ones, and of these perhaps those that a model is least sure of.

    Left out are texts of the data (train, validation and test) and repetitions, told apart by their letters, digits and symbols; and of
    the nearest, near duplicates of each other and of texts of the data. Returns `out`, `texts` (rows in the file), `bank` (texts read),
    `in_data` and `repeated` (texts of the bank that were left out at first), `near_duplicates` (of the nearest, those left out), and
    `least_similar` (the smallest cosine of a text in the file with the labelled text that it is nearest to).

    Raises:
        BadInput: the bank, the data, a model or the output cannot be used, or no text is left.
    """
    faults, out, columns = Faults(), Path(settings.out), columns_of(settings)
    task = faults.check(lambda: task_named(settings.task))
    if task and task.has_contexts:
        raise BadInput(
            f"--task {task.name} needs a context for each question, which is not chosen here. Give another task."
        )
    splits = faults.check(partial(_splits, settings, task, columns)) if task else None
    bank: list[Example] = []
    if task and splits:
        for path in settings.bank:
            bank += faults.check(partial(_bank, path, task, columns, pairs=splits.pairs)) or []
    encoder = faults.check(
        lambda: sentence_encoder.open_encoder(
            settings.encoder, revision=settings.encoder_revision, max_length=settings.max_length
        )
    )
    faults.messages += rule_faults(settings)
    model = faults.check(lambda: _model(settings, splits))
    faults.check(lambda: _check_out(out, settings.bank))
    faults.raise_if_any()
    assert splits
    assert encoder
    same_bits(settings.threads or available_cores())
    device = device_here(settings.device)
    encoder = sentence_encoder.on_device(encoder, device)
    data = [*splits.train, *splits.validation, *splits.test]
    usable, in_data, repeated = _usable(bank, data)
    left_out = f"{in_data:,} of them are in the data and {repeated:,} repeat another, and are left out"
    message(notify, f"bank: {len(bank):,} texts; {left_out}")
    if not usable:
        raise BadInput(
            f"--bank {', '.join(settings.bank)} has no text that --like {settings.like} lacks. Give other text."
        )
    known = _vectors(encoder, data, "the data", notify)
    nearest = Nearest(known[: len(splits.train)], min(settings.k, len(usable)))
    with advancing(notify, "the bank") as shown:
        told = _counting(shown, len(usable))
        for first in range(0, len(usable), SHARD_TEXTS):
            nearest.add(first, sentence_vectors(encoder, usable[first : first + SHARD_TEXTS], told))
    found = nearest.chosen()
    # Of a large bank few texts are near: their vectors are computed again, and those of the others need no memory.
    again = _vectors(encoder, [usable[place] for place, _, _ in found], "the nearest", notify)
    kept = distinct(again, settings.near_duplicate, known)
    if len(kept) < len(found) / 2:
        message(
            notify,
            f"warning: {len(found) - len(kept):,} of the {len(found):,} nearest texts are near duplicates and left out. If they are not, "
            "give a larger --near-duplicate, or an encoder that was trained for sentence vectors.",
        )
    if not kept:
        raise BadInput(
            f"All {len(found):,} nearest texts are near duplicates of texts of --like {settings.like} (a cosine above "
            f"{settings.near_duplicate:g}). Give a larger --near-duplicate or other text."
        )
    texts = [usable[found[i][0]] for i in kept]
    rows = [_row(usable[place], cosine, splits.train[query]) for place, query, cosine in (found[i] for i in kept)]
    if model:
        with advancing(notify, "the model's answers") as shown:
            sure = margins(answering.on_device(model, device), texts, _counting(shown, len(texts)))
        order = np.argsort(sure, kind="stable")[: settings.uncertain]
        rows = [rows[i] | {"margin": round(float(sure[i]), 4)} for i in order.tolist()]
    with replacing(out, alone=True) as beside:
        beside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return {
        "out": str(out), "texts": len(rows), "bank": len(bank), "in_data": in_data, "repeated": repeated,
        "near_duplicates": len(found) - len(kept), "least_similar": min(row["similarity"] for row in rows),
    }  # fmt: skip


def _splits(settings: Selecting, task: Task, columns: Columns) -> Splits:
    splits = read_splits(settings.like, task, columns)
    if splits.relations:
        raise BadInput(
            f"--like {settings.like} has relations, whose two parts no text of a bank has marked. Give data of classes or entities."
        )
    return splits


def _model(settings: Selecting, splits: Splits | None) -> AnsweringModel | None:
    """The model of --with. BadInput if it does not answer what the data asks."""
    if not settings.checkpoint:
        return None
    model = answering.open_answering(
        settings.checkpoint, task_of, revision=settings.revision, max_length=settings.max_length
    )
    named = f"--with {settings.checkpoint}"
    if settings.task and model.task.name != settings.task:
        raise BadInput(f"{named} is a model of {model.task.name}, and --task is {settings.task}.")
    if not model.task.names_labels:
        raise BadInput(
            f"{named} gives {model.task.gives}, and how sure it is of them is not known. Give a model of classes or entities."
        )
    if splits:
        if model.task.has_kinds:
            check_kind(splits.train, named, multi_label=model.multi_label, markers=False)
        known = set(model.task.answer_labels(model.labels))
        if lacking := sorted(set(splits.labels(model.task)) - known):
            raise BadInput(
                f"{named} has the labels {some(sorted(known))}, which lack {some(lacking)} of --like {settings.like}."
            )
    return model


def _bank(path: str, task: Task, columns: Columns, *, pairs: bool) -> list[Example]:
    found = read_asked(Path(path), task, columns, "--bank")
    if odd := sum(bool(example.text_pair) is not pairs for example in found):
        kind = "single texts, and --like has pairs" if pairs else "pairs, and --like has single texts"
        raise BadInput(f"--bank {path}: {odd:,} of {len(found):,} rows are {kind}. Give rows of one kind.")
    return found


def _check_out(out: Path, bank: Sequence[str]) -> None:
    if output(out, endings=JSON_LINES, inputs=bank).exists():
        raise BadInput(f"--out {out} already exists; it was not changed. Give another file, or remove it.")


def _usable(bank: Iterable[Example], data: Iterable[Example]) -> tuple[list[Example], int, int]:
    """The texts of the bank that may be chosen, and how many are in the data, and how many repeat another."""
    known = {normalised(each) for each in data}
    seen: set[tuple[str, str]] = set()
    usable = []
    in_data = repeated = 0
    for example in bank:
        bare = normalised(example)
        if bare in known:
            in_data += 1
        elif bare in seen:
            repeated += 1
        else:
            seen.add(bare)
            usable.append(example)
    return usable, in_data, repeated


def _vectors(encoder: "SentenceEncoder", texts: list[Example], what: str, notify: Notify) -> np.ndarray:
    with advancing(notify, what) as shown:
        return sentence_vectors(encoder, texts, _counting(shown, len(texts)))


def _counting(shown: Advance, total: int) -> Callable[[int], None]:
    """What adds up texts and reports how many of `total` are done."""
    counts: list[int] = []

    def told(texts: int) -> None:
        counts.append(texts)
        shown(sum(counts), total)

    return told


def _row(example: Example, similarity: float, like: Example) -> dict[str, Any]:
    pair = {"text_pair": example.text_pair} if example.text_pair else {}
    return {"text": example.text} | pair | {"similarity": round(similarity, 4), "like": like.text}


class Nearest:
    """The `k` nearest texts of a bank to each of some queries, of all that were added so far."""

    def __init__(self, queries: np.ndarray, k: int) -> None:
        self.queries = queries
        self.similarity: np.ndarray = np.full((len(queries), k), -np.inf, dtype=np.float32)
        """Cosines, (queries, k), in no order."""
        self.index: np.ndarray = np.zeros((len(queries), k), dtype=np.int64)
        """The places in the bank; only where the similarity is finite."""

    def add(self, first: int, vectors: np.ndarray) -> None:
        """The `vectors` of the texts of the bank from place `first` on."""
        k = self.similarity.shape[1]
        for start in range(0, len(self.queries), BLOCK):
            part = slice(start, start + BLOCK)
            products = self.queries[part] @ vectors.T
            places = np.broadcast_to(np.arange(first, first + len(vectors)), products.shape)
            known = np.concatenate([self.similarity[part], products], axis=1)
            index = np.concatenate([self.index[part], places], axis=1)
            best = np.argpartition(-known, k - 1, axis=1)[:, :k]
            self.similarity[part] = np.take_along_axis(known, best, axis=1)
            self.index[part] = np.take_along_axis(index, best, axis=1)

    def chosen(self) -> list[tuple[int, int, float]]:
        """Each text that is among the nearest of a query, with the query that it is nearest to and their cosine; the nearest first."""
        there = np.isfinite(self.similarity)
        query = np.broadcast_to(np.arange(len(self.queries))[:, None], there.shape)[there]
        index, cosine = self.index[there], self.similarity[there]
        order = np.lexsort((query, -cosine, index))
        index, query, cosine = index[order], query[order], cosine[order]
        first = np.unique(index, return_index=True)[1]  # of each text the nearest query; ties go to the first
        best = first[np.lexsort((index[first], -cosine[first]))]
        return list(zip(index[best].tolist(), query[best].tolist(), cosine[best].tolist(), strict=True))


def distinct(vectors: np.ndarray, above: float, known: np.ndarray) -> list[int]:
    """The places of `vectors`, in order, without those whose cosine is over `above` with one of `known` or an earlier one that is kept."""
    kept: list[int] = []
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK]
        near = np.zeros(len(block), dtype=bool)
        for begin in range(0, len(known), BLOCK):
            near |= (block @ known[begin : begin + BLOCK].T > above).any(axis=1)
        for begin in range(0, len(kept), BLOCK):
            near |= (block @ vectors[kept[begin : begin + BLOCK]].T > above).any(axis=1)
        among = block @ block.T > above
        here: list[int] = []
        for i in np.flatnonzero(~near).tolist():
            if not among[i, here].any():
                here.append(i)
        kept += [start + i for i in here]
    return kept


def margins(
    model: AnsweringModel, texts: Sequence[Example], advance: Callable[[int], None] | None = None
) -> np.ndarray:
    """How far the likeliest answer leads the second, (texts,), float32, 0 to 1; small where the model wavers.

    Of a class it is the difference of the two largest probabilities (margin sampling: Scheffer and others, 2001). Where any number
    of labels may apply it is the smallest distance of a label's probability from an even chance, doubled. Of entities it is the
    mean over the words of a text.
    """
    encoded = model.task.encode(texts, model.tokenizer, model.labels)
    logits = row_logits(model.model, encoded, advance=advance)
    if model.multi_label:
        return np.array([np.abs(2 / (1 + np.exp(-rows[0])) - 1).min() for rows in logits], dtype=np.float32)
    found = []
    for rows in logits:
        first_two = np.sort(softmax(rows), axis=1)[:, -2:]
        # A text without words has nothing to be unsure of.
        found.append((first_two[:, -1] - first_two[:, 0]).mean() if len(rows) else 1.0)
    return np.array(found, dtype=np.float32)
