"""A model's logits on each row of tokenised texts, and the answers that serving would give."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from compress import distributed
from compress.data.batches import batches_by_length, collate, rows_of, to_device
from compress.data.encoded import Encoded
from compress.distributed import Share
from compress.evaluation.metrics import Prediction, widened
from compress.evaluation.questions import given, said_of
from serve.text.answers import softmax
from serve.text.labels import applies, split_tag, with_prefixes
from serve.text.spans import Span, decode_spans, words

WHOLE = Share()


def row_logits(
    model: Any, encoded: Encoded, *, remap: np.ndarray | None = None, advance: Any = None, share: Share = WHOLE
) -> list[np.ndarray]:
    """The logits of each text, (rows, labels), in order; `advance(texts)` is called after each batch.

    With a `share` of several, only this process's batches are computed; the texts of the others get empty arrays. Which texts are
    in one batch does not depend on the share, so neither do the bits.
    """
    out: list[np.ndarray] = [np.empty(0)] * len(encoded)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for number, chosen in enumerate(batches_by_length([len(ids) for ids in encoded.ids])):
            if number % share.of != share.number:
                continue
            batch = to_device(collate(encoded, chosen, remap=remap), device)
            logits = rows_of(model, batch).float().cpu().numpy()
            ends = np.cumsum([len(encoded.rows[i]) for i in chosen])
            for i, rows in zip(chosen, np.split(logits, ends[:-1]), strict=True):
                out[i] = rows
            if advance:
                advance(len(chosen))
    model.train(was_training)
    return out


def shared_row_logits(model: Any, encoded: Encoded, advance: Any = None) -> list[np.ndarray] | None:
    """`row_logits` in the main process, None in the others; each process computes its share."""
    share = Share(distributed.rank(), distributed.count())
    parts = distributed.collect(row_logits(model, encoded, advance=advance, share=share))
    if parts is None:
        return None
    return [next(rows for rows in of_text if rows.ndim == 2) for of_text in zip(*parts, strict=True)]


def predictions(encoded: Encoded, logits: Sequence[np.ndarray]) -> list[Prediction]:
    """The answers that serving gives from each text's `logits` (rows, labels): a class, labels that apply, a number, a vector or spans.

    Spans are widened to the words of data that came as words.

    Of questions there is one answer for all windows of a context; it is empty for none.
    """
    if encoded.task == "feature-extraction":
        return [rows[0] for rows in logits]
    if encoded.task == "text-regression":
        return [float(rows[0, 0]) for rows in logits]
    if encoded.task == "question-answering":
        return list(given(said_of(encoded, logits), encoded.answer_from))
    if encoded.multi_label:
        return [frozenset(encoded.labels[i] for i in np.flatnonzero(applies(rows[0]))) for rows in logits]
    if encoded.task == "text-classification":
        return [encoded.labels[int(rows[0].argmax())] for rows in logits]
    blanks_in_words = encoded.blanks_in_words or [None] * len(encoded)
    return [
        widened(((span.start, span.end, span.label) for span in spans), text, blanks)
        for spans, text, blanks in zip(scored_spans(encoded, logits), encoded.texts, blanks_in_words, strict=True)
    ]


def scored_spans(encoded: Encoded, logits: Sequence[np.ndarray]) -> Iterator[list[Span]]:
    """The spans of each text with their scores, as serving finds them, from each text's `logits` (rows, labels)."""
    for text, encoding, starts, rows in zip(encoded.texts, encoded.encodings, encoded.rows, logits, strict=True):
        full = np.zeros((len(encoding.ids), len(encoded.labels)), dtype=np.float32)
        full[starts] = softmax(rows, rows.dtype)
        yield decode_spans(words(text, encoding.offsets, encoding.word_ids), full, encoded.labels)


def constant_predictions(encoded: Encoded) -> Iterator[list[Prediction]]:
    """For each label, the answers of a model that always gives it; for tags, to each single word.

    If any number of labels may apply, the answers are the most frequent label, the two most frequent, and so on, because
    these score best among constant answers of their size. All constant numbers score the same.
    """
    if encoded.task == "text-regression":
        yield [0.0] * len(encoded)
        return
    if encoded.owners is not None:
        yield [""] * len(np.unique(encoded.owners))
        return
    if encoded.multi_label:
        there = (np.concatenate(encoded.targets) == 1).sum(axis=0)
        often = [encoded.labels[i] for i in np.argsort(-there, kind="stable")]
        for size in range(1, len(often) + 1):
            yield [frozenset(often[:size])] * len(encoded)
        return
    labels = with_prefixes(encoded.labels) if encoded.task == "token-classification" else encoded.labels
    for index, label in enumerate(labels):
        if encoded.task == "text-classification" or split_tag(label)[0] in {"B", "S"}:
            always = np.zeros((1, len(encoded.labels)), dtype=np.float32)
            always[0, index] = 1
            yield predictions(encoded, [np.repeat(always, len(rows), axis=0) for rows in encoded.rows])
