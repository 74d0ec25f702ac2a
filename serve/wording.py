"""Lists and counts in messages: `a, b and c`, `a, b or c`, `1 text`, `2 texts`."""

from collections.abc import Iterable


def all_of(names: Iterable[object]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return _joined(" and ", names)


def one_of(names: Iterable[object]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return _joined(" or ", names)


def _joined(last: str, names: Iterable[object]) -> str:
    parts = [str(name) for name in names]
    return last.join([*([", ".join(parts[:-1])] if parts[1:] else []), *parts[-1:]])


def counted(count: int, one: str, several: str = "") -> str:
    """The count and the form that fits it: `1 text is`, `2,000 texts are`. Without `several`, it is `one` and an s."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"
