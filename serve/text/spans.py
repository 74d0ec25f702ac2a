"""Tags of tokens -> entity spans in the text as sent. Evaluation in training and the server share this decoder.

Offsets are Unicode code points, end exclusive.
"""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from serve.text.labels import OUTSIDE, Scheme, schemes, split_tag, with_prefixes
from serve.text.viterbi import likeliest_valid

# How the tags of tokens become tags of words, and these become entities; see `decode_spans`.
Aggregation = Literal["first", "average", "max", "strict"]

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

# Code points that continue a letter and are no combining marks: (first, last). Unicode 15.1, GraphemeBreakProperty.txt.
LETTER_PARTS = (
    (0x1160, 0x11FF),  # vowels and final consonants of a Hangul syllable
    (0xD7B0, 0xD7FB),  # old ones
    (0xFF9E, 0xFF9F),  # half-width marks of voiced Katakana
)
# Behind a virama a joiner is a part of the letter, as in Malayalam's final consonants; elsewhere it joins emoji.
ZERO_WIDTH_JOINER, VIRAMA = "\u200d", 9  # the latter is a combining class


class Span(NamedTuple):
    """An entity: `text[start:end]`, its label, and the mean probability of the tags of its words."""

    start: int
    end: int
    label: str
    score: float


class Word(NamedTuple):
    """`text[start:end]`, and the indices of the word's first and last token (inclusive)."""

    start: int
    end: int
    first_token: int
    last_token: int


def words(text: str, offsets: Sequence[tuple[int, int]], word_ids: Sequence[int | None]) -> list[Word]:
    """The words of `text`, made of its tokens, in order and without overlap. The rules are the same for all tokenizers.

    A token continues the word before it if both have the same word id, touch, and have word characters where they touch; or if
    it lies inside that word, as the byte pieces of one emoji do. Every other token begins a word. Special tokens and tokens of
    whitespace are in no word.
    """
    text_words: list[Word] = []
    is_ascii = text.isascii()
    word_start = word_end = first_token = last_token = -1
    word_id_before: int | None = None
    for token, ((start, end), word_id) in enumerate(zip(offsets, word_ids, strict=True)):
        if word_id is None:
            continue
        if not is_ascii or start >= end or text[start].isspace() or text[end - 1].isspace():
            start, end = _trimmed(text, start, end)  # noqa: PLW2901
            if start >= end:
                continue
        if start < word_end or (
            start == word_end and word_id == word_id_before and _joined(text[start - 1], text[start])
        ):
            word_end, last_token = max(end, word_end), token
        else:
            if first_token >= 0:
                text_words.append(Word(word_start, word_end, first_token, last_token))
            word_start, word_end, first_token, last_token = start, end, token, token
        word_id_before = word_id
    if first_token >= 0:
        text_words.append(Word(word_start, word_end, first_token, last_token))
    return text_words


def decode_spans(
    text_words: Sequence[Word],
    probabilities: np.ndarray,
    tags: Sequence[str],
    *,
    aggregation: Aggregation = "first",
    constrained: bool = False,
) -> list[Span]:
    """The entities of a text, whose words are `text_words`: each word gets its likeliest tag, and runs of tags become spans.

    `probabilities` has shape (tokens, tags). `word_probabilities` makes those of words, by `aggregation`. BIO, BIOES and IO tags
    are read as by conlleval (the evaluation script of CoNLL-2000): `I` without an open span of its label begins one. With
    `aggregation="strict"`, `strict_runs` applies instead. With `constrained`, words get the likeliest tags that form a valid
    sequence, see `serve.text.viterbi`.

    Spans are ordered and never overlap. A span goes from the start of its first word to the end of its last. Its score is the
    mean probability of the tags of its words. BadInput with `constrained` when no sequence of the tags is valid.
    """
    if not text_words:
        return []
    of_words = word_probabilities(probabilities, text_words, aggregation)
    chosen = likeliest_valid(of_words, tuple(tags)) if constrained else of_words.argmax(axis=1)
    scores = of_words[np.arange(len(text_words)), chosen].astype(np.float64)
    prefixed = with_prefixes(tuple(tags))
    sequence = [prefixed[index] for index in chosen.tolist()]
    runs = strict_runs(sequence, schemes(tuple(tags))) if aggregation == "strict" else tag_runs(sequence)
    return [
        # The sum that np.mean takes, without its checks.
        Span(
            text_words[first].start,
            text_words[last].end,
            label,
            float(np.add.reduce(scores[first : last + 1])) / (last + 1 - first),
        )
        for first, last, label in runs
    ]


def word_probabilities(probabilities: np.ndarray, text_words: Sequence[Word], aggregation: Aggregation) -> np.ndarray:
    """The probabilities of tags for each word, shape (words, tags), from those for each token, shape (tokens, tags).

    `average` is their mean, and `max` those of the token with the highest probability for one tag, like the strategies of these
    names in transformers' token classification pipeline. The others take those of the first token, the only one that is trained.
    """
    of_words = probabilities[[word.first_token for word in text_words]]
    if aggregation in {"average", "max"}:
        for index, word in enumerate(text_words):
            if word.last_token > word.first_token:
                tokens = probabilities[word.first_token : word.last_token + 1]
                of_words[index] = tokens.mean(axis=0) if aggregation == "average" else tokens[tokens.max(1).argmax()]
    return np.asarray(of_words)


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


def strict_runs(tags: Sequence[str], scheme_of: dict[str, Scheme]) -> list[tuple[int, int, str]]:
    """(first, last, label) of every entity that is complete by the scheme of its label; `last` is inclusive.

    In BIO an entity is `B` and the `I` that follow; in BIOES it is `S`, or `B`, any number of `I`, and `E`.

    >>> strict_runs(["B-city", "I-city", "O", "I-city", "B-city"], {"city": "BIO"})
    [(0, 1, 'city'), (4, 4, 'city')]
    """
    runs: list[tuple[int, int, str]] = []
    begun, open_label = 0, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        prefix, label = split_tag(tag)
        continues = label == open_label and prefix in {"I", "E"}
        if open_label and (prefix == "E" if continues else scheme_of[open_label] != "BIOES"):
            runs.append((begun, index if continues else index - 1, open_label))
        if continues:
            open_label = "" if prefix == "E" else label
            continue
        if prefix == "S":
            runs.append((index, index, label))
        begins = prefix == "B" or (prefix == "I" and scheme_of[label] == "IO")
        begun, open_label = index, label if begins else ""
    return runs


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Start and end of a token without outer whitespace (byte-level tokenizers add some), with the rest of its last letter.

    A tokenizer that strips accents leaves a combining mark out of the offsets of its letter, and one that composes letters all but the
    first of the code points that a letter was made of.
    """
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    while start < end < len(text) and _continues_letter(text[end - 1], text[end]):
        end += 1
    return start, end


def _joined(left: str, right: str) -> bool:
    """Whether the neighbouring characters `left` and `right` belong to one word."""
    return _is_word_character(left) and _is_word_character(right)


def _is_word_character(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character == "_"
    return _is_other_word_character(character)


@lru_cache(maxsize=4096)
def _is_other_word_character(character: str) -> bool:
    if not (character.isalnum() or _is_mark(character)):
        return False
    code_point = ord(character)
    return not any(first <= code_point <= last for first, last in UNSPACED_BLOCKS)


def _continues_letter(before: str, character: str) -> bool:
    if character == ZERO_WIDTH_JOINER:
        return unicodedata.combining(before) == VIRAMA
    return _is_mark(character) or any(first <= ord(character) <= last for first, last in LETTER_PARTS)


def _is_mark(character: str) -> bool:
    return not character.isascii() and unicodedata.category(character).startswith("M")
