"""`select`: from a bank of unlabelled texts, those like the labelled ones, and of these the ones that a model is least sure of."""

import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.data.columns import Columns, columns_of
from compress.data.examples import Example, Splits, check_task
from compress.data.file_formats import SUFFIXES, rows_in
from compress.data.row_faults import BadRows, Fault, UnreadableFrom, note
from compress.data.rows import unlabelled_example
from compress.data.splits import read_splits
from compress.data.texts import read_texts
from compress.engine.hardware import device_here, same_bits
from compress.input_errors import Faults
from compress.models import answering, sentence_encoder
from compress.progress import Advance, Notify, advancing, message, silent
from compress.selecting.certainty import margins
from compress.selecting.neighbours import Nearest, distinct
from compress.settings import Selecting
from serve.bundle.cpu_quota import available_cores
from serve.errors import BadInput

if TYPE_CHECKING:
    from compress.models.answering import AnsweringModel
    from compress.models.sentence_encoder import SentenceEncoder

SHARD_TEXTS = 4_096


def select(settings: Selecting, notify: Notify = silent) -> dict[str, Any]:
    """Write the texts of a bank that are nearest to the labelled ones, and of these perhaps those that a model is least sure of.

    Left out are texts of the data (train, validation and test) and repetitions, told apart by their letters and digits, and of near
    duplicates all but one. Returns `out`, `texts` (rows in the file), `bank` (texts read), `in_data` and
    `repeated` (texts of the bank that were left out before), `near_duplicates` (of the nearest, those left out), and `least_similar`
    (the smallest cosine of a text in the file with the labelled text that it is nearest to).

    Raises:
        BadInput: the bank, the data, a model or the output cannot be used, or no text is left.
    """
    faults, out, columns = Faults(), Path(settings.out), columns_of(settings)
    task = faults.check(lambda: check_task(settings.task))
    splits = faults.check(partial(read_splits, settings.like, task, columns)) if task else None
    pairs = bool(splits and splits.pairs)
    bank: list[Example] = []
    for path in settings.bank:
        bank += faults.check(partial(_bank, Path(path), columns, pairs=pairs)) or []
    encoder = faults.check(lambda: _encoder(settings))
    model = faults.check(lambda: _model(settings))
    faults.check(lambda: _check_out(out))
    faults.raise_if_any()
    assert splits
    assert encoder
    same_bits(settings.threads or available_cores())
    device = device_here(settings.device)
    encoder = sentence_encoder.on_device(encoder, device)
    usable, in_data, repeated = _usable(bank, splits)
    message(
        notify,
        f"bank: {len(bank):,} texts; {in_data:,} of them are in the data and {repeated:,} repeat another, and are left out",
    )
    if not usable:
        raise BadInput(
            f"--bank {', '.join(settings.bank)} has no text that --like {settings.like} lacks. Give other text."
        )
    found = _nearest(encoder, usable, splits.train, settings.k, notify)
    # Of a large bank few texts are near, so their vectors are computed again and those of the others need no memory.
    kept = distinct(
        sentence_encoder.sentence_vectors(encoder, [usable[place] for place, _, _ in found]), settings.near_duplicate
    )
    texts = [usable[found[i][0]] for i in kept]
    rows = [_row(usable[place], cosine, splits.train[query]) for place, query, cosine in (found[i] for i in kept)]
    if model:
        rows = _least_sure(answering.on_device(model, device), texts, rows, settings.uncertain, notify)
    part = out.with_name(f"{out.name}.part")
    part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(part, out)
    return {
        "out": str(out), "texts": len(rows), "bank": len(bank), "in_data": in_data, "repeated": repeated,
        "near_duplicates": len(found) - len(kept), "least_similar": min(row["similarity"] for row in rows),
    }  # fmt: skip


def _encoder(settings: Selecting) -> "SentenceEncoder":
    return sentence_encoder.open_encoder(settings.encoder, revision=settings.revision, max_length=settings.max_length)


def _model(settings: Selecting) -> "AnsweringModel | None":
    """The model of --with. BadInput if it and --uncertain do not go together, or it is of another task."""
    if bool(settings.uncertain) != bool(settings.checkpoint):
        raise BadInput("--uncertain and --with go together: how many texts, and the fine-tuned model that is unsure.")
    if not settings.checkpoint:
        return None
    model = answering.open_answering(settings.checkpoint, max_length=settings.max_length)
    if settings.task and model.task != settings.task:
        raise BadInput(f"--with {settings.checkpoint} is a model of {model.task}, and --task is {settings.task}.")
    return model


def _bank(path: Path, columns: Columns, *, pairs: bool) -> list[Example]:
    """The texts of one file; with `pairs` each has a second one."""
    if not pairs:
        return [Example(text) for text in read_texts(path, columns)]
    if not path.is_file() or path.suffix not in SUFFIXES or path.suffix == ".conll":
        raise BadInput(
            f"--bank {path} is not a file of {', '.join(SUFFIXES[:-1])}. Give rows with `text` and `text_pair`."
        )
    faults: list[Fault] = []
    found = []
    try:
        for line, row in rows_in(path, path.suffix, columns, None, faults):
            try:
                example = unlabelled_example(row, columns)
                if not example.text_pair:
                    raise ValueError("has no second text, and --like has pairs")
                found.append(example)
            except ValueError as reason:
                note(faults, Fault(str(path), line, str(reason)))
    except UnreadableFrom as error:
        faults += error.faults
    if faults:
        raise BadRows(faults)
    return found


def _check_out(out: Path) -> None:
    if out.exists():
        raise BadInput(f"--out {out} already exists; it was not changed. Give another file, or remove it.")
    if not out.absolute().parent.is_dir():
        raise BadInput(
            f"--out {out} is in {out.absolute().parent}, which does not exist. Give a file in a folder that exists."
        )


def _bare(example: Example) -> str:
    """The letters and digits of a text in one case, by which texts are told apart."""
    both = f"{example.text_read}\n{example.text_pair or ''}"
    return "".join(each for each in both.casefold() if each.isalnum())


def _usable(bank: Iterable[Example], splits: Splits) -> tuple[list[Example], int, int]:
    """The texts of the bank that may be chosen, and how many are in the data, and how many repeat another."""
    known = {_bare(each) for each in (*splits.train, *splits.validation, *splits.test)}
    seen: set[str] = set()
    usable = []
    in_data = repeated = 0
    for example in bank:
        bare = _bare(example)
        if bare in known or not bare:
            in_data += 1
        elif bare in seen:
            repeated += 1
        else:
            seen.add(bare)
            usable.append(example)
    return usable, in_data, repeated


def _nearest(
    encoder: "SentenceEncoder", bank: list[Example], like: list[Example], k: int, notify: Notify
) -> list[tuple[int, int, float]]:
    """Places of the bank with their nearest labelled text and its cosine, the nearest first."""
    with advancing(notify, "the labelled texts") as shown:
        queries = sentence_encoder.sentence_vectors(encoder, like, _counting(shown, len(like)))
    nearest = Nearest(queries, min(k, len(bank)))
    with advancing(notify, "the bank") as shown:
        told = _counting(shown, len(bank))
        for first in range(0, len(bank), SHARD_TEXTS):
            vectors = sentence_encoder.sentence_vectors(encoder, bank[first : first + SHARD_TEXTS], told)
            nearest.add(first, vectors)
    return nearest.chosen()


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
    return {"text": example.text} | pair | {"similarity": round(similarity, 4), "like": like.text_read}
