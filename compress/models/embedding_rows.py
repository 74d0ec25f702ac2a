"""Trains only the rows of the word embedding that occur in the texts.

A row whose token never occurs has no gradient, so Adam's moments for it stay 0 and the row never changes (embeddings have
no weight decay here). Leaving it out changes no result and saves the optimiser's pass over it. Embeddings are two thirds
of the parameters of a 3x384 student.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def rows_in_use(model: Any, ids: Iterable[np.ndarray], pad_id: int) -> Iterator[np.ndarray]:
    """Context in which `model` holds only the embedding rows of `ids`; afterwards it has the whole table with the trained rows.

    Yields:
        `remap`, so that `remap[token id]` is the row of that token. The pad token, that of the tokenizer and that of the model, and all
        ids below it keep their rows, because some families count positions from the pad id.
    """
    whole: nn.Embedding = model.get_input_embeddings()
    seen = np.zeros(whole.num_embeddings, dtype=bool)
    seen[: max(pad_id, getattr(model.config, "pad_token_id", None) or 0) + 1] = True
    for some in ids:
        seen[some] = True
    used = np.flatnonzero(seen)
    remap = np.zeros(whole.num_embeddings, dtype=np.int64)
    remap[used] = np.arange(len(used))
    rows = torch.from_numpy(used).to(whole.weight.device)
    narrow = nn.Embedding(len(used), whole.embedding_dim, padding_idx=whole.padding_idx)
    narrow.weight.data = whole.weight.data[rows].clone()
    model.set_input_embeddings(narrow)
    try:
        yield remap
    finally:
        whole.to(narrow.weight.device)  # training may have moved the model
        whole.weight.data[rows.to(whole.weight.device)] = narrow.weight.data
        model.set_input_embeddings(whole)
