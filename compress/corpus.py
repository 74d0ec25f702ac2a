"""Plain text as batches of token ids, with tokens hidden for a masked language model where an objective needs that."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from compress.loop import Order
from compress.losses import IGNORED
from compress.tasks import Batch
from serve.errors import BadInput

# BERT's, section 3.1: of the tokens chosen, how many become the mask token, and how many any other one.
CHOSEN_SHARE, MASKED_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1


class Piece(NamedTuple):
    """A stretch of text: token ids (tokens,), and which word each belongs to (tokens,), -1 for special tokens."""

    ids: np.ndarray
    words: np.ndarray


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden: `mask_id` is the mask token, `size` the vocabulary's; `whole_words` hides words, not tokens."""

    mask_id: int
    size: int
    whole_words: bool = False


@dataclass(frozen=True)
class CorpusText:
    """Batches of pieces of about equal length; the batch of a step depends on the seed and its number alone."""

    pieces: Sequence[Piece]
    pad_id: int
    batch: int
    seed: int
    masking: Masking | None = None

    @cached_property
    def order(self) -> Order:
        """Which pieces each step sees."""
        return Order(np.array([len(piece.ids) for piece in self.pieces]), self.batch, self.seed)

    @property
    def tokens_per_step(self) -> float:
        """Real tokens of a step, on average."""
        return float(self.order.lengths.sum()) / self.order.steps_per_epoch

    @property
    def ids(self) -> list[np.ndarray]:
        """The token ids of every piece."""
        return [piece.ids for piece in self.pieces]

    def at(self, step: int) -> Batch:
        """Ids and mask (batch, tokens). With masking, rows are the tokens chosen, their targets the ids that stood there."""
        chosen = [self.pieces[i] for i in self.order.at(step)]
        width = max(len(piece.ids) for piece in chosen)
        ids = np.full((len(chosen), width), self.pad_id, dtype=np.int64)
        words = np.full((len(chosen), width), -1, dtype=np.int64)
        for row, piece in enumerate(chosen):
            ids[row, : len(piece.ids)] = piece.ids
            words[row, : len(piece.ids)] = piece.words
        mask = np.zeros((len(chosen), width), dtype=np.int64)
        for row, piece in enumerate(chosen):
            mask[row, : len(piece.ids)] = 1
        rows, targets = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if self.masking:
            generator = np.random.default_rng([self.seed, step, 1])
            hidden, ids = masked(ids, words, self.masking, generator)
            rows = np.flatnonzero(hidden != IGNORED)
            targets = hidden.ravel()[rows]
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        return Batch(inputs, torch.from_numpy(rows), torch.from_numpy(targets))


def masked(
    ids: np.ndarray, words: np.ndarray, masking: Masking, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """What is to be guessed, and the ids as the model sees them; both (batch, tokens), `IGNORED` where nothing is to be guessed.

    Of the tokens in words (or of the words) 15 % are chosen, and always one; of those 80 % become the mask token, 10 % a
    random one, and the rest stay (BERT, section 3.1).
    """
    in_words = words >= 0
    if masking.whole_words:
        draw = generator.random((len(words), int(words.max(initial=0)) + 1))
        drawn = np.where(in_words, np.take_along_axis(draw, np.maximum(words, 0), axis=1), 1.0)
    else:
        drawn = np.where(in_words, generator.random(words.shape), 1.0)
    chosen = drawn < max(CHOSEN_SHARE, float(drawn.min()) + 1e-12)
    chosen &= in_words
    becomes = generator.random(words.shape)
    shown = np.where(chosen & (becomes < MASKED_SHARE), masking.mask_id, ids)
    swapped = chosen & (becomes >= MASKED_SHARE) & (becomes < MASKED_SHARE + RANDOM_SHARE)
    shown = np.where(swapped, generator.integers(0, masking.size, words.shape), shown)
    return np.where(chosen, ids, IGNORED), shown


def chunks(texts: Sequence[str], tokenizer: Tokenizer, longest: int) -> list[Piece]:
    """`texts` cut into pieces of at most `longest` tokens, each with the special tokens of its own."""
    pieces: list[Piece] = []
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_truncation(max_length=longest)
    for start in range(0, len(texts), 1_000):
        for encoding in tokenizer.encode_batch(list(texts[start : start + 1_000])):
            for part in (encoding, *encoding.overflowing):
                words = np.array([-1 if word is None else word for word in part.word_ids], dtype=np.int64)
                if (words >= 0).any():
                    words = np.where(words >= 0, words - words[words >= 0].min(), -1)
                    pieces.append(Piece(np.array(part.ids, dtype=np.int64), words))
    return pieces


def masking_of(tokenizer: Tokenizer, size: int, *, whole_words: bool = False) -> Masking:
    """The masking of a tokenizer's vocabulary, of `size` rows.

    Raises:
        BadInput: it has no mask token.
    """
    for token in ("[MASK]", "<mask>"):
        found = tokenizer.token_to_id(token)
        if found is not None:
            return Masking(found, size, whole_words)
    raise BadInput(
        "The teacher's tokenizer has no mask token ([MASK] or <mask>), and this method trains on masked text. "
        "Take a method that reads hidden states or attention (minilmv2, minilm, hidden-states)."
    )
