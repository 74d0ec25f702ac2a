"""Plots with two axes as shapes of SVG: x in percent of the width, so that text keeps its size, and y in pixels.

A model has the same number, colour and dashes (`kind`) in every plot; the legend gives its name.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from stillroom.report.drawings import Chart, Key, Shape, circle, straight, stretched, words
from stillroom.report.formats import number

TOP_PX = 30  # the name of the y axis is above the plot
BOTTOM_PX = 300
HEIGHT_PX = 346  # with the ticks of the x axis and its name below
MOST_TICKS = 6  # more do not fit side by side on a phone
PHONE_PX = 290  # width of a plot on a phone; labels are placed so as not to overlap at this width

Point = tuple[float, float]


class Axis(NamedTuple):
    """The range of one axis."""

    name: str
    low: float
    high: float
    log: bool

    def at(self, value: float) -> float:
        """The position of `value`: 0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def holds(self, value: float) -> bool:
        """Whether `value` can be drawn on this axis."""
        return math.isfinite(value) and (value > 0 or not self.log)


class Plane(NamedTuple):
    """Two axes; every drawing below is made on one."""

    x: Axis
    y: Axis

    def at(self, point: Point) -> Point:
        """Percent of the width, and pixels from the top."""
        return 100 * self.x.at(point[0]), BOTTOM_PX - (BOTTOM_PX - TOP_PX) * self.y.at(point[1])

    def drawable(self, points: Iterable[Point]) -> list[Point]:
        """The positions of those `points` that both axes can hold."""
        return [self.at((x, y)) for x, y in points if self.x.holds(x) and self.y.holds(y)]


def log_axis(name: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis with a little room around the positive ones of `values`."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    low, high = min(known, default=1.0), max(known, default=10.0)
    room = max(1.1, (high / low) ** 0.04)
    return Axis(name, low / room, high * room, log=True)


def linear_axis(name: str, values: Iterable[float]) -> Axis:
    """An axis with a little room around `values`."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return Axis(name, low - room, high + room, log=False)


def plot(plane: Plane, parts: Iterable[Sequence[Shape]], title: str, legend: Sequence[Key]) -> Chart:
    """The whole drawing: axes with their ticks, then `parts`. `title` is the text for screen readers."""
    drawn = []
    for value, text in ticks(plane.x):
        x = 100 * plane.x.at(value)
        drawn.append(straight("axis", x, x, TOP_PX, BOTTOM_PX))
        drawn.append(words(text, x, BOTTOM_PX + 17, anchor="middle"))
    for value, text in ticks(plane.y):
        _, y = plane.at((plane.x.low, value))
        drawn.append(straight("axis", 0, 100, y))
        drawn.append(words(text, 0, y + 4, dx=-8, anchor="end"))
    drawn.append(words(plane.x.name, 100, HEIGHT_PX - 8, kind="label", anchor="end"))
    drawn.append(words(plane.y.name, 0, 14, kind="label", dx=-46))
    return Chart(title, HEIGHT_PX, [*drawn, *chain.from_iterable(parts)], legend)


def ticks(axis: Axis) -> list[tuple[float, str]]:
    """At most MOST_TICKS round values along `axis` with their texts."""
    if axis.log:
        decades = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
        for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
            found = [step * 10.0**decade for decade in decades for step in steps]
            found = [value for value in found if axis.low <= value <= axis.high]
            if len(found) <= MOST_TICKS:
                break
        if len(found) >= 2:
            return [(value, number(value)) for value in found[:: math.ceil(len(found) / MOST_TICKS)]]
    rough = (axis.high - axis.low) / MOST_TICKS
    decade = 10.0 ** math.floor(math.log10(rough))
    step = next(times * decade for times in (1, 2, 2.5, 5, 10) if times * decade >= rough)
    decimals = max(0, math.ceil(-math.log10(step) + (0.3 if step / decade == 2.5 else 0)))
    first, last = math.ceil(axis.low / step), math.floor(axis.high / step)
    return [(i * step, f"{i * step:,.{decimals}f}") for i in range(first, last + 1)]


def line(plane: Plane, points: Iterable[Point], kind: str) -> list[Shape]:
    """A line through `points`."""
    drawn = plane.drawable(points)
    return [stretched("polyline", f"series {kind}", drawn)] if drawn else []


def band(plane: Plane, lower: Sequence[Point], upper: Sequence[Point], kind: str) -> list[Shape]:
    """The area between two lines."""
    drawn = plane.drawable([*lower, *reversed(upper)])
    return [stretched("polygon", f"band {kind}", drawn)] if drawn else []


def whisker(plane: Plane, from_: Point, to: Point, kind: str) -> list[Shape]:
    """A thin straight line, such as an interval."""
    ends = plane.drawable([from_, to])
    if len(ends) < 2:
        return []
    (x1, y1), (x2, y2) = ends
    return [straight(f"reach {kind}", x1, x2, y1, y2)]


def dot(plane: Plane, point: Point, kind: str, *, hollow: bool = False, radius_px: float = 5) -> list[Shape]:
    """A mark at `point`."""
    look = "hollow" if hollow else "fill"
    return [circle(f"{look} {kind}", x, y, radius_px) for x, y in plane.drawable([point])]


def level(plane: Plane, y: float, text: str, *, below: bool = False) -> list[Shape]:
    """A line across the whole width at height `y`, with its text at the left, above it or `below`."""
    return [
        shape
        for _, at in plane.drawable([(plane.x.low, y)])
        for shape in (
            straight("guide", 0, 100, at),
            words(text, 0, at + (13 if below else -4), kind="halo", dx=4),
        )
    ]


def upright(plane: Plane, x: float, text: str) -> list[Shape]:
    """A line over the whole height at `x`, with its text beside its upper end."""
    drawn = []
    for at, _ in plane.drawable([(x, plane.y.high)]):
        anchor, shift = ("start", 5) if at < 50 else ("end", -5)
        drawn.append(straight("guide", at, at, TOP_PX, BOTTOM_PX))
        drawn.append(words(text, at, TOP_PX + 11, kind="halo", dx=shift, anchor=anchor))
    return drawn


def beside(plane: Plane, point: Point, text: str, *, up_px: float = -4) -> list[Shape]:
    """`text` at `point`, `up_px` above it."""
    return [words(text, x, y - up_px, kind="halo label", anchor="middle") for x, y in plane.drawable([point])]


def labels(plane: Plane, marks: Sequence[tuple[Point, str]]) -> list[Shape]:
    """A short text beside each mark, clear of the marks and of one another as far as there is room."""
    places = [(x / 100 * PHONE_PX, y, text) for point, text in marks for x, y in plane.drawable([point])]
    taken = [(x, y, 6.0, 6.0) for x, y, _ in places]  # centre, half width, half height
    drawn = []
    for x, y, text in places:
        half = 4.0 * len(text) + 1
        spots = [
            (reach * across, reach * down)
            for reach in (14, 24, 36)
            for across, down in ((0.8, -0.7), (-0.8, -0.7), (0.8, 0.7), (-0.8, 0.7), (0, -1), (0, 1), (1, 0), (-1, 0))
        ]
        free = (spot for spot in spots if not _meets((x + spot[0], y + spot[1], half, 7.0), taken))
        across, down = next(free, spots[0])
        taken.append((x + across, y + down, half, 7.0))
        at = 100 * x / PHONE_PX
        drawn.append(words(text, at, y + down + 4, kind="halo label", dx=across, anchor="middle"))
    return drawn


def spread_px(heights_px: Sequence[float], apart_px: float = 14) -> list[float]:
    """`heights_px` moved up, from the bottom of the page on, until they are `apart_px` apart; their order is kept."""
    placed = list(heights_px)
    below = math.inf
    for i in sorted(range(len(placed)), key=lambda i: -placed[i]):
        placed[i] = below = min(placed[i], below - apart_px)
    return placed


def kind_of(index: int) -> str:
    """Colour and dashes of the model at `index`: eight colours and five kinds of dashes give forty combinations."""
    return f"c{index % 8} d{index % 5}"


def _meets(box: tuple[float, float, float, float], taken: Sequence[tuple[float, float, float, float]]) -> bool:
    x, y, half_width, half_height = box
    if x - half_width < 0 or x + half_width > PHONE_PX + 20 or not TOP_PX <= y <= BOTTOM_PX:
        return True
    return any(abs(x - x2) < half_width + w2 and abs(y - y2) < half_height + h2 for x2, y2, w2, h2 in taken)
