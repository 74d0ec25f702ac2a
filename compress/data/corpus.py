"""Plain text as batches of token ids, with masked tokens if an objective needs them."""

import hashlib
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
import torch
from tokenizers import Tokenizer

from compress.data.batches import Batch, padded
from compress.data.encoded import IGNORED, unknown_id_of
from compress.data.sampler import Rows, Sampler, packed_rows
from serve.errors import BadInput
from serve.files import locked, replacing_folder

# BERT, section 3.1: the share of tokens chosen; of these, the shares that become the mask token or a random token.
CHOSEN_SHARE, MASKED_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1
# The files of a folder of tokenised text; increase the format when an older folder would be read wrongly.
IDS, WORDS, LENGTHS, IN_USE, DESCRIPTION, FORMAT = (
    "ids.bin",
    "words.bin",
    "lengths.bin",
    "ids-in-use.npy",
    "corpus.json",
    1,
)
SPECIAL = 255  # in `WORDS`: a token that belongs to no word
BLOCK = 256  # pieces
BATCH_CHARACTERS = 1_000_000


class Piece(NamedTuple):
    """A piece of text: token ids (tokens,), and the word number of each token (tokens,), -1 for special tokens."""

    ids: np.ndarray
    words: np.ndarray


@dataclass(frozen=True)
class Masking:
    """How tokens are masked: `mask_id` is the mask token, `size` the vocabulary's; `whole_words` masks words, not tokens."""

    mask_id: int
    size: int
    whole_words: bool = False


@dataclass(frozen=True)
class CorpusText:
    """Batches of rows of about equal length; the batch of a step depends only on the seed and the step's number.

    A row is a piece, or with `row_tokens` several pieces that have at most so many tokens together.
    """

    pieces: Sequence[Piece]
    pad_id: int
    batch: int
    seed: int
    masking: Masking | None = None
    row_tokens: int = 0

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each piece."""
        if isinstance(self.pieces, CorpusFile):
            return self.pieces.lengths
        return np.array([len(piece.ids) for piece in self.pieces])

    @cached_property
    def rows(self) -> Rows | None:
        """The packed rows; None if each piece is a row."""
        return packed_rows(self.lengths, self.row_tokens, self.seed) if self.row_tokens else None

    @cached_property
    def sampler(self) -> Sampler:
        """Chooses the rows of each step."""
        return Sampler(self.lengths if self.rows is None else self.rows.tokens, self.batch, self.seed)

    def pieces_at(self, step: int) -> list[list[int]]:
        """The numbers of the pieces in each row of step `step`."""
        chosen = self.sampler.at(step)
        return [[int(i)] for i in chosen] if self.rows is None else [self.rows[i].tolist() for i in chosen]

    @property
    def tokens_per_step(self) -> float:
        """Real tokens of a step, on average."""
        return float(self.sampler.lengths.sum()) / self.sampler.steps_per_epoch

    @property
    def ids(self) -> list[np.ndarray]:
        """All token ids that occur: the ids of each piece, or for files each id once."""
        if isinstance(self.pieces, CorpusFile):
            return [self.pieces.ids_in_use]
        return [piece.ids for piece in self.pieces]

    def at(self, step: int) -> Batch:
        """Ids and mask (batch, tokens). With masking, rows are the chosen tokens and targets their original ids."""
        chosen = self.pieces_at(step)
        tokens = [[self._ids(i) for i in row] for row in chosen]
        lengths = [[len(ids) for ids in row] for row in tokens]
        of_rows, of_pieces = np.array([sum(row) for row in lengths]), np.array([n for row in lengths for n in row])
        real = np.arange(of_rows.max()) < of_rows[:, None]  # (rows, tokens)
        # Made of all rows at once: a thread makes this while another launches a GPU's work, and Python runs one of them at a time.
        ids = _filled(np.concatenate([ids for row in tokens for ids in row]), real, self.pad_id)
        numbers = np.concatenate([np.arange(len(row)) + 1 for row in lengths])
        inputs = {"input_ids": ids, "attention_mask": _filled(np.repeat(numbers, of_pieces), real, 0)}
        rows, targets = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if self.masking:
            words = padded([_joined_words([self._words(i) for i in row]) for row in chosen], -1)
            generator = np.random.default_rng([self.seed, step, 1])
            hidden, inputs["input_ids"] = masked(ids, words, self.masking, generator)
            rows = np.flatnonzero(hidden != IGNORED)
            targets = hidden.ravel()[rows]
        if self.row_tokens:
            starts = of_pieces.cumsum() - of_pieces
            inputs["position_ids"] = _filled(np.arange(of_pieces.sum()) - np.repeat(starts, of_pieces), real, 0)
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        return Batch(tensors, torch.from_numpy(rows), torch.from_numpy(targets))

    def _ids(self, index: int) -> np.ndarray:
        pieces = self.pieces
        return pieces.ids_of(index) if isinstance(pieces, CorpusFile) else pieces[index].ids

    def _words(self, index: int) -> np.ndarray:
        pieces = self.pieces
        return pieces.words_of(index) if isinstance(pieces, CorpusFile) else pieces[index].words


def _filled(tokens: np.ndarray, real: np.ndarray, fill: int) -> np.ndarray:
    """`tokens` of all rows, one after the other, where `real` (rows, tokens) says so; elsewhere `fill`."""
    found = np.full(real.shape, fill, dtype=np.int64)
    found[real] = tokens
    return found


def _joined_words(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """The word numbers of pieces side by side: each begins above the last number of the piece before it."""
    joined, first = [], 0
    for words in pieces:
        joined.append(np.where(words >= 0, words + first, -1))
        first = int(joined[-1].max(initial=first - 1)) + 1
    return np.concatenate(joined)


def masked(
    ids: np.ndarray, words: np.ndarray, masking: Masking, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The targets (`IGNORED` for tokens that were not chosen) and the ids that the model reads; both (batch, tokens).

    Of the tokens in words (or of the words) 15 % are chosen, but at least one; of those 80 % become the mask token, 10 % a
    random one, and the rest do not change (BERT, section 3.1).
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


def chunks(texts: Iterable[str], tokenizer: Tokenizer, longest: int) -> list[Piece]:
    """`texts` cut into pieces of at most `longest` tokens, each with its own special tokens; all are held in memory."""
    return list(_pieces(texts, tokenizer, longest))


def tokenised(
    texts: Iterable[str], tokenizer: Tokenizer, longest: int, folder: Path, *, fingerprint: str
) -> "CorpusFile":
    """The pieces of `chunks` in files under `folder`, for texts of any size: a batch of texts is held at a time.

    The files in `folder` are used if they were made from the same texts, tokenizer and length. Otherwise new files are written
    beside it and renamed into place. Several processes may ask for the same folder: one of them writes.

    Args:
        texts: iterated at most once.
        tokenizer: its truncation and padding settings are ignored.
        longest: most tokens of a piece, special ones included.
        folder: made if absent.
        fingerprint: identifies the texts, as `compress.data.examples.examples_fingerprint` does.

    Raises:
        BadInput: `folder` holds other files; and what reading `texts` raises.
    """
    made_of = hashlib.sha256(f"{FORMAT} {fingerprint} {_cutting(tokenizer, longest).to_str()}".encode()).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(folder.name + ".lock")):
        if folder.exists() and not (folder / DESCRIPTION).is_file():
            raise BadInput(f"{folder} exists and holds no tokenised text; nothing was written. Give another folder.")
        if folder.exists() and json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))["mark"] == made_of:
            return CorpusFile(folder)
        with replacing_folder(folder, alone=True) as beside:
            _write(texts, tokenizer, longest, beside, made_of)
        return CorpusFile(folder)


class CorpusFile(Sequence[Piece]):
    """The pieces that `tokenised` wrote into `folder`. Each is read when indexed; memory holds 4 bytes a piece.

    Files are not memory-mapped, because mapped pages would count as this process's memory once they are read.
    """

    def __init__(self, folder: Path) -> None:
        self.ids, self.words = _descriptor(self, folder / IDS), _descriptor(self, folder / WORDS)
        about = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        self.fingerprint: str = about["mark"]  # of the texts, the tokenizer and the length
        self.unknown_share: float = about.get("unknown", 0.0)  # of the tokens
        self.id_type = np.dtype(about["ids"])
        self.lengths = np.fromfile(folder / LENGTHS, np.int32)  # (pieces,), tokens of each
        self.ids_in_use = np.load(folder / IN_USE, allow_pickle=False)  # ascending
        # The first token of each block of pieces; offsets within a block are summed when a piece is read.
        sums = np.add.reduceat(self.lengths, np.arange(0, len(self.lengths), BLOCK), dtype=np.int64)
        self.starts = np.concatenate([np.zeros(1, dtype=np.int64), sums.cumsum()])

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Piece: ...

    @overload
    def __getitem__(self, index: slice) -> list[Piece]: ...

    def __getitem__(self, index: int | slice) -> Piece | list[Piece]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= i < len(self):
            raise IndexError(f"piece {index} of {len(self)}")
        return Piece(self.ids_of(i), self.words_of(i))

    def ids_of(self, index: int) -> np.ndarray:
        """The token ids of a piece, (tokens,), int64."""
        width = self.id_type.itemsize
        read = os.pread(self.ids, width * int(self.lengths[index]), width * self._start(index))
        return np.frombuffer(read, self.id_type).astype(np.int64)

    def words_of(self, index: int) -> np.ndarray:
        """The word numbers of a piece, (tokens,), -1 for special tokens."""
        read = os.pread(self.words, int(self.lengths[index]), self._start(index))
        steps = np.frombuffer(read, np.uint8)  # as `_steps_of` gives them
        special = steps == SPECIAL
        return np.where(special, -1, np.where(special, 0, steps).cumsum(dtype=np.int64))

    def _start(self, index: int) -> int:
        block = index // BLOCK
        return int(self.starts[block] + self.lengths[block * BLOCK : index].sum(dtype=np.int64))


def _descriptor(owner: object, file: Path) -> int:
    """A descriptor of `file`, open for the life of `owner`, even if another process replaces the file."""
    number = os.open(file, os.O_RDONLY)
    weakref.finalize(owner, os.close, number)
    return number


def _cutting(tokenizer: Tokenizer, longest: int) -> Tokenizer:
    """A copy of `tokenizer` that cuts at `longest` tokens and pads nothing."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length=longest)
    return tokenizer


def _pieces(texts: Iterable[str], tokenizer: Tokenizer, longest: int) -> Iterator[Piece]:
    tokenizer = _cutting(tokenizer, longest)
    for batch in _batches(texts):
        for encoding in tokenizer.encode_batch(batch):
            for part in (encoding, *encoding.overflowing):
                words = np.array([-1 if word is None else word for word in part.word_ids], dtype=np.int64)
                if (words >= 0).any():
                    words = np.where(words >= 0, words - words[words >= 0].min(), -1)
                    yield Piece(np.array(part.ids, dtype=np.int64), words)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts to tokenise at once: 1,000, or fewer long ones, because tokenising takes 100 bytes of memory a token."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == 1_000 or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write(texts: Iterable[str], tokenizer: Tokenizer, longest: int, folder: Path, made_of: str) -> None:
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    id_type = np.dtype("<u2" if size <= 2**16 else "<i4")
    in_use = np.zeros(size, dtype=bool)
    unknown_id, unknown, tokens = unknown_id_of(tokenizer), 0, 0
    with (
        (folder / IDS).open("wb") as ids,
        (folder / WORDS).open("wb") as words,
        (folder / LENGTHS).open("wb") as lengths,
    ):
        for piece in _pieces(texts, tokenizer, longest):
            in_use[piece.ids] = True
            unknown, tokens = unknown + int(np.count_nonzero(piece.ids == unknown_id)), tokens + len(piece.ids)
            ids.write(piece.ids.astype(id_type).tobytes())
            words.write(_steps_of(piece.words).tobytes())
            lengths.write(np.int32(len(piece.ids)).tobytes())
    np.save(folder / IN_USE, np.flatnonzero(in_use), allow_pickle=False)
    (folder / DESCRIPTION).write_text(
        json.dumps({"mark": made_of, "ids": id_type.str, "unknown": unknown / max(1, tokens)})
    )


def _steps_of(words: np.ndarray) -> np.ndarray:
    """Word numbers (tokens,) as bytes: the difference from the word before, or `SPECIAL` for a token of no word.

    A difference above 254, over words without tokens, is stored as 254.
    """
    steps = np.full(len(words), SPECIAL, dtype=np.uint8)
    inside = words >= 0
    apart = np.diff(words[inside], prepend=0)
    steps[inside] = np.where(apart == 0, 0, np.clip(apart, 1, SPECIAL - 1))
    return steps


def masking_of(tokenizer: Tokenizer, size: int, *, whole_words: bool = False) -> Masking:
    """The masking for a tokenizer and a vocabulary of `size` rows. Raises BadInput: the tokenizer has no mask token."""
    for token in ("[MASK]", "<mask>"):
        found = tokenizer.token_to_id(token)
        if found is not None:
            return Masking(found, size, whole_words)
    raise BadInput(
        "The teacher's tokenizer has no mask token ([MASK] or <mask>), but this method trains on masked text. "
        "Give a method that reads hidden states or attention (minilmv2, minilm or hidden-states)."
    )
