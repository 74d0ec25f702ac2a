"""Candidates on batches and lengths: a chart and a table for each shape, and one table with all figures."""

from collections.abc import Sequence
from typing import NamedTuple

from latency.measure.result_document import CandidateRow, ProfileDocument, RatioRow
from stillroom.report.drawings import Bar, Row, bars
from stillroom.report.formats import Cell, Estimate, Table, number, score, size, table

# Beside every table with a p50 column and speed-ups.
PAIRED = "Speed-ups are ratios paired turn by turn, so they differ from quotients of the p50 column."


class Shape(NamedTuple):
    """The candidates at one batch and length."""

    caption: str
    bars: list[Row]  # medians, with whiskers to p99
    figures: Table  # those that fit a phone


def shapes(document: ProfileDocument) -> list[Shape]:
    """Each batch and length, in the order measured."""
    found = dict.fromkeys((row["batch"], row["tokens"]) for row in document["candidates"])
    return [
        _shape(document, [row for row in document["candidates"] if (row["batch"], row["tokens"]) == shape])
        for shape in found
    ]


def _shape(document: ProfileDocument, rows: Sequence[CandidateRow]) -> Shape:
    drawn = [
        Bar(row["name"], row["p50_ms"], row["p99_ms"], f"{number(row['p50_ms'])} ms", reference=i == 0)
        for i, row in enumerate(rows)
    ]
    columns = dict(_columns(document, rows))
    few = [(name, columns[name]) for name in ("candidate", "p50 ms", "p99 ms", "texts/s", "speed-up")]
    return Shape(f"batch {rows[0]['batch']}, {rows[0]['tokens']} tokens", bars(drawn), table(*few))


def all_figures(document: ProfileDocument) -> Table:
    """A row for each candidate, batch and length, with all figures."""
    return table(*_columns(document, document["candidates"]))


def _columns(document: ProfileDocument, rows: Sequence[CandidateRow]) -> list[tuple[str, Sequence[Cell]]]:
    ratios = {(ratio["b"], ratio["batch"], ratio["tokens"]): ratio for ratio in document["ratios"]}
    return [
        ("candidate", [row["name"] for row in rows]),
        ("batch", [row["batch"] for row in rows]),
        ("tokens", [row["tokens"] for row in rows]),
        ("p50 ms", [row["p50_ms"] for row in rows]),
        ("p90 ms", [row["p90_ms"] for row in rows]),
        ("p95 ms", [row.get("p95_ms") for row in rows]),
        ("p99 ms", [row["p99_ms"] for row in rows]),
        ("texts/s", [row["texts_per_s"] for row in rows]),
        ("speed-up", [speed_up(ratios.get((row["name"], row["batch"], row["tokens"]))) for row in rows]),
        ("metric", [score(row.get("metric")) for row in rows]),
        ("size", [size(row.get("size_bytes")) for row in rows]),
        ("doubts", [len(row["doubts"]) for row in rows]),
        ("runtime", [row["runtime"] for row in rows]),
        ("precision", [row["precision"] for row in rows]),
        ("device", [row.get("device") for row in rows]),
    ]


def speed_up(ratio: RatioRow | None) -> Estimate | None:
    """The ratio with its interval, in two decimals, or one if an end is 10 or more; None for the reference itself."""
    if ratio is None:
        return None
    decimals = 1 if ratio["high"] >= 10 else 2
    return Estimate(*(f"{ratio[key]:.{decimals}f}" for key in ("ratio", "low", "high")))
