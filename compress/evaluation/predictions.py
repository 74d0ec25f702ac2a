"""A model's logits on each row of tokenised texts."""

from typing import Any

import numpy as np
import torch

from compress import distributed
from compress.data.batches import batches_by_length, collate, rows_of, to_device
from compress.data.encoded import Encoded
from compress.distributed import ProcessShare

WHOLE = ProcessShare()


def row_logits(
    model: Any, encoded: Encoded, *, remap: np.ndarray | None = None, advance: Any = None, share: ProcessShare = WHOLE
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
    share = ProcessShare(distributed.rank(), distributed.count())
    parts = distributed.collect(row_logits(model, encoded, advance=advance, share=share))
    if parts is None:
        return None
    return [next(rows for rows in of_text if rows.ndim == 2) for of_text in zip(*parts, strict=True)]
