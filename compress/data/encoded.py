"""Tokenised texts with the target of each row: of a whole text, or of the first token of a word."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tokenizers import Encoding, Tokenizer

from compress.data.examples import Entity, Example
from compress.data.task import Task
from serve.text.questions import EVEN_SCORE
from serve.wording import counted

UNKNOWN = 0.1  # share of unknown tokens in a text from which a warning says so
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
    # Of questions: which example each window is of, in order; and the score from which an answer is given.
    owners: np.ndarray | None = None
    answer_from: float = EVEN_SCORE
    # Of entities: `Example.blanks_in_words` of each text; empty if none is known.
    blanks_in_words: list[tuple[int, ...] | None] = field(default_factory=list)
    unknown_id: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def multi_label(self) -> bool:
        """Whether any number of labels may apply to a text; its targets are then (1, labels), 1 for each label that applies."""
        return self.task.multi_label

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


def encoded_texts(
    task: Task,
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    labels: Sequence[str],
    target_of: Callable[[Example], np.ndarray],
) -> Encoded:
    """`examples` of a task whose rows are whole texts, tokenised; `target_of` gives the target of each, (1,) or (1, labels)."""
    encodings: list[Encoding] = tokenizer.encode_batch([example.text_or_pair for example in examples])
    rows = [np.zeros(1, dtype=np.int64) for _ in examples]
    return encoded_rows(task, examples, tokenizer, labels, encodings, rows, [target_of(each) for each in examples])


def encoded_rows(
    task: Task,
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    labels: Sequence[str],
    encodings: list[Encoding],
    rows: list[np.ndarray],
    targets: list[np.ndarray],
) -> Encoded:
    """`examples` with their `encodings` by `tokenizer`, and the rows and targets of each."""
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
        blanks_in_words=[example.blanks_in_words for example in examples] if task.labels_words else [],
        unknown_id=unknown_id_of(tokenizer),
    )


def unknown_id_of(tokenizer: Tokenizer) -> int | None:
    """The id of the token for what the vocabulary lacks; None if there is none, as where tokens are bytes."""
    ids = (tokenizer.token_to_id(token) for token in ("[UNK]", "<unk>"))
    return next((found for found in ids if found is not None), None)


def unknown_warning(ids: Sequence[np.ndarray], unknown_id: int | None, where: str) -> list[str]:
    """A warning, in a list, if many of the tokens `ids` of each text in `where` are not in the vocabulary."""
    unknown = sum(int(np.count_nonzero(each == unknown_id)) for each in ids)
    return describe_unknown(unknown / max(1, sum(map(len, ids))), where)


def describe_unknown(share: float, where: str) -> list[str]:
    """As `unknown_warning`, for a known `share` of unknown tokens."""
    if share < UNKNOWN:
        return []
    return [
        f"{share:.0%} of the tokens in {where} are unknown: the model's vocabulary lacks these words, and it reads nothing in their "
        "place. Give text in the model's language, or a model for this text."
    ]


def pad_id_of(tokenizer: Tokenizer) -> int:
    """The id of padding; 0 if the tokenizer has no such token, which is harmless as padding is masked."""
    for token in ("[PAD]", "<pad>"):
        found = tokenizer.token_to_id(token)
        if found is not None:
            return found
    return 0


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


def text_warnings(encoded: Encoded, examples: Sequence[Example], max_length: int, where: str) -> list[str]:
    """One sentence for each kind of warning about `examples` of the split or file `where`, which `encoded` has with `max_length` tokens."""
    found: list[str] = []
    if encoded.truncated:
        found.append(
            f"{encoded.truncated} of {counted(len(encoded), 'text')} in {where} {'is' if encoded.truncated == 1 else 'are'} "
            f"longer than {max_length} tokens: training and scoring ignore the rest."
        )
    found += unknown_warning(encoded.ids, encoded.unknown_id, where)
    return found + encoded.task.text_warnings(encoded, examples, where)
