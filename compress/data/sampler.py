"""Chooses the texts of each step of a training, packs pieces of text into rows of full length, and draws some of many rows.

A step on short lines has few tokens if each is a row of its own. In packed rows every step has about the same number of
tokens, whatever the lengths of the lines. Models keep the pieces of a row apart (`compress.models.families`), and so do the
losses (`compress.losses.outputs.sequence_lengths`): all numbers are those of the pieces alone.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Row = TypeVar("Row")
POOL = 64  # batches whose texts are sorted by length together, at most


def language_counts(languages: Sequence[str], temperature: float) -> np.ndarray:
    """How often to read each text in an epoch, (texts,), float64, so that small languages are seen; the sum is the number of texts.

    Of `n` texts, those of one language together get a share that goes with `n ** (1 / temperature)`: 1 reads each text once, and a
    large temperature gives all languages the same (multilingual BERT has 1.43, XLM-R 3.33: section 3.1 of its paper). Texts of one
    language are read equally often.
    """
    texts = Counter(languages)
    powers = {language: count ** (1 / temperature) for language, count in texts.items()}
    each = {
        language: len(languages) * power / sum(powers.values()) / texts[language] for language, power in powers.items()
    }
    return np.array([each[language] for language in languages], dtype=np.float64)


@dataclass(frozen=True)
class Sampler:
    """Chooses `batch` texts of about equal length for each step, every text once an epoch, shuffled by `seed`.

    With `counts` (texts,) a text is read that often in an epoch on average: so often, or once more where that is no whole number. With
    `labelled` each step has as many of the first `labelled` texts as any other, in proportion to all texts, but one at least of them and of
    the rest; `batch` is then 2 or more. With `even` steps differ by one text at most, and few texts are shuffled so that each meets others
    in every epoch.
    """

    lengths: np.ndarray
    batch: int
    seed: int
    counts: np.ndarray | None = None
    labelled: int = 0
    even: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every text occurs once."""
        return -(-len(self.lengths) // self.batch)

    @property
    def reads(self) -> np.ndarray:
        """How often a step has each text, on average, (texts,)."""
        found = np.zeros(len(self.lengths))
        for texts, number in self._kinds:
            counts = np.ones(len(texts)) if self.counts is None else self.counts[texts]
            found[texts] = counts * (number / counts.sum() / self.steps_per_epoch)
        return found

    def tokens_at(self, step: int) -> int:
        """Real tokens of step `step`."""
        return int(self.lengths[self.at(step)].sum())

    def at(self, step: int) -> np.ndarray:
        """Indices of the texts of step `step`."""
        epoch, within = divmod(step, self.steps_per_epoch)
        ordered, turns = self._epoch(epoch)
        first, end = (self._before(int(turns[within]) + more, len(ordered)) for more in (0, 1))
        chosen: np.ndarray = ordered[first:end]
        return chosen

    @property
    def _kinds(self) -> list[tuple[np.ndarray, int]]:
        """The texts of each kind, and how many of them an epoch reads."""
        texts, steps = np.arange(len(self.lengths)), self.steps_per_epoch
        if not 0 < self.labelled < len(texts):
            return [(texts, len(texts))]
        some = int(np.clip(round(self.batch * self.labelled / len(texts)), 1, self.batch - 1))
        return list(zip(np.split(texts, [self.labelled]), (steps * some, steps * (self.batch - some)), strict=True))

    def _before(self, turn: int, number: int) -> int:
        """How many of the `number` texts of an epoch come before its batch `turn`."""
        return number * turn // self.steps_per_epoch if self.even or self.labelled else min(number, turn * self.batch)

    def _drawn(self, generator: np.random.Generator, texts: np.ndarray, number: int) -> np.ndarray:
        """`number` of `texts` in batches of about equal length, each as often as the others or as its count says, or once more."""
        order = texts[generator.permutation(len(texts))]
        if self.counts is not None or number != len(texts):
            # Systematic sampling: evenly spaced points on the texts laid end to end, each as long as its count.
            ends = np.cumsum(np.ones(len(texts)) if self.counts is None else self.counts[order])
            points = (np.arange(number) + generator.random()) * (ends[-1] / number)
            order = generator.permutation(order[np.searchsorted(ends, points, side="right").clip(max=len(order) - 1)])
        # Sorting within pools of 64 batches keeps padding low and still mixes texts; in one pool of all texts the same would always meet.
        steps = self.steps_per_epoch
        pool = min(POOL, max(8, steps // 4), max(1, steps // 2)) if self.even else POOL
        for turn in range(0, steps, pool):
            part = slice(self._before(turn, number), self._before(min(turn + pool, steps), number))
            order[part] = order[part][np.argsort(self.lengths[order[part]], kind="stable")]
        return order

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The indices of all texts, those of a batch next to each other, and the order of the batches; 8 bytes a text."""
        cached: tuple[int, tuple[np.ndarray, np.ndarray]] | None = self.__dict__.get("cached")
        if cached is None or cached[0] != epoch:
            object.__setattr__(self, "cached", None)  # frees the old order before the next is made
            generator = np.random.default_rng([self.seed, epoch])
            order, *rest = [self._drawn(generator, *kind) for kind in self._kinds]
            if rest:  # of both the shorter ones come together, since each is sorted in pools of as many batches
                steps = self.steps_per_epoch
                order = np.concatenate([order.reshape(steps, -1), rest[0].reshape(steps, -1)], axis=1).ravel()
            cached = (epoch, (order, generator.permutation(self.steps_per_epoch)))
            object.__setattr__(self, "cached", cached)
        return cached[1]


# Pieces that are packed together. 99.7 % of the tokens of rows were real for lines of 12 tokens, 99.9 % for pieces of up to 128.
WINDOW = 16_384


# Least steps of a stage on packed rows: one of 28 steps learned far less than one of 294 from the same text
# (docs/measurements/training.md, "Packed rows").
LEAST_STEPS = 300


@dataclass(frozen=True)
class Rows:
    """Rows of pieces, 8 bytes a piece and 12 a row: row `i` holds `pieces[starts[i] : starts[i + 1]]`."""

    pieces: np.ndarray  # (pieces,) their numbers
    starts: np.ndarray  # (rows + 1,)
    tokens: np.ndarray  # (rows,)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> np.ndarray:
        found: np.ndarray = self.pieces[self.starts[row] : self.starts[row + 1]]
        return found


def rows_a_step(batch: int, tokens: float, row_tokens: int) -> int:
    """The packed rows of a step: `batch`, or fewer where `tokens` are then read in less than `LEAST_STEPS` steps.

    >>> rows_a_step(32, 3_000_000, 128), rows_a_step(32, 300_000, 128), rows_a_step(32, 10_000, 128)
    (32, 7, 1)
    """
    return max(1, min(batch, int(tokens / (LEAST_STEPS * row_tokens))))


def packed_rows(lengths: np.ndarray, row_tokens: int, seed: int) -> Rows:
    """All pieces, each once, in rows of at most `row_tokens` tokens; the rows depend on `lengths` and `seed` alone.

    The pieces of a window, shuffled by `seed`, are packed by best-fit decreasing: the longest first, each into the fullest row
    that has room for it (Johnson 1973). Every epoch has the same rows, in another order.

    Args:
        lengths: (pieces,), the tokens of each, from 1 to `row_tokens`.
        row_tokens: the most tokens of a row.
        seed: decides which pieces may meet.
    """
    assert 0 < lengths.min() <= lengths.max() <= row_tokens
    order = np.random.default_rng([seed, 0, 2]).permutation(len(lengths))
    counts: list[np.ndarray] = []
    for first in range(0, len(order), WINDOW):
        window = order[first : first + WINDOW]
        rows = _best_fit(window[np.argsort(-lengths[window], kind="stable")], lengths, row_tokens)
        order[first : first + WINDOW] = np.concatenate(rows)
        counts.append(np.array([len(row) for row in rows]))
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.concatenate(counts).cumsum(dtype=np.int64)])
    return Rows(order, starts, np.add.reduceat(lengths[order], starts[:-1], dtype=np.int32))


def _best_fit(pieces: np.ndarray, lengths: np.ndarray, row_tokens: int) -> list[list[int]]:
    """Rows of `pieces`, which come longest first."""
    rows: list[list[int]] = []
    with_room: list[list[list[int]]] = [[] for _ in range(row_tokens + 1)]  # rows by the tokens that they have room for
    rooms = 0  # bit `n` is set if a row has room for exactly `n` tokens
    for piece, length in zip(pieces.tolist(), lengths[pieces].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the lowest bit: the fullest row
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            row, room = [], row_tokens
            rows.append(row)
        row.append(piece)
        with_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows


def subset(rows: Sequence[Row], count: int, seed: int = 0) -> list[Row]:
    """`count` of `rows`, drawn without repeats, in their own order; all rows if there are no more.

    They are drawn because the first rows of a file may all have the same label. The same rows, count and seed give the same subset.
    """
    if len(rows) <= count:
        return list(rows)
    drawn = np.random.default_rng(seed).choice(len(rows), count, replace=False)
    return [rows[i] for i in sorted(drawn)]
