"""Tags of tokens -> entity spans in the text as sent. Evaluation in training and the server share this one decoder.

Offsets are Unicode code points, end exclusive.
"""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from serve.labels import OUTSIDE, split_tag

# Scripts that put no spaces between words: (first, last) code point. Each token in them counts as a word of its own.
# Block names and ranges: Unicode 15.1, Blocks.txt.
UNSPACED_BLOCKS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # ideographic iteration and closing marks, zero
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # Katakana phonetic extensions
    (0x3400, 0x4DBF),  # CJK extension A
    (0x4E00, 0x9FFF),  # CJK unified ideographs
    (0xF900, 0xFAFF),  # CJK compatibility ideographs
    (0xFF66, 0xFF9D),  # half-width Katakana
    (0x20000, 0x3FFFF),  # CJK extensions B and later
)


class Span(NamedTuple):
    """An entity: `text[start:end]`, its label, and the mean probability of its words' tags."""

    start: int
    end: int
    label: str
    score: float


class Word(NamedTuple):
    """`text[start:end]`, and the index of the word's first token, whose tag is the word's tag."""

    start: int
    end: int
    first_token: int


def word_starts(text: str, offsets: Sequence[tuple[int, int]], word_ids: Sequence[int | None]) -> np.ndarray:
    """Which tokens begin a word: bool, shape (tokens,). Training labels exactly these; their tags are the words' tags.

    `offsets` and `word_ids` are the tokenizer's, one per token; `word_ids` is None at special tokens.
    """
    starts = np.zeros(len(offsets), dtype=np.bool_)
    starts[[word.first_token for word in words(text, offsets, word_ids)]] = True
    return starts


def words(text: str, offsets: Sequence[tuple[int, int]], word_ids: Sequence[int | None]) -> list[Word]:
    """The words of `text` as its tokens show them, in order and never overlapping, by rules that no tokenizer changes.

    A token continues the word before it when both have the same word id, touch, and are joined by two word characters;
    or when it lies inside that word, as the byte pieces of one emoji do. Every other token begins a word. Special
    tokens and those of only whitespace are in no word.
    """
    found: list[Word] = []
    word_id_before: int | None = None
    for token, (offset, word_id) in enumerate(zip(offsets, word_ids, strict=True)):
        if word_id is None:
            continue
        start, end = _trimmed(text, *offset)
        if start >= end:
            continue
        if found and (
            start < found[-1].end
            or (start == found[-1].end and word_id == word_id_before and _joined(text[start - 1], text[start]))
        ):
            found[-1] = found[-1]._replace(end=max(end, found[-1].end))
        else:
            found.append(Word(start, end, token))
        word_id_before = word_id
    return found


def decode_spans(
    text: str,
    probabilities: np.ndarray,
    offsets: Sequence[tuple[int, int]],
    word_ids: Sequence[int | None],
    tags: Sequence[str],
) -> list[Span]:
    """The entities of `text`: each word takes the likeliest tag of its first token, and runs of tags become spans.

    `probabilities` has shape (tokens, tags). BIO, BIOES and IO tags are read as conlleval does (the convention of the
    CoNLL-2000 evaluation script): `I` with no open span of its label begins one. Spans are ordered and never overlap; a
    span runs from its first word's start to its last word's end; its score is the mean probability of its words' tags.
    """
    found = words(text, offsets, word_ids)
    if not found:
        return []
    word_probabilities = probabilities[[word.first_token for word in found]]  # (words, tags)
    chosen = word_probabilities.argmax(axis=1)  # (words,)
    chosen_probabilities = word_probabilities[np.arange(len(found)), chosen].astype(np.float64)
    return [
        Span(found[first].start, found[last].end, label, float(chosen_probabilities[first : last + 1].mean()))
        for first, last, label in tag_runs([tags[index] for index in chosen])
    ]


def tag_runs(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """(first, last, label) of every entity in one sequence of tags, `last` inclusive, by conlleval's rules.

    >>> tag_runs(["B-city", "I-city", "O", "I-city", "B-city"])
    [(0, 1, 'city'), (3, 3, 'city'), (4, 4, 'city')]
    """
    runs: list[tuple[int, int, str]] = []
    open_label = ""
    for index, tag in enumerate(tags):
        prefix, label = split_tag(tag)
        if prefix == OUTSIDE:
            open_label = ""
            continue
        if prefix in {"I", "E"} and label == open_label:
            runs[-1] = (runs[-1][0], index, label)
        else:
            runs.append((index, index, label))
        open_label = "" if prefix in {"E", "S"} else label
    return runs


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The token's own characters: no outer whitespace (byte-level tokenizers add some), and with the marks that follow.

    A tokenizer that strips accents leaves a combining mark out of the offsets of the letter that carries it.
    """
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    while start < end < len(text) and _is_mark(text[end]):
        end += 1
    return start, end


def _joined(left: str, right: str) -> bool:
    """Whether a word runs on from character `left` to character `right`."""
    return _is_word_character(left) and _is_word_character(right)


def _is_word_character(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character == "_"
    if not (character.isalnum() or _is_mark(character)):
        return False
    code_point = ord(character)
    return not any(first <= code_point <= last for first, last in UNSPACED_BLOCKS)


def _is_mark(character: str) -> bool:
    return not character.isascii() and unicodedata.category(character).startswith("M")
