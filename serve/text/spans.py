"""Tags of tokens -> entity spans in the text as sent. Evaluation in training and the server share this decoder.

Offsets are Unicode code points, end exclusive.
"""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import regex

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

# What a reader takes for one letter, as UAX 29 divides text: consonants that a virama joins, a syllable of Hangul letters, an emoji with
# its modifiers; and with marks that it leaves apart, such as vowels of Burmese. A text without any of MANY_PARTS has a code point a letter.
LETTER = regex.compile(r"\X\p{M}*")
MANY_PARTS = regex.compile(
    r"[\p{M}\p{GCB=Extend}\p{GCB=SpacingMark}\p{GCB=ZWJ}\p{GCB=Prepend}\p{GCB=V}\p{GCB=T}\p{GCB=Regional_Indicator}]"
)
# They join the letters around them, as in Persian compounds, and are no letters themselves; but behind a virama (a combining class) they
# are a part of its letter, as in Malayalam's final consonants.
JOINERS, VIRAMA = "\u200c\u200d", 9


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

    A token continues the word before it if they touch, have word characters where they touch, and the same word id (tokenizers that
    split text at combining marks give another behind a mark); or if it lies inside that word, as the byte pieces of one emoji do.
    Every other token begins a word. A word never ends inside a letter (see `LETTER`). Special tokens and tokens of whitespace are
    in no word.
    """
    text_words: list[Word] = []
    is_ascii = text.isascii()
    letter_ends = None if is_ascii else _letter_ends(text)
    word_start = word_end = first_token = last_token = -1
    word_id_before: int | None = None
    for token, ((start, end), word_id) in enumerate(zip(offsets, word_ids, strict=True)):
        if word_id is None:
            continue
        if not is_ascii or start >= end or text[start].isspace() or text[end - 1].isspace():
            start, end = _trimmed(text, start, end, letter_ends)  # noqa: PLW2901
            if start >= end:
                continue
        if start < word_end or (
            start == word_end
            and (word_id == word_id_before or _is_mark(text[start - 1]))
            and _joined(text[start - 1], text[start])
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


def _letter_ends(text: str) -> list[int] | None:
    """For each code point of `text` the end of its letter; None if each is a letter of its own."""
    if not MANY_PARTS.search(text):
        return None
    return [letter.end() for letter in LETTER.finditer(text) for _ in letter.group()]


def _trimmed(text: str, start: int, end: int, letter_ends: list[int] | None) -> tuple[int, int]:
    """Start and end of a token without outer whitespace (byte-level tokenizers add some), with the rest of its last letter.

    A tokenizer that strips accents leaves a combining mark out of the offsets of its letter, one that composes letters all but the
    first of the code points that a letter was made of, and one of bytes divides an emoji. A joiner that joins nothing is left out.
    """
    while start < end and (text[start].isspace() or text[start] in JOINERS):
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    if letter_ends and start < end:
        end = letter_ends[end - 1]
        # Some signs, such as those of Arabic numbering, make one letter with a blank behind them.
        while start < end and (text[end - 1].isspace() or _is_idle_joiner(text, end - 1)):
            end -= 1
    return start, end


def _is_idle_joiner(text: str, at: int) -> bool:
    """Whether `text[at]` is a joiner that joins nothing, neither two parts of a word nor a virama to its letter."""
    if text[at] not in JOINERS or (at and unicodedata.combining(text[at - 1]) == VIRAMA):
        return False
    return at + 1 == len(text) or not _joined(text[at], text[at + 1])


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


def _is_mark(character: str) -> bool:
    """Whether `character` is a combining mark or a joiner."""
    return not character.isascii() and (unicodedata.category(character).startswith("M") or character in JOINERS)
