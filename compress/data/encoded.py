"""Tokenised texts with the target of each row: of a whole text, or of the first token of a word."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tokenizers import Encoding, Tokenizer

from compress.data.examples import Entity, Example, Task, number_of
from serve.text.questions import EVEN_SCORE, QuestionRow, question_rows
from serve.text.spans import Word, words

# Whole encodings, of which training keeps only windows, are held for so many questions at a time.
QUESTIONS_AT_ONCE = 1000
IGNORED = -100  # the target of a row that carries no label; of a number it is NaN


@dataclass(frozen=True)
class Encoded:
    """Tokenised texts and, if labels are known, the target of each row.

    A row gets one answer: it is a whole text, or the first token of a word. `rows[i]` are the token positions of the rows of
    text `i` (position 0 alone for a whole text, whose answer is pooled), `targets[i]` the label index of each, or its number (float32).

    Of questions, each window over a context is a text here, `texts[i]` is the whole context, and its rows are the first token and those of
    the context in this window. Their targets are (rows, 3): 1 for the window's first row, 1 where an answer starts, 1 where it ends.
    """

    task: Task
    labels: tuple[str, ...]
    texts: list[str]
    encodings: list[Encoding]
    ids: list[np.ndarray]
    rows: list[np.ndarray]
    targets: list[np.ndarray]
    truncated: int
    pad_id: int
    # Whether any number of labels may apply to a text; its targets are then (1, labels), 1 for each label that applies.
    multi_label: bool = False
    # Of questions: which example each window is of, in order; and the score from which an answer is given.
    owners: np.ndarray | None = None
    answer_from: float = EVEN_SCORE
    # Of entities: `Example.blanks_in_words` of each text; empty if none is known.
    blanks_in_words: list[tuple[int, ...] | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> "Encoded":
        return self.take(range(len(self))[part])

    def take(self, chosen: Sequence[int]) -> "Encoded":
        """The texts of the indices `chosen`, in that order."""
        encodings = [self.encodings[i] for i in chosen]
        return replace(
            self,
            texts=[self.texts[i] for i in chosen],
            encodings=encodings,
            ids=[self.ids[i] for i in chosen],
            rows=[self.rows[i] for i in chosen],
            targets=[self.targets[i] for i in chosen],
            truncated=sum(bool(encoding.overflowing) for encoding in encodings),
            owners=None if self.owners is None else self.owners[list(chosen)],
            blanks_in_words=[self.blanks_in_words[i] for i in chosen] if self.blanks_in_words else [],
        )

    def __add__(self, other: "Encoded") -> "Encoded":
        both = [each.owners for each in (self, other) if each.owners is not None]
        return replace(
            self,
            texts=self.texts + other.texts,
            encodings=self.encodings + other.encodings,
            ids=self.ids + other.ids,
            rows=self.rows + other.rows,
            targets=self.targets + other.targets,
            truncated=self.truncated + other.truncated,
            owners=np.concatenate([both[0], both[1] + 1 + both[0].max(initial=-1)]) if len(both) == 2 else None,
            blanks_in_words=[blanks for each in (self, other) for blanks in each.blanks_in_words or [None] * len(each)],
        )


def encode(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    task: Task,
    labels: Sequence[str],
    *,
    multi_label: bool = False,
) -> Encoded:
    """Tokenise `examples`; `labels` are classes or tags by index. Other labels of the examples give no target.

    With `multi_label` any number of labels may apply to a text.
    """
    if task == "question-answering":
        return _questions(examples, tokenizer, labels)
    index = {label: i for i, label in enumerate(labels)}
    encodings: list[Encoding] = tokenizer.encode_batch([example.text_or_pair for example in examples])
    rows: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for example, encoding in zip(examples, encodings, strict=True):
        if task != "token-classification":
            rows.append(np.zeros(1, dtype=np.int64))
            if task == "text-regression":
                targets.append(np.array([number_of(example)], dtype=np.float32))
            elif multi_label:
                targets.append(_several(example, index))
            else:
                known = index.get(example.label, IGNORED) if isinstance(example.label, str) else IGNORED
                targets.append(np.array([known], dtype=np.int64))
        else:
            found = words(example.text, encoding.offsets, encoding.word_ids)
            rows.append(np.array([word.first_token for word in found], dtype=np.int64))
            targets.append(_tags(example, found, index))
    return Encoded(
        task,
        tuple(labels),
        [e.text for e in examples],
        encodings,
        [np.array(e.ids, dtype=np.int64) for e in encodings],
        rows,
        targets,
        sum(bool(e.overflowing) for e in encodings),
        pad_id_of(tokenizer),
        multi_label,
        blanks_in_words=[example.blanks_in_words for example in examples] if task == "token-classification" else [],
    )


def _questions(examples: Sequence[Example], tokenizer: Tokenizer, labels: Sequence[str]) -> Encoded:
    """The windows over the contexts of `examples`."""
    truncation = tokenizer.truncation
    tokenizer.no_truncation()  # a window is cut from all of a context
    max_length = truncation["max_length"] if truncation else None
    of_window: list[tuple[int, QuestionRow]] = []
    try:
        for first in range(0, len(examples), QUESTIONS_AT_ONCE):
            batch = examples[first : first + QUESTIONS_AT_ONCE]
            encodings: list[Encoding] = tokenizer.encode_batch([example.text_or_pair for example in batch])
            for owner, (example, encoding) in enumerate(zip(batch, encodings, strict=True), first):
                rows = question_rows(encoding, example.text_pair or "", max_length or max(1, len(encoding)))
                of_window += [(owner, row) for row in rows]
    finally:
        if truncation:
            tokenizer.enable_truncation(**truncation)
    contexts = [examples[owner].text_pair or "" for owner, _ in of_window]
    return Encoded(
        "question-answering",
        tuple(labels),
        contexts,
        [row for _, row in of_window],  # type: ignore[misc]  # rows have the attributes of encodings
        [np.asarray(row.ids) for _, row in of_window],
        [row.places for _, row in of_window],
        [_span_targets(examples[owner], row) for owner, row in of_window],
        0,
        pad_id_of(tokenizer),
        owners=np.array([owner for owner, _ in of_window], dtype=np.int64),
    )


def _span_targets(example: Example, row: QuestionRow) -> np.ndarray:
    """The targets of one window, (rows, 3): those of the first answer that it holds whole, or the first row for none.

    A window of a question whose answers are unknown has no start and no end.
    """
    targets = np.zeros((1 + row.last - row.first, 3), dtype=np.int8)
    targets[0, 0] = 1
    if example.answers is None:
        return targets
    starts, ends, firsts, lasts = row.words.T
    for start, end in example.answers:
        at_start = np.flatnonzero((starts <= start) & (start < ends))
        at_end = np.flatnonzero((starts < end) & (end <= ends))
        if len(at_start) and len(at_end):
            targets[1 + firsts[at_start[0]], 1] = targets[1 + lasts[at_end[0]], 2] = 1
            return targets
    targets[0, 1:] = 1
    return targets


def pad_id_of(tokenizer: Tokenizer) -> int:
    """The id of padding; 0 if the tokenizer has no such token, which is harmless as padding is masked."""
    for token in ("[PAD]", "<pad>"):
        found = tokenizer.token_to_id(token)
        if found is not None:
            return found
    return 0


def _several(example: Example, index: dict[str, int]) -> np.ndarray:
    """The labels that apply, (1, labels): 1 for each that does, otherwise 0; `IGNORED` for all if the label is unknown."""
    applies = np.full((1, len(index)), IGNORED if example.label is None else 0, dtype=np.float32)
    names = example.label if isinstance(example.label, tuple) else ()
    applies[0, [index[name] for name in names if name in index]] = 1
    return applies


def _tags(example: Example, found: Sequence[Word], index: dict[str, int]) -> np.ndarray:
    """The tag of each word: that of the entity that overlaps it, with `B` on the first word of an entity."""
    if example.entities is None:
        return np.full(len(found), IGNORED, dtype=np.int64)
    tags = np.full(len(found), index.get("O", IGNORED), dtype=np.int64)
    for row, (at, prefix) in enumerate(entities_at([(word.start, word.end) for word in found], example.entities)):
        if at >= 0:
            tags[row] = index.get(f"{prefix}-{example.entities[at].label}", IGNORED)
    return tags


def entities_at(places: Sequence[tuple[int, int]], entities: Sequence[Entity]) -> list[tuple[int, str]]:
    """For each word at `places` (start, end) the index of the entity that it overlaps, and `B` on the entity's first word, else `I`.

    Outside all entities it is -1 and `O`.
    """
    found: list[tuple[int, str]] = []
    at, opened = 0, -1
    for start, end in places:
        while at < len(entities) and entities[at].end <= start:
            at += 1
        if at < len(entities) and entities[at].start < end:
            found.append((at, "I" if opened == at else "B"))
            opened = at
        else:
            found.append((-1, "O"))
    return found
