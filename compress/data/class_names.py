"""Replaces class numbers, as `datasets` keeps them, by the data set's names for them."""

from collections.abc import Mapping, Sequence
from typing import Any


def class_names(features: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """The names by number for each column of class numbers, or of lists of them.

    Args:
        features: the description of each column in the form of `Features.to_dict()`, which the Hub's parquet files hold too.
    """
    named: dict[str, Sequence[str]] = {}
    for column, feature in features.items():
        inner = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        if isinstance(inner, dict) and inner.get("_type") == "ClassLabel" and inner.get("names"):
            named[column] = inner["names"]
    return named


def with_class_names(row: dict[str, Any], names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """`row` with names in place of class numbers.

    Raises:
        ValueError: a number has no name; the message gives it.
    """
    return row | {column: _named(row[column], names[column], column) for column in names if column in row}


def _named(value: Any, names: Sequence[str], column: str) -> Any:
    if isinstance(value, list):
        return [_named(each, names, column) for each in value]
    if type(value) is not int:
        return value
    if not 0 <= value < len(names):
        raise ValueError(
            f"`{column}` holds the class number {value}, which has no name; only 0 to {len(names) - 1} have one"
        )
    return names[value]
