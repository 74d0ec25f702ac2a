"""Pieces of HTML from plain values. Everything that came from outside is escaped here, and nowhere is it trusted."""

import html
import math
from collections.abc import Mapping, Sequence

LONG_TABLE = 25  # rows from which a table is folded away until a reader asks for it


class Markup(str):
    """Text that is HTML already, and must not be escaped again."""

    __slots__ = ()


Cell = Markup | str | int | float | bool | None


def escaped(value: Cell) -> Markup:
    """`value` as it may stand in HTML text or in a quoted attribute; Markup as it is, None as a dash."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return Markup("–")
    if isinstance(value, bool):
        return Markup("yes" if value else "no")
    if isinstance(value, float):
        return Markup(html.escape(number(value)))
    return Markup(html.escape(str(value)))


def element(tag: str, content: Cell, **attributes: str) -> Markup:
    """`<tag attributes>content</tag>`, both escaped. `class_` stands for `class`, and `aria_label` for `aria-label`."""
    named = [(name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items()]
    written = "".join(f' {name}="{html.escape(value)}"' for name, value in named)
    return Markup(f"<{tag}{written}>{escaped(content)}</{tag}>")


def joined(parts: Sequence[Markup]) -> Markup:
    """Pieces one after the other."""
    return Markup("\n".join(parts))


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Markup:
    """A table that scrolls sideways where it does not fit. The first cell of a row names the row.

    A column of numbers (or dashes) is set flush right, its header with it.
    """
    numeric = [all(_is_numeric(row[i]) for row in rows) for i in range(len(header))]
    kinds = ["number" if flag else "text" for flag in numeric]
    head = "".join(element("th", name, scope="col", class_=kind) for name, kind in zip(header, kinds, strict=True))
    body = []
    for row in rows:
        first = element("th", row[0], scope="row", class_=kinds[0])
        rest = [element("td", cell, class_=kind) for cell, kind in zip(row[1:], kinds[1:], strict=True)]
        body.append(f"<tr>{first}{''.join(rest)}</tr>")
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    # A region that scrolls must be reachable by keyboard.
    return element("div", Markup(inner), class_="scroll", tabindex="0")


def columns_table(columns: Sequence[tuple[str, Sequence[Cell]]]) -> Markup:
    """A `table` of `(header, cells)` columns, without those that hold nothing."""
    return table(*filled(columns))


def filled(columns: Sequence[tuple[str, Sequence[Cell]]]) -> tuple[list[str], list[list[Cell]]]:
    """Header and rows of the columns that hold anything."""
    kept = [(name, cells) for name, cells in columns if any(cell is not None for cell in cells)]
    return [name for name, _ in kept], [list(row) for row in zip(*(cells for _, cells in kept), strict=True)]


def markdown(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table in Markdown, the first column set left and the others right."""
    lines: list[Sequence[Cell]] = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "".join(f"| {' | '.join(_markdown_cell(cell) for cell in line)} |\n" for line in lines)


def figure(caption: str, drawing: Markup) -> Markup:
    """A drawing under its caption."""
    return element("figure", joined([element("figcaption", caption), drawing]))


def folded_if_long(content: Markup, rows: int, what: str) -> Markup:
    """`content`, folded away until a reader asks for it where it has more than LONG_TABLE rows."""
    return details(f"All {rows} {what}", content) if rows > LONG_TABLE else content


def facts(values: Mapping[str, object]) -> Markup:
    """A nested mapping as a list of names and values, sub-mappings indented under their name."""
    lines = []
    for name, value in values.items():
        lines.append(element("dt", str(name).replace("_", " ")))
        if isinstance(value, Mapping):
            lines.append(element("dd", facts(value)))
        elif isinstance(value, list | tuple):
            lines.append(element("dd", "; ".join(_plain(item) for item in value) or None))
        else:
            lines.append(element("dd", _plain(value)))
    return element("dl", joined(lines))


def details(title: str, content: Markup, *, open_: bool = False) -> Markup:
    """A part that a reader opens with a tap; needs no script."""
    summary = element("summary", title)
    return Markup(f"<details{' open' if open_ else ''}>{summary}{content}</details>")


def number(value: float) -> str:
    """Three significant digits, more where the whole part has more: 1234, 12.3, 0.00123.

    >>> [number(x) for x in (1234.4, 12.345, 0.92, 0.00123, 2e-6, 0.0)]
    ['1,234', '12.3', '0.92', '0.00123', '2e-06', '0']
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def number_or_none(value: float | None) -> str | None:
    """`number`, or None for what is not known."""
    return None if value is None else number(value)


def percent(share: float | None) -> str | None:
    """A share of one in percent, or None: no decimals from ten on, one below; a line never breaks before the sign."""
    return None if share is None else f"{100 * share:.{0 if abs(share) >= 0.0995 else 1}f}\N{NO-BREAK SPACE}%"


def score(value: float | None) -> str | None:
    """A task metric, or None: four decimals, so that a column lines up."""
    return None if value is None else f"{value:.4f}"


def interval(low: float | None, high: float | None, *, decimals: int = 4) -> str | None:
    """`low – high`, or None where either is unknown."""
    return None if low is None or high is None else f"{low:.{decimals}f} – {high:.{decimals}f}"


def size(size_bytes: int | None) -> str | None:
    """Bytes for a person, in powers of ten.

    >>> size(91_000_000), size(1_200), size(12)
    ('91 MB', '1.2 kB', '12 B')
    """
    if size_bytes is None:
        return None
    for unit, bytes_of_unit in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= bytes_of_unit:
            return f"{number(size_bytes / bytes_of_unit)} {unit}"
    return f"{size_bytes} B"


def _markdown_cell(cell: Cell) -> str:
    text = "–" if cell is None else str(cell)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _plain(value: object) -> str:
    return number(value) if isinstance(value, float) else "–" if value is None else str(value)


def _is_numeric(cell: Cell) -> bool:
    """Does `cell` belong in a column of numbers? Text that starts with a digit does, such as `12.3 MB`; a dash may."""
    if isinstance(cell, bool):
        return False
    return cell is None or isinstance(cell, int | float) or str(cell)[:1].isdigit()
