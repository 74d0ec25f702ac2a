"""Checks the fields of a row (a text, the name of a label, a number, the number of a class), and lists the faults of rows.

Each fault has a file, a line and a reason, and one error lists all of them. Class numbers, as `datasets` keeps them, are replaced by the
data set's names for them.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from serve.errors import BadInput
from serve.wording import counted

SHOWN_FAULTS = 20
SHOWN_LINES = 5  # per fault
MOST_FAULTS = 1_000  # a file with so many is not read further


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the input: its file, its line, and why it cannot be used."""

    file: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{place}: {self.reason}"


class BadRows(BadInput):
    """Every fault found in the data, in one error; rows of one file with the same fault share one line."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        alike: dict[tuple[str, str], list[Fault]] = {}
        for fault in faults:
            alike.setdefault((fault.file, fault.reason), []).append(fault)
        several = list(alike.values())
        shown = [f"  {_line_of(each)}" for each in several[:SHOWN_FAULTS]]
        if len(several) > SHOWN_FAULTS:
            shown.append(f"  ... and {sum(map(len, several[SHOWN_FAULTS:]))} more")
        these = "it" if len(faults) == 1 else "them"
        super().__init__(
            f"The data has {counted(len(faults), 'fault')}; nothing was done. Correct {these} and run again:\n"
            + "\n".join(shown)
        )


def _line_of(alike: Sequence[Fault]) -> str:
    """One line for faults of one file and one reason."""
    first, lines = alike[0], [fault.line for fault in alike]
    if first.line is None:
        return str(first)
    return faulty_rows(first.file, "line", lines[:SHOWN_LINES], len(alike), first.reason)


def faulty_rows(file: str, unit: str, shown: Sequence[int | None], count: int, reason: str) -> str:
    """One line for `count` rows of `file` with the same fault, each called a `unit`; `shown` are the places of the first."""
    rest = f" and {count - len(shown):,} more" if count > len(shown) else ""
    return f"{file}, {unit}{'s' * (count != 1)} {', '.join(map(str, shown))}{rest}: {reason}"


class UnreadableFrom(BadRows):
    """Reading of a file stopped at the line of its fault: it is not UTF-8 there, a line is too long, or there are too many faults."""


def note(faults: list[Fault], fault: Fault) -> None:
    """Add `fault`, and stop reading the file after `MOST_FAULTS`: a file larger than memory may have a fault in every row.

    Raises UnreadableFrom: the file has too many; the error says only this, and `faults` holds all of them.
    """
    faults.append(fault)
    if len(faults) == MOST_FAULTS:
        reason = f"was read only up to line {fault.line}, which has fault number {MOST_FAULTS:,}"
        raise UnreadableFrom([Fault(fault.file, None, reason)])


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

    Raises ValueError: it is none, or not finite; the message describes the fault.
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


# Of a column of class numbers or of lists of them, or of the fields of its objects.
Names = Sequence[str] | Mapping[str, "Names"]


def class_names(features: Mapping[str, Any]) -> dict[str, Names]:
    """The names by number for each column that holds class numbers, be it in lists or in fields of objects.

    Args:
        features: the description of each column in the form of `Features.to_dict()`, which the Hub's parquet files hold too.
    """
    return {column: names for column, feature in features.items() if (names := _names_in(feature))}


def _names_in(feature: Any) -> Names | None:
    if isinstance(feature, list):
        return _names_in(feature[0]) if feature else None
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") == "ClassLabel":
        return feature.get("names") or None
    if isinstance(feature.get("_type"), str):
        return _names_in(feature.get("feature"))  # of a list; other types have none
    return class_names(feature) or None


def with_class_names(row: dict[str, Any], names: Mapping[str, Names]) -> dict[str, Any]:
    """`row` with names in place of class numbers. Raises ValueError: a number has no name; the message gives it."""
    return row | {column: _named(row[column], names[column], column) for column in names if column in row}


def _named(value: Any, names: Names, column: str) -> Any:
    if isinstance(value, list):
        return [_named(each, names, column) for each in value]
    if isinstance(names, Mapping):
        return with_class_names(value, names) if isinstance(value, dict) else value
    if type(value) is not int:
        return value
    if not 0 <= value < len(names):
        raise ValueError(
            f"`{column}` holds the class number {value}, which has no name; only 0 to {len(names) - 1} have one"
        )
    return names[value]
