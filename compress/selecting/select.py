"""`select`: from a bank of unlabelled texts, those like the labelled ones, and of these the ones that a model is least sure of."""

import json
import unicodedata
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.data.asked_texts import read_asked
from compress.data.columns import Columns, columns_of
from compress.data.examples import Example, Splits, check_kind
from compress.data.label_checks import some
from compress.data.splits import read_splits
from compress.data.task import Task
from compress.input_errors import Faults
from compress.models import answering, sentence_encoder
from compress.models.sentence_encoder import sentence_vectors
from compress.progress import Advance, Notify, advancing, message, silent
from compress.runs.hardware import device_here, same_bits
from compress.runs.resumable_stages import check_writable
from compress.selecting.certainty import margins
from compress.selecting.neighbours import Nearest, distinct
from compress.settings import Selecting
from compress.tasks import task_named, task_of
from serve.bundle.cpu import available_cores
from serve.errors import BadInput
from serve.files import replacing
from serve.options import rule_faults

if TYPE_CHECKING:
    from compress.models.answering import AnsweringModel
    from compress.models.sentence_encoder import SentenceEncoder

SHARD_TEXTS = 4_096
# Categories of Unicode that tell texts apart; Indic vowels are marks, and emoji and plus signs are symbols.
TELLING = "LNMS"


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
    encoder = faults.check(lambda: _encoder(settings))
    faults.messages += rule_faults(settings)
    model = faults.check(lambda: _model(settings, splits))
    faults.check(lambda: _check_out(out))
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
        rows = _least_sure(answering.on_device(model, device), texts, rows, settings.uncertain, notify)
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


def _encoder(settings: Selecting) -> "SentenceEncoder":
    return sentence_encoder.open_encoder(
        settings.encoder, revision=settings.encoder_revision, max_length=settings.max_length
    )


def _model(settings: Selecting, splits: Splits | None) -> "AnsweringModel | None":
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


def _check_out(out: Path) -> None:
    if out.exists():
        raise BadInput(f"--out {out} already exists; it was not changed. Give another file, or remove it.")
    if not out.absolute().parent.is_dir():
        raise BadInput(
            f"--out {out} is in {out.absolute().parent}, which does not exist. Give a file in a folder that exists."
        )
    check_writable(out)


def _usable(bank: Iterable[Example], data: Iterable[Example]) -> tuple[list[Example], int, int]:
    """The texts of the bank that may be chosen, and how many are in the data, and how many repeat another."""
    known = {_bare(each) for each in data}
    seen: set[tuple[str, str]] = set()
    usable = []
    in_data = repeated = 0
    for example in bank:
        bare = _bare(example)
        if bare in known:
            in_data += 1
        elif bare in seen:
            repeated += 1
        else:
            seen.add(bare)
            usable.append(example)
    return usable, in_data, repeated


def _bare(example: Example) -> tuple[str, str]:
    """What tells a text apart, without regard to case, blanks, punctuation and the way in which Unicode spells a letter."""
    return _telling(example.text), _telling(example.text_pair or "")


def _telling(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    kept = [
        each
        for i, each in enumerate(folded)
        if unicodedata.category(each)[0] in TELLING or (folded[i - 1 : i].isdigit() and folded[i + 1 : i + 2].isdigit())
    ]
    return "".join(kept) or text.strip()


def _vectors(encoder: "SentenceEncoder", texts: list[Example], what: str, notify: Notify) -> np.ndarray:
    with advancing(notify, what) as shown:
        return sentence_vectors(encoder, texts, _counting(shown, len(texts)))


def _least_sure(
    model: "AnsweringModel", texts: list[Example], rows: list[dict[str, Any]], count: int, notify: Notify
) -> list[dict[str, Any]]:
    """The `count` of `rows`, which are of `texts`, on which the model leads by least, that one first."""
    with advancing(notify, "the model's answers") as shown:
        found = margins(model, texts, _counting(shown, len(texts)))
    order = np.argsort(found, kind="stable")[:count]
    return [rows[i] | {"margin": round(float(found[i]), 4)} for i in order.tolist()]


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
