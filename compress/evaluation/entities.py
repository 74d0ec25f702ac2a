"""Entities as scores count them: a model's spans, and those of text that came as words widened to its words. No torch."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from compress.data.encoded import Encoded
from serve.text.answers import softmax
from serve.text.spans import Span, decode_spans, words


def widened(
    spans: Iterable[tuple[int, int, str]], text: str, blanks_in_words: Sequence[int] | None
) -> frozenset[tuple[int, int, str]]:
    """The spans of `each_widened`, without those that have no word of their own."""
    return frozenset(span for span in each_widened(sorted(spans), text, blanks_in_words) if span)


def each_widened(
    spans: Iterable[tuple[int, int, str]], text: str, blanks_in_words: Sequence[int] | None
) -> list[tuple[int, int, str] | None]:
    """Each of `spans` of `text`, (start, end, label), widened to the words that it touches; as it is if the text did not come as words.

    A word that two spans touch belongs to the first of them, so that each word has one tag, as in conlleval. A span that touches only
    words of the one before it is None.

    Args:
        spans: in order, of code points, without overlap, each with other characters than blanks at its ends.
        text: the words, joined by blanks.
        blanks_in_words: the blanks that are inside of words; None if the text did not come as words.
    """
    if blanks_in_words is None:
        return list(spans)
    found: list[tuple[int, int, str] | None] = []
    reached = 0
    for start, end, label in spans:
        before, after = text.rfind(" ", 0, start), text.find(" ", end)
        while before in blanks_in_words:
            before = text.rfind(" ", 0, before)
        while after in blanks_in_words:
            after = text.find(" ", after + 1)
        first, reached = max(before + 1, reached), after if after >= 0 else len(text)
        there = text[first:reached].strip()
        first = text.index(there, first) if there else first
        found.append((first, first + len(there), label) if there else None)
    return found


def scored_spans(encoded: Encoded, logits: Sequence[np.ndarray]) -> Iterator[list[Span]]:
    """The spans of each text with their scores, as serving finds them, from each text's `logits` (rows, labels)."""
    for text, encoding, starts, rows in zip(encoded.texts, encoded.encodings, encoded.rows, logits, strict=True):
        full = np.zeros((len(encoding.ids), len(encoded.labels)), dtype=np.float32)
        full[starts] = softmax(rows, rows.dtype)
        yield decode_spans(words(text, encoding.offsets, encoding.word_ids), full, encoded.labels)
