"""Values as text, and tables as data, which the templates lay out and `markdown` writes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Estimate(NamedTuple):
    """A figure with the ends of its 95 % interval, as text; both ends are empty where they are not known."""

    value: str
    low: str = ""
    high: str = ""

    def __str__(self) -> str:
        return f"{self.value} [{self.low}, {self.high}]" if self.low else self.value


class Model(NamedTuple):
    """The name of a model in a table, with its index, which gives number and colour, and a note below the name."""

    place: int
    name: str
    about: str = ""

    def __str__(self) -> str:
        return self.name


class Outcome(NamedTuple):
    """Whether a gate was passed."""

    passed: bool

    def __str__(self) -> str:
        return "passed" if self.passed else "missed"


Cell = Estimate | Model | Outcome | str | int | float | bool | None


class Table(NamedTuple):
    """A header, its rows, and for each column whether it holds numbers, which are aligned right; the first holds names."""

    header: list[str]
    rows: list[list[Cell]]
    numeric: list[bool]
    words: bool = False  # its cells are texts: on a phone they are below each other
    rows_are: str = ""  # what a row is, in the plural; such a table is collapsed where it is long

    def __bool__(self) -> bool:
        return bool(self.header)

    @property
    def texts(self) -> list[list[str]]:
        """The rows as text."""
        return [[written(cell) for cell in row] for row in self.rows]


def table(*columns: tuple[str, Sequence[Cell]], words: bool = False, rows_are: str = "") -> Table:
    """The table of `(header, cells)` columns, without empty ones. The first cell of a row names the row."""
    kept = [(name, list(cells)) for name, cells in columns if any(cell is not None for cell in cells)]
    rows = [list(row) for row in zip(*(cells for _, cells in kept), strict=True)]
    numeric = [i > 0 and all(map(_is_numeric, cells)) for i, (_, cells) in enumerate(kept)]
    return Table([name for name, _ in kept], rows, numeric, words, rows_are)


def markdown(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table in Markdown, the first column aligned left and the others right."""
    lines: list[Sequence[Cell]] = [header, ["---", *("---:" for _ in header[1:])], *rows]
    escaped = str.maketrans({"\\": "\\\\", "|": "\\|", "\n": " ", "<": "&lt;"})
    return "".join(f"| {' | '.join(written(cell).translate(escaped) for cell in line)} |\n" for line in lines)


def written(value: object) -> str:
    """Any value as text: None as a dash, booleans as yes and no, floats in three digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """Three significant digits, more where the whole part has more: 1234, 12.3, 0.00123.

    >>> [number(x) for x in (1234.4, 12.345, 0.92, 0.00123, 2e-6, 0.0)]
    ['1,234', '12.3', '0.92', '0.00123', '2e-06', '0']
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def percent(share: float | None) -> str | None:
    """A share (0 to 1) in percent, or None: no decimals from 10 % on, one below. The space does not break."""
    return None if share is None else f"{100 * share:.{0 if abs(share) >= 0.0995 else 1}f}\N{NO-BREAK SPACE}%"


def score(value: float | None) -> str | None:
    """A task metric, or None: four decimals, so that a column lines up."""
    return None if value is None else f"{value:.4f}"


def scored(value: float, low: float | None, high: float | None) -> Estimate:
    """A task metric with its interval, if known."""
    ends = () if low is None or high is None else (low, high)
    return Estimate(*(f"{x:.4f}" for x in (value, *ends)))


def scored_as(found: Mapping[str, Any]) -> Estimate:
    """A task metric that a document holds as `value`, `low` and `high`."""
    return scored(found["value"], found["low"], found["high"])


def difference(found: Mapping[str, float] | None) -> Estimate | None:
    """The difference of two metrics, held the same way, with its sign; None where nothing was compared."""
    return None if found is None else Estimate(*(f"{found[key]:+.4f}" for key in ("value", "low", "high")))


def size(size_bytes: int | None) -> str | None:
    """Bytes as text, in powers of ten.

    >>> size(91_000_000), size(1_200), size(12)
    ('91 MB', '1.2 kB', '12 B')
    """
    if size_bytes is None:
        return None
    for unit, bytes_of_unit in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= bytes_of_unit:
            return f"{number(size_bytes / bytes_of_unit)} {unit}"
    return f"{size_bytes} B"


def _is_numeric(cell: Cell) -> bool:
    """Whether `cell` fits a column of numbers: a number, an estimate, text that starts with a digit (`12.3 MB`), or None."""
    if isinstance(cell, bool | Model | Outcome):
        return False
    return cell is None or isinstance(cell, int | float | Estimate) or str(cell)[:1].isdigit()
