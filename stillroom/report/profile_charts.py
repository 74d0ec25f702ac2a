"""The plots of a profile, each made from the document; None where it has nothing to draw."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from stillroom.report.charts import (
    Axis,
    Plane,
    Point,
    band,
    beside,
    dot,
    kind_of,
    labels,
    level,
    line,
    linear_axis,
    log_axis,
    plot,
    spread_px,
    upright,
    whisker,
)
from stillroom.report.drawings import Chart, Key, words
from stillroom.report.formats import number, percent, score

CURVE_POINTS = 160  # of a distribution; a phone shows no more
LENGTH_BINS = 8
ROOFLINE: tuple[Literal["flops_per_text", "bytes_per_text", "gflop_per_s"], ...] = (
    "flops_per_text",
    "bytes_per_text",
    "gflop_per_s",
)  # the costs that a point of the roofline needs

Floats = npt.NDArray[np.float64]


class LengthBin(NamedTuple):
    """The run times of texts of similar length."""

    tokens: float  # median
    p10_ms: float
    p50_ms: float
    p90_ms: float


def pareto(document: dict[str, Any]) -> Chart | None:
    """Metric against median latency, with the Pareto front as a step line and the budget as a vertical line."""
    shown = [
        (i, row, row["metric"], row["single_stream"])
        for i, row in enumerate(document.get("models", []))
        if "metric" in row and "single_stream" in row
    ]
    if not shown:
        return None
    budget, front = document.get("budget"), document.get("front", [])
    times_ms = [x for _, _, _, timed in shown for x in (timed["p50_ms"], *timed["intervals_ms"].get("p50", []))]
    times_ms += [_reached_ms(row, budget) for _, row, _, _ in shown]
    values = [x for _, _, metric, _ in shown for x in (metric["value"], metric["low"], metric["high"])]
    name = shown[0][2]["name"]
    plane = Plane(
        log_axis("median latency of one text, ms", [*times_ms, *([budget["budget_ms"]] if budget else [])]),
        linear_axis(name, values),
    )
    corners = sorted((timed["p50_ms"], metric["value"]) for _, row, metric, timed in shown if row["name"] in front)
    parts = [line(plane, _steps(corners, plane), "front")]
    for i, row, metric, timed in shown:
        at = (timed["p50_ms"], metric["value"])
        low_ms, high_ms = timed["intervals_ms"].get("p50", [at[0], at[0]])
        parts += [
            whisker(plane, at, (_reached_ms(row, budget), at[1]), f"tail {kind_of(i)}"),
            whisker(plane, (low_ms, at[1]), (high_ms, at[1]), kind_of(i)),
            whisker(plane, (at[0], metric["low"]), (at[0], metric["high"]), kind_of(i)),
        ]
    if budget:
        said = f"budget {number(budget['budget_ms'])} ms, p{budget['percentile']}"
        parts.append(upright(plane, budget["budget_ms"], said))
    hollow = [i for i, row, _, _ in shown if row["name"] not in front]
    for i, _, metric, timed in shown:
        parts.append(dot(plane, (timed["p50_ms"], metric["value"]), kind_of(i), hollow=i in hollow))
    parts.append(labels(plane, [((timed["p50_ms"], m["value"]), str(i + 1)) for i, _, m, timed in shown]))
    legend = [
        Key(
            i,
            row["name"],
            f"{score(metric['value'])}, {number(timed['p50_ms'])} ms{', front' if row['name'] in front else ''}",
            "hollow" if i in hollow else "fill",
        )
        for i, row, metric, timed in shown
    ]
    return plot(plane, parts, f"{name} against median latency", legend)


def distribution(document: dict[str, Any]) -> Chart | None:
    """The share of texts answered within a time, a curve for each model."""
    shown = [(i, row, np.sort(_whole_ms(row))) for i, row in _with_samples(document)]
    if not shown:
        return None
    ends = [float(x) for _, _, whole_ms in shown for x in (whole_ms[0], whole_ms[-1])]
    plane = Plane(log_axis("from text to answer, ms", ends), Axis("share of texts, %", 0.0, 103.0, log=False))
    parts = [level(plane, share, f"p{share}", below=True) for share in (50, 90, 99)]
    marks = []
    for place, (i, _, whole_ms) in enumerate(shown):
        parts.append(line(plane, _curve(whole_ms), kind_of(i)))
        # Each number is at another height on its curve, so that no two overlap.
        share = 15 + 70 * (place + 0.5) / len(shown)
        marks.append(beside(plane, (float(np.percentile(whole_ms, share)), share), str(i + 1)))
    legend = [
        Key(
            i,
            row["name"],
            f"{number(timed['p50_ms'])} · {number(timed['p90_ms'])} · {number(timed['p99_ms'])} ms",
            "line",
        )
        for i, row, _ in shown
        if (timed := row["single_stream"])
    ]
    return plot(plane, [*parts, *marks], "share of texts answered within a time, by model", legend)


def lengths(document: dict[str, Any]) -> Chart | None:
    """Run time against length: a line through the medians, and a band from the 10th to the 90th percentile."""
    shown = [(i, row, bins) for i, row in _with_samples(document) if len(bins := length_bins(row["single_stream"])) > 1]
    if not shown:
        return None
    times_ms = [x for _, _, bins in shown for one in bins for x in (one.p10_ms, one.p90_ms)]
    plane = Plane(
        log_axis("tokens of the text", [one.tokens for _, _, bins in shown for one in bins]),
        log_axis("run time, ms", times_ms),
    )
    parts = []
    for i, _, bins in shown:
        below, above = [(one.tokens, one.p10_ms) for one in bins], [(one.tokens, one.p90_ms) for one in bins]
        parts.append(band(plane, below, above, kind_of(i)))
    for i, _, bins in shown:
        middle = [(one.tokens, one.p50_ms) for one in bins]
        parts.append(line(plane, middle, kind_of(i)))
        parts += [dot(plane, point, kind_of(i), radius_px=2.5) for point in middle]
    # Numbers are at the right ends of the lines, moved apart where ends are close.
    ends = [plane.at((bins[-1].tokens, bins[-1].p50_ms)) for _, _, bins in shown]
    heights_px = spread_px([y for _, y in ends])
    numbers = zip(shown, ends, heights_px, strict=True)
    parts.append([words(str(i + 1), x, y + 4, kind="halo label", dx=8) for (i, _, _), (x, _), y in numbers])
    legend = [Key(i, row["name"], "", "line") for i, row, _ in shown]
    return plot(plane, parts, "run time against length in tokens, by model", legend)


def calls(timed: dict[str, Any]) -> Floats:
    """The samples as (calls, 4): tokens, tokenise_ms, run_ms, decode_ms; calls without a finite time are left out."""
    samples = np.asarray(timed["samples"], dtype=np.float64).reshape(-1, 4)
    return samples[np.isfinite(samples).all(axis=1)]


def length_bins(timed: dict[str, Any]) -> list[LengthBin]:
    """The samples by length, in up to LENGTH_BINS groups of about equal size; texts of one length are in one group."""
    samples = calls(timed)
    if not len(samples):
        return []
    tokens, run_ms = samples[:, 0], samples[:, 2]
    edges = np.unique(np.quantile(tokens, np.linspace(0, 1, LENGTH_BINS + 1)[1:-1], method="nearest"))
    places = np.searchsorted(edges, tokens, side="left")
    found = []
    for place in np.unique(places):
        inside = places == place
        p10_ms, p50_ms, p90_ms = (float(x) for x in np.percentile(run_ms[inside], [10, 50, 90]))
        if p50_ms > 0:
            found.append(LengthBin(float(np.median(tokens[inside])), p10_ms, p50_ms, p90_ms))
    return found


def roofline(document: dict[str, Any]) -> Chart | None:
    """The rate that the machine can reach at each arithmetic intensity, and the rate of each model."""
    peaks = document.get("peaks", {})
    known = {
        "fp32": peaks.get("fp32_gflop_per_s"),
        "bf16": peaks.get("bf16_gflop_per_s"),
        "int8": peaks.get("int8_gflop_per_s"),
    }
    ceilings = [(precision, height) for precision, height in known.items() if height and 0 < height < math.inf]
    bandwidth = peaks.get("bandwidth_gb_per_s")
    shown = [
        (i, row, cost["flops_per_text"] / cost["bytes_per_text"], cost["gflop_per_s"])
        for i, row in enumerate(document.get("models", []))
        if set(ROOFLINE) <= (cost := row["cost"]).keys()
        and all(math.isfinite(cost[key]) and cost[key] > 0 for key in ROOFLINE)
    ]
    if not shown or not ceilings or not bandwidth:
        return None
    alone = {i: _gflop_per_s_alone(row) for i, row, _, _ in shown}
    rates = [rate for _, _, _, rate in shown] + [rate for rate in alone.values() if rate is not None]
    ridges = [height / bandwidth for _, height in ceilings]
    plane = Plane(
        log_axis("flop per byte moved", [*(x for _, _, x, _ in shown), max(ridges) * 4, min(ridges) / 4]),
        log_axis("GFLOP/s", [*rates, *(height for _, height in ceilings)]),
    )
    highest = max(height for _, height in ceilings)
    foot = max(plane.x.low, plane.y.low / bandwidth)
    shown = [(i, row, x, rate) for (i, row, _, rate), x in zip(shown, _side_by_side(plane.x, shown), strict=True)]
    parts = [line(plane, [(foot, foot * bandwidth), (highest / bandwidth, highest)], "roof")]
    tops = spread_px([plane.at((1.0, height))[1] for _, height in ceilings])
    for (precision, height), top in zip(ceilings, tops, strict=True):
        parts.append(line(plane, [(height / bandwidth, height), (plane.x.high, height)], "roof"))
        parts.append([words(f"{precision} {number(height)}", 100, top - 4, kind="halo", anchor="end")])
    for i, _, intensity, rate in shown:
        if (one := alone[i]) is not None:
            parts.append(whisker(plane, (intensity, one), (intensity, rate), kind_of(i)))
            parts.append(dot(plane, (intensity, one), kind_of(i), hollow=True, radius_px=4))
        parts.append(dot(plane, (intensity, rate), kind_of(i)))
    parts += [beside(plane, (x, rate), str(i + 1), up_px=9) for i, _, x, rate in shown]
    legend = [Key(i, row["name"], _reached(row), "fill") for i, row, _, _ in shown]
    return plot(plane, parts, "roofline: rate of computing against arithmetic intensity", legend)


def _gflop_per_s_alone(row: dict[str, Any]) -> float | None:
    """A model's rate on one text at a time: the flop of the mean text over the mean run time."""
    timed = row.get("single_stream")
    if timed is None or not len(calls(timed)) or "flops_per_text" not in row["cost"]:
        return None
    mean_ms = float(calls(timed)[:, 2].mean())
    return row["cost"]["flops_per_text"] / mean_ms / 1e6 if mean_ms > 0 else None


def server(document: dict[str, Any]) -> Chart | None:
    """p99 against the rate of arrivals, a line for each model; filled dots are within the bound."""
    shown = [
        (i, row, sorted(row["server"]["trials"], key=lambda trial: trial["rate_per_s"]))
        for i, row in enumerate(document.get("models", []))
        if "server" in row and row["server"]["trials"]
    ]
    if not shown:
        return None
    bounds_ms = sorted({row["server"]["bound_ms"] for _, row, _ in shown})
    trials = [trial for _, _, listed in shown for trial in listed]
    plane = Plane(
        log_axis("texts that arrive a second", [trial["rate_per_s"] for trial in trials]),
        log_axis("p99, ms", [*(trial["p99_ms"] for trial in trials), *bounds_ms]),
    )
    parts = []
    for i, _, listed in shown:
        parts.append(line(plane, [(trial["rate_per_s"], trial["p99_ms"]) for trial in listed], kind_of(i)))
        parts += [
            dot(plane, (trial["rate_per_s"], trial["p99_ms"]), kind_of(i), hollow=not trial["held"], radius_px=3.5)
            for trial in listed
        ]
    parts += [level(plane, bound_ms, f"bound {number(bound_ms)} ms") for bound_ms in bounds_ms]
    lasts = [((listed[-1]["rate_per_s"], listed[-1]["p99_ms"]), str(i + 1)) for i, _, listed in shown]
    parts.append(labels(plane, lasts))
    rates = [row["server"]["rate_per_s"] for _, row, _ in shown]
    notes = [f"up to {number(rate)} a second" if rate else "at no rate tried" for rate in rates]
    named = zip(shown, notes, strict=True)
    legend = [Key(i, row["name"], f"within the bound {note}", "line") for (i, row, _), note in named]
    return plot(plane, parts, "p99 against the rate of arrivals, by model", legend)


def _with_samples(document: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    return [
        (i, row)
        for i, row in enumerate(document.get("models", []))
        if "single_stream" in row and len(calls(row["single_stream"]))
    ]


def _whole_ms(row: dict[str, Any]) -> Floats:
    """The end-to-end time of each call."""
    whole_ms: Floats = calls(row["single_stream"])[:, 1:].sum(axis=1)
    return whole_ms


def _curve(sorted_ms: Floats) -> list[Point]:
    """The distribution as `(ms, percent)`, at most CURVE_POINTS, a third of them in the slowest tenth."""
    count = min(len(sorted_ms), CURVE_POINTS)
    body = np.linspace(0, 90, count - count // 3, endpoint=False)
    shares = np.concatenate([body, np.linspace(90, 100, count // 3)]) if count >= 3 else np.linspace(0, 100, count + 1)
    return [(float(ms), float(share)) for ms, share in zip(np.percentile(sorted_ms, shares), shares, strict=True)]


def _reached_ms(row: dict[str, Any], budget: dict[str, Any] | None) -> float:
    """The model's latency at the percentile of the budget; without a budget, its median."""
    timed = row["single_stream"]
    if budget is None or not len(calls(timed)):
        return float(timed["p50_ms"])
    return float(np.percentile(_whole_ms(row), budget["percentile"]))


def _steps(corners: Sequence[Point], plane: Plane) -> list[Point]:
    """The step line from the bottom over each of `corners`, the fastest first, to the right."""
    if not corners:
        return []
    path: list[Point] = [(corners[0][0], plane.y.low)]
    for x, y in corners:
        path += [(x, path[-1][1]), (x, y)]
    return [*path, (plane.x.high, corners[-1][1])]


def _side_by_side(axis: Axis, shown: Sequence[tuple[int, dict[str, Any], float, float]]) -> list[float]:
    """The x of each model on `axis`. Models of nearly the same intensity, such as those of one precision, are drawn side by side."""
    intensities = [intensity for _, _, intensity, _ in shown]
    drawn = []
    for i, intensity in enumerate(intensities):
        near = [j for j, other in enumerate(intensities) if abs(other / intensity - 1) < 0.1]
        places = near.index(i) - (len(near) - 1) / 2
        drawn.append(intensity * (axis.high / axis.low) ** (0.035 * places))
    return drawn


def _reached(row: dict[str, Any]) -> str:
    """A model's rate, its share of the peak, and its share of the bandwidth, as far as known."""
    peak_share, bandwidth_share = percent(row["cost"].get("peak_share")), percent(row["cost"].get("bandwidth_share"))
    said = [
        f"{number(row['cost']['gflop_per_s'])} GFLOP/s",
        f"{peak_share} of the {row['precision']} peak" if peak_share else "",
        f"{bandwidth_share} of the bandwidth on one text" if bandwidth_share else "",
    ]
    return ", ".join(filter(None, said))
