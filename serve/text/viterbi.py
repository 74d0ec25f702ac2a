"""The likeliest tags of a text's words that form a valid sequence: Viterbi decoding with the scheme's rules as hard limits."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from serve.errors import BadInput
from serve.text.labels import OUTSIDE, schemes, split_tag, with_prefixes

# Smaller than any probability of a model. It keeps logarithms finite, so that an unlikely tag is not treated as forbidden.
LEAST_PROBABILITY = 1e-300


class Grammar(NamedTuple):
    """Which sequences of tags are valid."""

    starts: np.ndarray
    """Which tags may come first: bool, shape (tags,)."""
    follows: np.ndarray
    """Which tag (second axis) may follow which (first axis): bool, shape (tags, tags)."""
    ends: np.ndarray
    """Which tags may come last: bool, shape (tags,)."""

    def allows(self, sequence: np.ndarray) -> bool:
        """Whether a sequence of indices of tags, at least one, is valid."""
        return bool(
            self.starts[sequence[0]] and self.ends[sequence[-1]] and self.follows[sequence[:-1], sequence[1:]].all()
        )


@lru_cache(maxsize=64)
def grammar(tags: tuple[str, ...]) -> Grammar:
    """The rules for `tags`, by the schemes that `serve.text.labels.schemes` finds in them.

    BIO: `I` follows only `B` or `I` of its label. BIOES: the same holds for `I` and `E`, and `B` and `I` are followed only by
    `I` or `E` of their label. IO: every sequence is valid.
    """
    scheme_of = schemes(tags)
    inside = np.zeros(len(tags), dtype=np.bool_)  # the tag continues an entity
    unfinished = np.zeros(len(tags), dtype=np.bool_)  # the next tag must continue the entity
    continues = np.zeros((len(tags), len(tags)), dtype=np.bool_)  # the second tag may continue the first
    parts = [split_tag(tag) for tag in with_prefixes(tags)]
    for after, (prefix, label) in enumerate(parts):
        if prefix == OUTSIDE or scheme_of[label] == "IO":
            continue
        inside[after] = prefix in {"I", "E"}
        unfinished[after] = scheme_of[label] == "BIOES" and prefix in {"B", "I"}
        continues[:, after] = [
            inside[after] and parts[before] in {("B", label), ("I", label)} for before in range(len(tags))
        ]
    return Grammar(~inside, np.where(inside, continues, ~unfinished[:, None]), ~unfinished)


def likeliest_valid(probabilities: np.ndarray, tags: tuple[str, ...]) -> np.ndarray:
    """The valid sequence of tags with the largest product of `probabilities`, (words, tags): indices, (words,).

    If the likeliest tags of all words form a valid sequence, it is that one. BadInput when no sequence is valid, such as for
    one word and the tags `B-x` and `E-x`.
    """
    rules = grammar(tags)
    each = probabilities.argmax(axis=1)
    if rules.allows(each):
        return np.asarray(each)
    logarithms = np.log(np.maximum(probabilities.astype(np.float64), LEAST_PROBABILITY))
    barrier = np.where(rules.follows.T, 0.0, -np.inf)  # (after, before), so that rows are contiguous
    places = np.arange(len(tags))
    best = np.where(rules.starts, logarithms[0], -np.inf)  # of the sequences that end in each tag
    came_from = np.zeros(logarithms.shape, dtype=np.intp)
    for word in range(1, len(logarithms)):
        reached = barrier + best  # (after, before)
        came_from[word] = reached.argmax(axis=1)
        best = reached[places, came_from[word]] + logarithms[word]
    best = np.where(rules.ends, best, -np.inf)
    if best.max() == -np.inf:
        raise BadInput(
            f"constrained: the tags {', '.join(tags)} form no valid sequence for this text; leave constrained out",
            field="constrained",
        )
    path = np.empty(len(logarithms), dtype=np.intp)
    path[-1] = best.argmax()
    for word in range(len(logarithms) - 1, 0, -1):
        path[word - 1] = came_from[word, path[word]]
    return path
