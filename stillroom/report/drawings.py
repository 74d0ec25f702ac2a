"""Small charts as shapes of SVG, in percent of their width, so that they fit any screen and text keeps its size.

They do not use matplotlib, whose SVG scales as a whole: in a figure made for 1280 px, text is 6 to 9 px high at 390 px.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from stillroom.report.formats import number

BAR_PX = 14
CURVE_PX = 200
POINTS_DRAWN = 400  # of a curve; more points make the page larger, and show no more on a screen


class Shape(NamedTuple):
    """One element of SVG. `polyline` and `polygon` have x from 0 to 100, and are stretched over the whole width."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


class Key(NamedTuple):
    """One line of a chart's legend: a model's index, its name, a note, and its symbol: `line`, `fill` or `hollow`."""

    place: int
    name: str
    note: str
    look: str


class Chart(NamedTuple):
    """A drawing of fixed height over the whole width; `title` is the text for screen readers."""

    title: str
    height_px: int
    shapes: list[Shape]
    legend: Sequence[Key] = ()


class Row(NamedTuple):
    """One row of a chart: its drawing, and above it name and figures as HTML text, so that a long name wraps."""

    label: str
    note: str
    shapes: list[Shape]


class Bar(NamedTuple):
    """One row of `bars`."""

    label: str
    value: float
    whisker: float  # the end of the thin line, at or above `value`
    note: str  # the numbers as text, at the right of the label
    reference: bool = False  # the others are compared with this one; it is drawn muted


class Interval(NamedTuple):
    """One row of `intervals`."""

    label: str
    value: float
    low: float | None
    high: float | None
    note: str


def bars(rows: Sequence[Bar]) -> list[Row]:
    """Horizontal bars from zero, each with a whisker."""
    full = max([row.whisker for row in rows if math.isfinite(row.whisker)], default=0.0) or 1.0
    drawn = []
    for row in rows:
        value, whisker = (min(100.0, 100 * x / full) if math.isfinite(x) else 0.0 for x in (row.value, row.whisker))
        shapes = [_rect("reference" if row.reference else "bar", 0.0, value)]
        if whisker > value:
            shapes.append(straight("whisker", value, whisker, BAR_PX / 2))
        drawn.append(Row(row.label, row.note, shapes))
    return drawn


def stack(label: str, parts: Sequence[float], note: str) -> Row:
    """A bar of full width, cut into the shares of its parts; `note` has the numbers as text."""
    whole = sum(part for part in parts if math.isfinite(part)) or 1.0
    start, shapes = 0.0, []
    for i, part in enumerate(parts):
        width = 100 * part / whole if math.isfinite(part) else 0.0
        shapes.append(_rect(f"fill c{7 - i}", start, width))
        start += width
    return Row(label, note, shapes)


def intervals(rows: Sequence[Interval]) -> list[Row]:
    """A dot with its interval per row, on one scale from the lowest to the highest end."""
    known = [x for row in rows for x in (row.value, row.low, row.high) if x is not None and math.isfinite(x)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    margin = 0.04 * (high - low) or 0.5
    low, high = low - margin, high + margin
    drawn = []
    for row in rows:
        at, *ends = (100 * (x - low) / (high - low) for x in (row.value, row.low, row.high) if x is not None)
        shapes = [straight("axis", 0, 100, BAR_PX / 2)]
        if len(ends) == 2:
            shapes.append(straight("whisker", ends[0], ends[1], BAR_PX / 2))
        drawn.append(Row(row.label, row.note, [*shapes, circle("bar", at, BAR_PX / 2, 5)]))
    return drawn


def curve(points: Sequence[Sequence[float]], title: str) -> Chart | None:
    """A line through `[x, y]` points, x from 0, y over its own range; points that are not finite are left out."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return None
    drawn = finite[:: math.ceil(len(finite) / POINTS_DRAWN)]
    if drawn[-1] != finite[-1]:
        drawn.append(finite[-1])
    last_x = max(x for x, _ in finite) or 1.0
    lowest, highest = min(y for _, y in finite), max(y for _, y in finite)
    low, high = (lowest, highest) if lowest < highest else (lowest - 0.5, highest + 0.5)
    bottom, top = CURVE_PX - 22, 20
    places = [(100 * x / last_x, bottom - (bottom - top) * (y - low) / (high - low)) for x, y in drawn]
    return Chart(
        title,
        CURVE_PX,
        [
            *(straight("axis", 0, 100, y) for y in (top, (top + bottom) / 2, bottom)),
            stretched("polyline", "curve", places),
            # Few points get a dot each; a single point would otherwise be invisible.
            *(circle("bar", x, y, 3) for x, y in (places if len(places) <= 30 else [])),
            words(number(high), 0, top - 6),
            words(number(low), 0, bottom - 6),
            words("0", 0, CURVE_PX - 5),
            words(f"step {number(last_x)}", 100, CURVE_PX - 5, anchor="end"),
            words(f"last {number(finite[-1][1])}", 100, top - 6, anchor="end"),
        ],
    )


def straight(kind: str, x1: float, x2: float, y1: float, y2: float | None = None) -> Shape:
    """A straight line, horizontal without `y2`; x in percent, y in pixels."""
    ends = {"y1": f"{y1:.1f}", "y2": f"{y1 if y2 is None else y2:.1f}"}
    return Shape("line", {"class": kind, "x1": f"{x1:.2f}%", "x2": f"{x2:.2f}%", **ends})


def circle(kind: str, x: float, y: float, radius_px: float) -> Shape:
    """A mark; x in percent, y in pixels."""
    return Shape("circle", {"class": kind, "cx": f"{x:.2f}%", "cy": f"{y:.1f}", "r": f"{radius_px:g}"})


def stretched(tag: str, kind: str, points: Sequence[tuple[float, float]]) -> Shape:
    """A line or an area through `points`, stretched over the whole width without a change of line width."""
    return Shape(tag, {"class": kind, "points": " ".join(f"{x:.2f},{y:.1f}" for x, y in points)})


def words(text: str, x: float, y: float, *, kind: str = "", dx: float = 0, anchor: str = "") -> Shape:
    """A text; x in percent plus `dx` pixels, y in pixels."""
    given = {"class": kind, "x": f"{x:.2f}%", "dx": f"{dx:g}" if dx else "", "y": f"{y:.1f}", "text-anchor": anchor}
    return Shape("text", {name: value for name, value in given.items() if value}, text)


def _rect(kind: str, x: float, width: float) -> Shape:
    return Shape("rect", {"class": kind, "x": f"{x:.2f}%", "y": "0", "width": f"{width:.2f}%", "height": f"{BAR_PX}"})
