"""Names of classes and tags, and which of them apply. A tag is `O`, or a prefix and an entity label: `B-city`, `I-city`."""

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

# An entity's tags are `B`, `I`, ... in BIO; `S`, or `B`, `I`, ..., `E` in BIOES (BILOU with other letters); only `I` in IO.
Scheme = Literal["BIO", "BIOES", "IO"]

OUTSIDE = "O"
PREFIXED = re.compile(r"([BIESLU])-(.+)", re.DOTALL)
# Labels of what is no word of a text, and `X` of the later tokens of a word beside prefixed tags. They are outside of entities.
NO_WORD = frozenset({"[PAD]", "PAD", "<pad>", "<PAD>", "[CLS]", "[SEP]", "<s>", "</s>"})
LATER_PIECE = "X"
# Values of `problem_type` in configurations of transformers.
MULTI_LABEL = "multi_label_classification"
REGRESSION = "regression"

NUMBER = ("score",)  # the one label of a model that gives a text a number
SPAN_ENDS = ("start", "end")  # what the two logits of each token are of, in a model that answers questions


def bio_tags(labels: Iterable[str]) -> tuple[str, ...]:
    """The IOB2 tags of entity `labels`: `O` first, then `B-x` and `I-x` of each label, sorted by name.

    >>> bio_tags(["city", "airline"])
    ('O', 'B-airline', 'I-airline', 'B-city', 'I-city')
    """
    return (OUTSIDE, *(f"{prefix}-{label}" for label in sorted(set(labels)) for prefix in "BI"))


def are_names(tags: Collection[str]) -> bool:
    """Whether all `tags` of a model or a data set are names of labels, so that the `E-` of `E-MAIL` is no prefix.

    Prefixes hold for all tags or for none; `O` and `NO_WORD` do not count. They hold if two of them stand before one label, as in
    `B-city` and `I-city`. Otherwise an end, `E-` or `L-`, is a part of a name, since no label has an end alone, and so then is every
    prefix. Of other tags with and without a prefix, those without one must be more for `B-` and `I-` to be parts of names.

    >>> are_names(["O", "NAME", "E-MAIL", "I-NUMBER"]), are_names(["O", "B-MAIL", "E-MAIL"])
    (True, False)
    """
    prefixed = {(tag[0], tag[2:]) for tag in tags if PREFIXED.fullmatch(tag)}
    bare = {tag for tag in tags if tag != OUTSIDE and tag not in NO_WORD and not PREFIXED.fullmatch(tag)}
    prefixes, labels = {prefix for prefix, _ in prefixed}, {label for _, label in prefixed}
    if len(labels) < len(prefixed) or labels & bare:
        return False
    if bare and prefixes & {"B", "I"} and not prefixes & {"E", "L"}:
        return len(bare) > len(prefixed)
    return bool(bare or prefixes & {"E", "L"})


@lru_cache(maxsize=256)
def with_prefixes(tags: tuple[str, ...]) -> tuple[str, ...]:
    """All `tags` of a model, as `split_tag` reads them: names of labels get the prefix `I-`, and `NO_WORD` are `O`.

    Where prefixes hold, `X` is `O` too. Where a tag without a prefix stands beside `B-` and `I-` of its label, such tags are entities of
    one word, as in tags of parts of speech.

    >>> with_prefixes(("O", "NAME", "E-MAIL")), with_prefixes(("O", "B-city", "I-city", "[PAD]"))
    (('O', 'I-NAME', 'I-E-MAIL'), ('O', 'B-city', 'I-city', 'O'))
    >>> with_prefixes(("ADJ", "B-ADJ", "I-ADJ", "DET"))
    ('B-ADJ', 'B-ADJ', 'I-ADJ', 'B-DET')
    """
    names, there = are_names(tags), set(tags)
    of_one_word = not any(tag[:2] in {"E-", "S-", "L-", "U-"} for tag in tags) and any(
        {f"B-{tag}", f"I-{tag}"} <= there for tag in tags
    )

    def read(tag: str) -> str:
        if tag == OUTSIDE or tag in NO_WORD:
            return OUTSIDE
        if names:
            return f"I-{tag}"
        if PREFIXED.fullmatch(tag):
            return tag
        return f"B-{tag}" if of_one_word else OUTSIDE if tag == LATER_PIECE else tag

    return tuple(map(read, tags))


@lru_cache(maxsize=4096)
def split_tag(tag: str) -> tuple[str, str]:
    """The prefix and the entity label of `tag`; `("O", "")` outside. A tag without a prefix (IO scheme) gets `I`.

    Whether a tag has a prefix depends on the others: give it one of `with_prefixes`.

    >>> split_tag("B-city"), split_tag("O"), split_tag("city")
    (('B', 'city'), ('O', ''), ('I', 'city'))
    """
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, label = tag.partition("-")
    if dash and prefix in {"B", "I", "E", "S", "L", "U"}:
        # L and U of BILOU are E and S of BIOES.
        return {"L": "E", "U": "S"}.get(prefix, prefix), label
    return "I", tag


def entity_labels(tags: Sequence[str]) -> tuple[str, ...]:
    """The entity labels in all `tags` of a model, sorted."""
    return tuple(sorted({label for label in (split_tag(tag)[1] for tag in with_prefixes(tuple(tags))) if label}))


@lru_cache(maxsize=64)
def schemes(tags: tuple[str, ...]) -> dict[str, Scheme]:
    """The scheme of each entity label in `tags`.

    A label with `I` tags only is in IO. The others are in BIOES if any tag is an `E` or an `S`, and in BIO otherwise.

    >>> schemes(("O", "B-city", "I-city", "I-name"))
    {'city': 'BIO', 'name': 'IO'}
    """
    prefixes: dict[str, set[str]] = {label: set() for label in entity_labels(tags)}
    for prefix, label in map(split_tag, with_prefixes(tags)):
        if label:
            prefixes[label].add(prefix)
    bounded: Scheme = "BIOES" if any(used & {"E", "S"} for used in prefixes.values()) else "BIO"
    return {label: "IO" if used == {"I"} else bounded for label, used in prefixes.items()}


def gives_number(problem_type: str | None, labels: int) -> bool:
    """Whether a head with so many `labels` gives a text a number, by its configuration, as transformers reads it.

    >>> gives_number(None, 1), gives_number(None, 2), gives_number("multi_label_classification", 1)
    (True, False, False)
    """
    return labels == 1 and problem_type in (REGRESSION, None)


def applies(logits: np.ndarray) -> np.ndarray:
    """Which labels apply, where each is decided on its own: a bool for each of `logits`.

    A label applies if the sigmoid of its logit is above 0.5, which is a logit above 0. Evaluation in training and the server
    share this decision.
    """
    return np.asarray(logits > 0)
