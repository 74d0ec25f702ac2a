"""Candidates on batches and lengths: a chart and a table for each shape, and what the measurements doubt."""

from collections.abc import Sequence

from latency.measure.result_document import CandidateRow, ProfileDocument, RatioRow
from stillroom.report.drawings import Bar, bars
from stillroom.report.markup import (
    Cell,
    Markup,
    details,
    element,
    figure,
    filled,
    joined,
    number,
    number_or_none,
    score,
    size,
    table,
)

# Beside every table in which somebody could divide one p50 by another.
PAIRED = "Speed-ups are ratios paired turn by turn, and so not the quotients of the p50 column."


def grid_charts(document: ProfileDocument) -> Markup:
    """Bars of median and p99, a chart for each batch and length."""
    charts = []
    for caption, rows in _by_shape(document):
        drawn = [
            Bar(row["name"], row["p50_ms"], row["p99_ms"], f"{number(row['p50_ms'])} ms", reference=i == 0)
            for i, row in enumerate(rows)
        ]
        charts.append(figure(caption, bars(drawn, f"median and p99 latency, {caption}")))
    reading = (
        "Bars are medians, whiskers reach to p99; the first candidate is the reference. "
        "Each ran in a process of its own, taking turns with the others."
    )
    return joined([element("p", reading, class_="quiet"), element("div", joined(charts), class_="charts")])


def grid_tables(document: ProfileDocument) -> list[tuple[str, Markup]]:
    """A caption and a table for each batch and length."""
    return [(caption, table(*grid_table(document, rows, with_shape=False))) for caption, rows in _by_shape(document)]


def grid_table(
    document: ProfileDocument, rows: Sequence[CandidateRow], *, with_shape: bool
) -> tuple[list[str], list[list[Cell]]]:
    """Header and cells, what matters most first, for narrow screens; columns without any value are left out."""
    ratios = {(ratio["b"], ratio["batch"], ratio["tokens"]): ratio for ratio in document["ratios"]}
    shape: list[tuple[str, list[Cell]]] = [
        ("batch", [row["batch"] for row in rows]),
        ("tokens", [row["tokens"] for row in rows]),
    ]
    columns: list[tuple[str, list[Cell]]] = [
        ("candidate", [row["name"] for row in rows]),
        *(shape if with_shape else []),
        ("p50 ms", [number(row["p50_ms"]) for row in rows]),
        ("p90 ms", [number(row["p90_ms"]) for row in rows]),
        ("p95 ms", [number_or_none(row.get("p95_ms")) for row in rows]),
        ("p99 ms", [number(row["p99_ms"]) for row in rows]),
        ("texts/s", [number(row["texts_per_s"]) for row in rows]),
        ("speed-up (95 %)", [_speed_up(ratios.get((row["name"], row["batch"], row["tokens"]))) for row in rows]),
        ("metric", [score(row.get("metric")) for row in rows]),
        ("size", [size(row.get("size_bytes")) for row in rows]),
        ("doubts", [len(row["doubts"]) for row in rows]),
        ("runtime", [row["runtime"] for row in rows]),
        ("precision", [row["precision"] for row in rows]),
        ("device", [row.get("device") for row in rows]),
    ]
    return filled(columns)


def doubts_in_short(document: ProfileDocument) -> Markup:
    """What the measurements say against themselves: in short where nobody overlooks it, in full folded away."""
    short, said = doubts(document)
    if not said:
        return Markup("")
    full = details(f"All {len(said)} doubts", table(["measurement", "doubt"], said))
    return element("aside", joined([element("strong", short), full]), class_="warnings")


def doubts(document: ProfileDocument) -> tuple[str, list[list[Cell]]]:
    """One sentence on how many measurements doubt themselves, empty for none, and `[measurement, doubt]` of each."""
    measurements = [
        (f"{row['name']}, batch {row['batch']}, {row['tokens']} tokens", row["doubts"])
        for row in document["candidates"]
    ]
    measurements += [
        (f"{model['name']}, one text at a time", model["single_stream"]["doubts"])
        for model in document.get("models", [])
        if "single_stream" in model
    ]
    said: list[list[Cell]] = [[what, doubt] for what, listed in measurements for doubt in listed]
    if not said:
        return "", []
    doubted = sum(bool(listed) for _, listed in measurements)
    return f"{doubted} of {len(measurements)} measurements doubt themselves; read these before quoting a number.", said


def speed_up(ratio: RatioRow) -> tuple[str, str, str]:
    """The ratio and the ends of its interval: `8.10`, `7.92`, `8.41`, or with one decimal from ten on."""
    decimals = 1 if ratio["high"] >= 10 else 2
    return f"{ratio['ratio']:.{decimals}f}", f"{ratio['low']:.{decimals}f}", f"{ratio['high']:.{decimals}f}"


def _speed_up(ratio: RatioRow | None) -> str | None:
    """`8.10 (7.92 – 8.41)`; None for the reference itself."""
    if ratio is None:
        return None
    value, low, high = speed_up(ratio)
    return f"{value} ({low} – {high})"


def _by_shape(document: ProfileDocument) -> list[tuple[str, list[CandidateRow]]]:
    """The rows of each batch and length under the words for it, in the order measured."""
    shapes = list(dict.fromkeys((row["batch"], row["tokens"]) for row in document["candidates"]))
    return [
        (
            f"batch {batch}, {tokens} tokens",
            [row for row in document["candidates"] if (row["batch"], row["tokens"]) == (batch, tokens)],
        )
        for batch, tokens in shapes
    ]
