"""Small charts as inline SVG, in percent of their width, so that they fit any screen and text keeps its size."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from stillroom.report.markup import Markup, element, escaped, joined, number

ROW_PX = 44  # a label above a dot
BAR_PX = 14
CURVE_PX = 200
POINTS_DRAWN = 400  # of a curve; more than a screen has columns for adds bytes and no shape


class Bar(NamedTuple):
    """One row of `bars`."""

    label: str
    value: float
    whisker: float  # where the thin line ends, at or above `value`
    note: str  # the numbers in words, at the right of the label
    reference: bool  # drawn muted: the one that the others are compared with


class Stack(NamedTuple):
    """One row of `stacks`."""

    label: str
    parts: Sequence[float]
    note: str  # the numbers in words


class Interval(NamedTuple):
    """One row of `intervals`."""

    label: str
    value: float
    low: float | None
    high: float | None
    note: str


def bars(rows: Sequence[Bar], title: str) -> Markup:
    """Horizontal bars from zero, each with a whisker, one below the other. `title` is for those who cannot see it."""
    full = max([row.whisker for row in rows if math.isfinite(row.whisker)], default=0.0) or 1.0
    drawn = []
    for row in rows:
        value, whisker = (min(100.0, 100 * x / full) if math.isfinite(x) else 0.0 for x in (row.value, row.whisker))
        kind = "reference" if row.reference else "bar"
        parts = [f'<rect class="{kind}" x="0" y="0" width="{value:.2f}%" height="{BAR_PX}" rx="2"/>']
        if whisker > value:
            parts.append(f'<line class="whisker" x1="{value:.2f}%" x2="{whisker:.2f}%" y1="7" y2="7"/>')
        drawn.append(_labelled(row.label, row.note, parts, title))
    return joined(drawn)


def stacks(rows: Sequence[Stack], title: str) -> Markup:
    """A bar of full width per row, cut into the shares of its parts."""
    drawn = []
    for row in rows:
        whole = sum(part for part in row.parts if math.isfinite(part)) or 1.0
        start, cuts = 0.0, []
        for i, part in enumerate(row.parts):
            width = 100 * part / whole if math.isfinite(part) else 0.0
            cuts.append(f'<rect class="fill c{7 - i}" x="{start:.2f}%" y="0" width="{width:.2f}%" height="{BAR_PX}"/>')
            start += width
        drawn.append(_labelled(row.label, row.note, cuts, title))
    return joined(drawn)


def intervals(rows: Sequence[Interval], title: str) -> Markup:
    """A dot with its interval per row, on one scale that spans the intervals and nothing more."""
    known = [x for row in rows for x in (row.value, row.low, row.high) if x is not None and math.isfinite(x)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    margin = 0.04 * (high - low) or 0.5
    low, high = low - margin, high + margin
    parts = []
    for i, row in enumerate(rows):
        top = i * ROW_PX
        at = 100 * (row.value - low) / (high - low)
        parts.append(_row_text(row.label, row.note, top))
        parts.append(f'<line class="axis" x1="0" x2="100%" y1="{top + 30}" y2="{top + 30}"/>')
        if row.low is not None and row.high is not None:
            from_, to = (100 * (x - low) / (high - low) for x in (row.low, row.high))
            parts.append(f'<line class="whisker" x1="{from_:.2f}%" x2="{to:.2f}%" y1="{top + 30}" y2="{top + 30}"/>')
        parts.append(f'<circle class="bar" cx="{at:.2f}%" cy="{top + 30}" r="5"/>')
    return _svg(parts, len(rows) * ROW_PX, title)


def curve(points: Sequence[Sequence[float]], title: str) -> Markup:
    """A line through `[x, y]` points, x from 0, y over the range that it takes; what is not finite is left out."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return Markup("")
    drawn = finite[:: math.ceil(len(finite) / POINTS_DRAWN)]
    if drawn[-1] != finite[-1]:
        drawn.append(finite[-1])
    last_x = max(x for x, _ in finite) or 1.0
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    if low == high:
        low, high = low - 0.5, high + 0.5
    bottom, top = CURVE_PX - 22, 20

    def x_at(x: float) -> float:
        return 100 * x / last_x

    def y_at(y: float) -> float:
        return bottom - (bottom - top) * (y - low) / (high - low)

    # The inner drawing stretches to the width given; its line keeps its thickness, and it holds no text to stretch.
    line = " ".join(f"{x_at(x):.2f},{y_at(y):.1f}" for x, y in drawn)
    parts = [
        *(f'<line class="axis" x1="0" x2="100%" y1="{y}" y2="{y}"/>' for y in (top, (top + bottom) / 2, bottom)),
        f'<svg x="0" y="0" width="100%" height="{CURVE_PX}" viewBox="0 0 100 {CURVE_PX}" preserveAspectRatio="none">',
        f'<polyline class="curve" points="{line}" vector-effect="non-scaling-stroke"/></svg>',
        # Few points are seen as points; a single one would otherwise not be seen at all.
        *(
            f'<circle class="bar" cx="{x_at(x):.2f}%" cy="{y_at(y):.1f}" r="3"/>'
            for x, y in (drawn if len(drawn) <= 30 else [])
        ),
        f'<text x="0" y="{top - 6}">{number(high)}</text>',
        f'<text x="0" y="{bottom - 6}">{number(low)}</text>',
        f'<text x="0" y="{CURVE_PX - 5}">0</text>',
        f'<text x="100%" y="{CURVE_PX - 5}" text-anchor="end">step {number(last_x)}</text>',
        f'<text x="100%" y="{top - 6}" text-anchor="end">last {number(finite[-1][1])}</text>',
    ]
    return _svg(parts, CURVE_PX, title)


def _labelled(label: str, note: str, parts: Sequence[str], title: str) -> Markup:
    """A bar under its label and note, which are HTML: a long name wraps on a narrow screen."""
    words = joined([element("span", label), element("span", note, class_="quiet")])
    return joined([element("p", words, class_="over"), _svg(parts, BAR_PX, f"{title}: {label}, {note}")])


def _row_text(label: str, note: str, top: int) -> str:
    name = f'<text class="label" x="0" y="{top + 15}">{escaped(label)}</text>'
    return f'{name}<text class="note" x="100%" y="{top + 15}" text-anchor="end">{escaped(note)}</text>'


def _svg(parts: Sequence[str], height_px: int, title: str) -> Markup:
    opening = f'<svg class="chart" role="img" aria-label="{escaped(title)}" width="100%" height="{height_px}">'
    return Markup(opening + "".join(parts) + "</svg>")
