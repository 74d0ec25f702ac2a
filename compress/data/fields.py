"""One field of a row, checked."""

from typing import Any


def text_of(row: dict[str, Any], name: str) -> str:
    """The text in the field `name`. ValueError says in words why there is none."""
    if name not in row:
        raise ValueError(f"has no `{name}` (its fields: {', '.join(map(str, row)) or 'none'})")
    text = row[name]
    if not isinstance(text, str):
        raise ValueError(f"`{name}` is {type(text).__name__}, not a string")
    if not text.strip():
        raise ValueError(f"`{name}` is empty")
    return whole_characters(text, name)


def pair_of(row: dict[str, Any]) -> str | None:
    """The second of two texts, where there is one."""
    pair = row.get("text_pair")
    if pair is not None and not isinstance(pair, str):
        raise ValueError(f"`text_pair` is {type(pair).__name__}, not a string")
    return whole_characters(pair, "text_pair") if pair else None


def whole_characters(text: str, name: str) -> str:
    """`text` itself. ValueError when it holds half of a surrogate pair; `name` is the field."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` holds half of a surrogate pair at {error.start}: it is not valid Unicode") from None
    return text
