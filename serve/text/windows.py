"""Texts longer than the model: overlapping windows over their tokens, and merging the logits of the windows.

The whole text is tokenised. Each window is a part of its tokens, with the special tokens that the tokenizer puts around every
text. The windows depend on the text alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Encoding

from serve.errors import BadInput
from serve.text.spans import words

# Each window shares at least a quarter (1 / SHARED) of its own tokens with the next. This costs a third more tokens, and every
# token has at least an eighth of a window on either side in one of the windows, unless the text ends there.
SHARED = 4


@dataclass(frozen=True)
class TokenRow:
    """A row of tokens for the session, with the attributes of a tokenizer's `Encoding`; raw token ids have no offsets."""

    ids: Sequence[int] | np.ndarray
    attention_mask: Sequence[int] | np.ndarray
    type_ids: Sequence[int] | np.ndarray
    offsets: list[tuple[int, int]] = field(default_factory=list)
    word_ids: list[int | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)


Row = Encoding | TokenRow


class WindowedText(ABC):
    """The windows over one text, and their logits so far."""

    tokens: Row

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, window: int) -> TokenRow:
        """The tokens of one window, special ones included."""

    @abstractmethod
    def row_length(self, window: int) -> int:
        """The number of these tokens."""

    @abstractmethod
    def take(self, window: int, logits: np.ndarray) -> Any:
        """Stores the logits of one window. With the last window it returns those of the text; otherwise None."""


class Windows(WindowedText):
    """The windows over one `text`, whose whole `encoding` has more than `max_length` tokens; and their logits so far.

    Each window has `max_length` tokens. They are spread evenly, and are the fewest that share a quarter of their own tokens.
    """

    def __init__(self, text: str, encoding: Encoding, max_length: int) -> None:
        self._text = text
        first, last = content(encoding)
        room = max_length - len(encoding) + last - first
        self.tokens = TokenRow(
            encoding.ids, encoding.attention_mask, encoding.type_ids, encoding.offsets, encoding.word_ids
        )
        """The tokens of the whole text, special ones included."""
        self.starts = window_starts(last - first, room)
        self._max_length = max_length
        self._first, self._last, self._room = first, last, room
        self._seen = 0
        self._merged = np.empty(0)

    def __len__(self) -> int:
        return len(self.starts)

    def row_length(self, window: int) -> int:
        """Every window is as long as the model allows."""
        return self._max_length

    def row(self, window: int) -> TokenRow:
        """The tokens of one window, special ones included."""
        start = self._first + self.starts[window]
        places = [*range(self._first), *range(start, start + self._room), *range(self._last, len(self.tokens))]
        return chosen(self.tokens, places)

    def take(self, window: int, logits: np.ndarray) -> np.ndarray | None:
        """As of `WindowedText`; the logits of the text are (tokens, tags) or (labels,).

        A token gets the logits of the window that decides it. Classes get the mean over the windows, each weighted by the
        tokens that it decides, so that no token counts twice. Up to a constant, a mean of logits is a mean of
        log-probabilities: the logarithmic opinion pool (Genest and Zidek 1986, section 3.2). Labels that each apply on their
        own use the same mean.
        """
        of_tokens = logits.ndim > 1
        if not self._seen:
            self._merged = np.zeros((len(self.tokens if of_tokens else self), logits.shape[-1]), dtype=logits.dtype)
        if of_tokens:
            start = self.starts[window]
            own = np.flatnonzero(self._deciding_words[start : start + self._room] == window)
            self._merged[self._first + start + own] = logits[self._first + own]
        else:
            self._merged[window] = logits
        self._seen += 1
        if self._seen < len(self):
            return None
        if of_tokens:
            return self._merged
        weights = np.bincount(self._deciding, minlength=len(self))
        return np.asarray(np.average(self._merged.astype(np.float64), axis=0, weights=weights))

    @cached_property
    def _deciding(self) -> np.ndarray:
        """The window that decides each of the text's own tokens: shape (own tokens,)."""
        tokens = np.arange(self._last - self._first)
        return deciding(self.starts, self._room, tokens, tokens)

    @cached_property
    def _deciding_words(self) -> np.ndarray:
        """The same, but one window decides all tokens of a word: where the word has the most context, if a window holds it whole."""
        of_tokens = self._deciding.copy()
        long_words = [
            word
            for word in words(self._text, self.tokens.offsets, self.tokens.word_ids)
            if word.last_token > word.first_token
        ]
        firsts = np.array([word.first_token for word in long_words], dtype=np.intp) - self._first
        lasts = np.array([word.last_token for word in long_words], dtype=np.intp) - self._first
        for first, last, window in zip(firsts, lasts, deciding(self.starts, self._room, firsts, lasts), strict=True):
            if window >= 0:
                of_tokens[first : last + 1] = window
        return of_tokens


def content(encoding: Encoding) -> tuple[int, int]:
    """The start and end (exclusive) of the text's own tokens between the special tokens around them."""
    special = encoding.special_tokens_mask
    first, last = 0, len(special)
    while first < last and special[first]:
        first += 1
    while first < last and special[last - 1]:
        last -= 1
    return first, last


def window_starts(tokens: int, room: int, shared: int | None = None) -> list[int]:
    """The start of each window of `room` tokens in a text of more than `room` `tokens`. The last window ends with the text.

    Each shares at least `shared` tokens with the next, without a number 1 / `SHARED` of its own.

    >>> window_starts(12, 8), window_starts(20, 8)
    ([0, 4], [0, 6, 12])
    """
    shared = room // SHARED if shared is None else shared
    windows = -(-(tokens - shared) // (room - shared))
    return [index * (tokens - room) // (windows - 1) for index in range(windows)]


def deciding(starts: Sequence[int], room: int, firsts: np.ndarray, lasts: np.ndarray) -> np.ndarray:
    """The window that decides each stretch of tokens, `firsts` to `lasts` (inclusive, ascending); -1 if no window holds it whole.

    It is the window with the most context: the most tokens between the stretch and the nearer end of the window; of equal ones
    the earlier. The rule is that of BERT's `_check_is_max_context` (Devlin et al. 2019, run_squad.py). Start and end of the text
    need no extra rule: no window reaches further left than the first, or further right than the last.
    """
    windows = np.full(len(firsts), -1, dtype=np.intp)
    most = np.full(len(firsts), -1, dtype=np.intp)
    for window, start in enumerate(starts):
        end = start + room
        # The stretches are sorted, so those that a window may hold are neighbours.
        near = slice(np.searchsorted(firsts, start), np.searchsorted(firsts, end))
        context = np.minimum(firsts[near] - start, end - 1 - lasts[near])  # negative if the window does not hold it
        better = context > most[near]
        windows[near][better] = window
        most[near][better] = context[better]
    return windows


def marked_window(encoding: Encoding, max_length: int, markers: Collection[int]) -> TokenRow:
    """One window of a long text, centred on the tokens whose ids are in `markers`: the model of relations reads no other part.

    BadInput when the markers are too far apart for one window.
    """
    first, last = content(encoding)
    room = max_length - len(encoding) + last - first
    ids = encoding.ids
    at = [place for place in range(first, last) if ids[place] in markers]
    if at[-1] + 1 - at[0] > room:
        raise BadInput(
            f"text: its two parts span {at[-1] + 1 - at[0]:,} tokens, markers included, and the model reads {room:,} at "
            "once; send parts that are nearer to each other",
            field="text",
        )
    start = min(max(first, (at[0] + at[-1] + 1 - room) // 2), last - room)
    return chosen(encoding, [*range(first), *range(start, start + room), *range(last, len(ids))])


def cut(encoding: Encoding, max_length: int) -> Row:
    """The tokens of a text, or of a text and its pair, cut at the end to `max_length`, as in training.

    Of a pair, the longer text is cut to the room that the shorter one leaves; if both are longer than half, each is cut to half.
    This is `longest_first` of tokenizers.
    """
    if len(encoding) <= max_length:
        return encoding
    sequence_ids = [
        None if special else sequence
        for special, sequence in zip(encoding.special_tokens_mask, encoding.sequence_ids, strict=True)
    ]
    lengths = (sequence_ids.count(0), sequence_ids.count(1))
    room = max_length - len(encoding) + sum(lengths)
    shorter = min(lengths)
    kept_of_shorter = shorter if 2 * shorter <= room else room // 2
    kept = (
        [kept_of_shorter, room - kept_of_shorter]
        if lengths[0] <= lengths[1]
        else [room - kept_of_shorter, kept_of_shorter]
    )
    places: list[int] = []
    for place, sequence in enumerate(sequence_ids):
        if sequence is None:
            places.append(place)
        elif kept[sequence] > 0:
            kept[sequence] -= 1
            places.append(place)
    return chosen(encoding, places)


def chosen(tokens: Row, places: Sequence[int]) -> TokenRow:
    """The tokens at `places`."""
    ids, attention_mask, type_ids = tokens.ids, tokens.attention_mask, tokens.type_ids
    offsets, word_ids = tokens.offsets, tokens.word_ids
    return TokenRow(
        [ids[place] for place in places],
        [attention_mask[place] for place in places],
        [type_ids[place] for place in places],
        [offsets[place] for place in places],
        [word_ids[place] for place in places],
    )
