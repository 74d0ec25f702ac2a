"""Replaces class numbers, as `datasets` keeps them, by the data set's names for them."""

from collections.abc import Mapping, Sequence
from typing import Any

Names = (
    Sequence[str] | Mapping[str, "Names"]
)  # of a column of class numbers or of lists of them, or of the fields of its objects


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
    """`row` with names in place of class numbers.

    Raises:
        ValueError: a number has no name; the message gives it.
    """
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
