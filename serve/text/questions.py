"""A question about a context: the windows that the model reads, and the stretch of the context that answers it.

The model gives each token two logits: of the answer's start, and of its end. The first token of the row stands for "no answer"
(Devlin et al. 2019, "BERT", sections 4.2 and 4.3). Training, evaluation and the server share these windows and this choice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding

from serve.text.spans import words
from serve.text.windows import TokenRow, WindowedText, window_starts

# Tokens that a window of a long context shares with the next, at most half of its own; and the longest question and answer, as
# those of BERT's run_squad.py.
SHARED_TOKENS = 128
MOST_QUESTION_TOKENS = 64
MOST_ANSWER_TOKENS = 30
SPECIAL = 3  # tokens round both, in most families
# From which score an answer is given, if nothing else was chosen: there it is as likely as none.
EVEN_SCORE = 0.5


NO_WORDS = np.empty((0, 4), dtype=np.int32)


@dataclass(frozen=True)
class QuestionRow(TokenRow):
    """One window: the question, and the tokens `first` to `last` (exclusive) of the row, which are the context's from `start` on.

    Training holds all windows of its data at once, so they are arrays, which take a twentieth of the memory of lists.
    """

    first: int = 0
    last: int = 0
    start: int = 0
    words: np.ndarray = field(default_factory=lambda: NO_WORDS)
    """The words in the window, (words, 4): start and end in the context, first and last token counted from `first`."""
    overflowing: tuple[()] = ()
    """Nothing: further windows have the rest."""

    @property
    def places(self) -> np.ndarray:
        """The tokens whose logits decide: the first of the row, then those of the context."""
        return np.array([0, *range(self.first, self.last)], dtype=np.int64)


class Found(NamedTuple):
    """The likeliest answer: `context[start:end]`, and how much likelier it is than none, from 0 to 1; without words an empty one."""

    start: int
    end: int
    score: float


def question_rows(encoding: Encoding, context: str, max_length: int) -> list[QuestionRow]:
    """The windows over the whole `encoding` of a question and its `context`, of at most `max_length` tokens each.

    They are spread evenly over the context, and are the fewest that share `SHARED_TOKENS`. A question is cut to
    `MOST_QUESTION_TOKENS`, and if not all fits, to half of a shorter row.
    """
    sequence_ids = encoding.sequence_ids
    special = sequence_ids.count(None)
    question = [place for place, sequence in enumerate(sequence_ids) if sequence == 0]
    own = [place for place, sequence in enumerate(sequence_ids) if sequence == 1]
    after = own[0] if own else len(sequence_ids)
    fits = len(sequence_ids) <= max_length
    dropped = question[
        max(1, MOST_QUESTION_TOKENS if fits else min(MOST_QUESTION_TOKENS, (max_length - special) // 2)) :
    ]
    head = np.delete(np.arange(after), dropped)
    tail = np.arange(own[-1] + 1, len(sequence_ids)) if own else np.empty(0, dtype=np.int64)
    room = max(1, max_length - len(head) - len(tail))
    starts = window_starts(len(own), room, min(SHARED_TOKENS, room // 2)) if len(own) > room else [0]
    ids, type_ids = np.array(encoding.ids, dtype=np.int32), np.array(encoding.type_ids, dtype=np.int8)
    offsets, word_ids = encoding.offsets, encoding.word_ids
    rows = []
    for start in starts:
        inside = slice(after + start, min(after + start + room, after + len(own)))
        places = np.concatenate([head, np.arange(inside.start, inside.stop), tail])
        window_words = words(context, offsets[inside], word_ids[inside])
        rows.append(
            QuestionRow(
                ids[places],
                np.ones(len(places), dtype=np.int8),
                type_ids[places],
                first=len(head),
                last=len(places) - len(tail),
                start=start,
                words=np.array(window_words, dtype=np.int32) if window_words else NO_WORDS,
            )
        )
    return rows


def tokens_of_windows(question: int, context: int, max_length: int) -> int:
    """The tokens of all windows of a question and a context of so many tokens, with three special ones in each."""
    asked = SPECIAL + min(question, MOST_QUESTION_TOKENS)
    if question + context + SPECIAL > max_length:
        asked = min(asked, SPECIAL + max(1, (max_length - SPECIAL) // 2))
    room = max(1, max_length - asked)
    if context <= room:
        return asked + context
    return len(window_starts(context, room, min(SHARED_TOKENS, room // 2))) * (asked + room)


def found_answer(rows: Sequence[QuestionRow], logits: Sequence[np.ndarray]) -> Found:
    """The likeliest answer in a context, from the logits of each window's `places`, (places, 2): start and end.

    Of all stretches of whole words of at most `MOST_ANSWER_TOKENS` in one window, the one with the largest sum of both logits; of equal
    ones the first. Its score is the sigmoid of that sum less the sum for no answer, which is the least of the windows' (as in
    run_squad.py, SQuAD 2.0). There an answer starts only in the window where its first token has the most context; here in any.
    """
    best, start, end = -math.inf, 0, 0
    for row, of_row in zip(rows, logits, strict=True):
        if not len(row.words):
            continue
        firsts, lasts = row.words[:, 2], row.words[:, 3]
        sums = of_row[1 + firsts, 0].astype(np.float64)[:, None] + of_row[1 + lasts, 1].astype(np.float64)[None, :]
        tokens = lasts[None, :] - firsts[:, None] + 1
        sums[(tokens < 1) | (tokens > MOST_ANSWER_TOKENS)] = -math.inf
        at = int(sums.argmax())
        if sums.flat[at] > best:
            best = float(sums.flat[at])
            start, end = int(row.words[at // len(firsts), 0]), int(row.words[at % len(firsts), 1])
    none = min(float(of_row[0].astype(np.float64).sum()) for of_row in logits)
    return Found(start, end, _sigmoid(best - none))


class QuestionWindows(WindowedText):
    """The windows of one question, and their logits so far."""

    def __init__(self, rows: list[QuestionRow]) -> None:
        self._rows = rows
        self.tokens = rows[0]
        self._logits: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, window: int) -> QuestionRow:
        """The tokens of one window."""
        return self._rows[window]

    def row_length(self, window: int) -> int:
        """The number of these tokens."""
        return len(self._rows[window])

    def take(self, window: int, logits: np.ndarray) -> Found | None:
        """Stores the logits of one window, (tokens, 2). With the last window it returns the likeliest answer; otherwise None."""
        self._logits[window] = logits[self._rows[window].places]
        if len(self._logits) < len(self._rows):
            return None
        return found_answer(self._rows, [self._logits[each] for each in range(len(self._rows))])


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) if x > -700 else 0.0
