"""Workloads: real text in rows of one exact length, so that no candidate is timed on padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from serve.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Workload:
    """One shape of input."""

    name: str
    batch: int  # rows
    tokens: int  # per row, special tokens included
    input_ids: npt.NDArray[np.int64]  # (batch, tokens)


def from_texts(texts: Sequence[str], tokenizer: "Tokenizer", batch: int, tokens: int) -> Workload:
    """A workload of `batch` rows of exactly `tokens` tokens, cut from `texts` in order.

    Texts are joined until a row is full, and the rest of the last text is cut off. Each row starts with a new text and has
    the tokenizer's special tokens, like a real input. After the last text the first follows again. Raises BadInput when
    no text has a token, or when `tokens` leaves no room for any.
    """
    if batch < 1:
        raise BadInput(f"batch {batch} was given; a workload needs 1 or more rows")
    text_ids = [ids for ids in (_plain_ids(tokenizer, text) for text in texts) if ids]
    if not text_ids:
        raise BadInput(f"{len(texts)} texts were given, without any token; give texts like those that will be served")
    # The special tokens that the tokenizer puts before and after a text.
    encoding = tokenizer.encode(next(text for text in texts if _plain_ids(tokenizer, text)))
    kinds = zip(encoding.ids, encoding.special_tokens_mask, encoding.attention_mask, strict=True)
    real = [(token, bool(special)) for token, special, attended in kinds if attended]
    own = [i for i, (_, special) in enumerate(real) if not special]
    opening, closing = ([token for token, _ in part] for part in (real[: own[0]], real[own[-1] + 1 :]))
    room = tokens - len(opening) - len(closing)
    if room < 1:
        raise BadInput(
            f"{tokens} tokens were asked for, but special tokens alone take {len(opening) + len(closing)}; "
            f"ask for {len(opening) + len(closing) + 1} or more"
        )
    rows, position = [], 0
    for _ in range(batch):
        row: list[int] = []
        while len(row) < room:
            row += text_ids[position % len(text_ids)]
            position += 1
        rows.append([*opening, *row[:room], *closing])
    return Workload(f"batch {batch} x {tokens} tokens", batch, tokens, np.array(rows, dtype=np.int64))


def _plain_ids(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Ids of `text` without special tokens and without padding, even if the tokenizer pads."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return [token for token, real in zip(encoding.ids, encoding.attention_mask, strict=True) if real]
