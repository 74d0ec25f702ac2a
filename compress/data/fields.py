"""Checks one field of a row: a text, the name of a label, or a number."""

import math
from contextlib import suppress
from decimal import Decimal
from typing import Any

MOST_CHARACTERS = 10_000_000  # of one text or cell, in every format; a longer one lacks a separator and is not a text
UNSEEN = "\u200b\u200c\u200d\u2060\ufeff"  # characters without width, of which no label can consist
LARGEST_NUMBER = 1e30  # a float32 holds it, and a float64 its square


def text_of(row: dict[str, Any], name: str) -> str:
    """The text in the field `name`. ValueError if there is none; its message says why."""
    text = row[name]
    if text is None or (isinstance(text, float) and math.isnan(text)):
        raise ValueError(
            f"`{name}` is {'null' if text is None else 'NaN'}; a text is needed, so remove rows without one"
        )
    if isinstance(text, list | dict):
        raise ValueError(
            f"`{name}` is a {type(text).__name__}, not a string; give a row for each text (pandas: to_json(orient='records', lines=True)), "
            "and join words by spaces"
        )
    if not isinstance(text, str):
        raise ValueError(f"`{name}` is {type(text).__name__}, not a string")
    if is_blank(text):
        raise ValueError(f"`{name}` is empty")
    return checked(text, name)


def is_blank(text: str) -> bool:
    """Whether nothing can be seen of a text."""
    return all(character.isspace() or character in UNSEEN for character in text)


def pair_of(row: dict[str, Any], name: str) -> str | None:
    """The second text of a pair, or None. ValueError as from `text_of`."""
    pair = row.get(name)
    if pair is not None and not isinstance(pair, str):
        raise ValueError(f"`{name}` is {type(pair).__name__}, not a string")
    return checked(pair, name) if pair else None


def label_of(given: object, name: str, needed: str = "a non-empty string is needed") -> str:
    """The label `given` in the field `name`. ValueError if it is not a label; its message says why, and what is `needed`.

    Space around a label is a fault: it is invisible, and would make a second label with the same spelling.
    """
    if isinstance(given, float) and math.isnan(given):
        raise ValueError(f"`{name}` holds NaN; {needed}")
    if isinstance(given, dict):
        raise ValueError(
            f"`{name}` holds {given!r:.80}; {needed}. Give the best label here, and probabilities by --teacher-labels"
        )
    if type(given) is int or type(given) is float:
        raise ValueError(
            f"`{name}` holds a number, but the file has no names for class numbers; write the label as a string"
        )
    if not isinstance(given, str) or is_blank(given):
        raise ValueError(f"`{name}` holds {given!r}; {needed}")
    if given != given.strip():
        raise ValueError(f"`{name}` holds {given!r}, which begins or ends with space; remove the space")
    if "\n" in given or "\r" in given:
        raise ValueError(f"`{name}` holds a line break after {given.splitlines()[0]!r}; check for an unclosed quote")
    return checked(given, name)


def number_in(given: object, name: str) -> float:
    """The number in the field `name`, which may be written as text, as in CSV.

    Raises:
        ValueError: it is none, or not finite; the message describes the fault.
    """
    number = math.nan
    spelt = isinstance(given, str) and "_" not in given  # Python reads 1_000, and nobody else
    if spelt or (isinstance(given, int | float | Decimal) and not isinstance(given, bool)):
        with suppress(ValueError, OverflowError):
            number = float(given)  # type: ignore[arg-type]  # it is one of these
    if not abs(number) <= LARGEST_NUMBER:
        raise ValueError(f"`{name}` is {given!r:.80}; a number is needed, and at most {LARGEST_NUMBER:g} in size")
    return number


def checked(text: str, name: str) -> str:
    """`text` itself. ValueError if it is too long or holds half of a surrogate pair; `name` is the field."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"`{name}` has {len(text):,} characters; at most {MOST_CHARACTERS:,} are allowed; split it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` holds half of a surrogate pair at {error.start}: it is not valid Unicode") from None
    return text
