"""Timings of candidates on batches and lengths, as charts and tables; and doubts about the timings, with advice."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from latency.measure.statistics import FEW_SAMPLES, OTHER_LOAD, TIME_UP
from serve.wording import counted
from stillroom.report.drawings import Bar, bars
from stillroom.report.formats import Cell, Estimate, Table, number, percent, score, size, table
from stillroom.report.pages import Part

# Beside every table with a p50 column and speed-ups.
PAIRED = "Speed-ups are ratios paired turn by turn, so they differ from quotients of the p50 column."


def latencies(document: dict[str, Any], *, folded: bool = False) -> list[Part]:
    """A chart and a table for each batch and length, in the order measured, then all figures, collapsed."""
    charts = []
    for batch, tokens in dict.fromkeys((row["batch"], row["tokens"]) for row in document["candidates"]):
        rows = [row for row in document["candidates"] if (row["batch"], row["tokens"]) == (batch, tokens)]
        drawn = [
            Bar(row["name"], row["p50_ms"], row["p99_ms"], f"{number(row['p50_ms'])} ms", reference=i == 0)
            for i, row in enumerate(rows)
        ]
        caption, columns = f"batch {batch}, {tokens} tokens", dict(_columns(document, rows))
        # Those that fit a phone.
        few = table(*((name, columns[name]) for name in ("candidate", "p50 ms", "p99 ms", "texts/s", "speed-up")))
        figures: Part = ("details", f"The figures at {caption}", [few]) if folded else few
        charts.append(("figure", caption, [("bars", f"median and p99 latency, {caption}", bars(drawn)), figures]))
    every: Part = ("details", "All figures: percentiles, sizes, runtimes", [all_figures(document)])
    return [("note", "latencies"), ("charts", charts), every, ("quiet", PAIRED if document["ratios"] else "")]


def all_figures(document: dict[str, Any]) -> Table:
    """A row for each candidate, batch and length, with all figures."""
    return table(*_columns(document, document["candidates"]))


def _columns(document: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[tuple[str, Sequence[Cell]]]:
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


def speed_up(ratio: dict[str, Any] | None) -> Estimate | None:
    """The ratio with its interval, in two decimals, or one if an end is 10 or more; None for the reference itself."""
    if ratio is None:
        return None
    decimals = 1 if ratio["high"] >= 10 else 2
    return Estimate(*(f"{ratio[key]:.{decimals}f}" for key in ("ratio", "low", "high")))


class Doubts(NamedTuple):
    """One sentence with advice, and a row for each reason: the timing and the reason."""

    sentence: str
    reasons: Table


def doubts(document: dict[str, Any]) -> Doubts | None:
    """The doubts about the timings of `document`, with advice; None where there are none."""
    named: list[tuple[str, Any]] = [
        (f"{row['name']}, batch {row['batch']}, {row['tokens']} tokens", row) for row in document["candidates"]
    ]
    named += [
        (f"{model['name']}, one text at a time", model["single_stream"])
        for model in document.get("models", [])
        if "single_stream" in model
    ]
    reasons = [(name, doubt) for name, timing in named for doubt in timing["doubts"]]
    if not reasons:
        return None
    table_of_reasons = table(
        ("timing", [name for name, _ in reasons]), ("reason", [said for _, said in reasons]), words=True
    )
    return Doubts(_advice([timing for _, timing in named], document["machine"].get("cores", 0)), table_of_reasons)


def _advice(timings: Sequence[Any], cores: int) -> str:
    """The reason that most timings share, and what to do for narrower intervals."""

    def doubted(said: Callable[[str], bool]) -> list[Any]:
        return [timing for timing in timings if any(map(said, timing["doubts"]))]

    loaded = doubted(lambda doubt: doubt.startswith(OTHER_LOAD))
    short = doubted(lambda doubt: doubt.startswith((TIME_UP, FEW_SAMPLES)))
    unsteady = doubted(lambda doubt: not doubt.startswith((OTHER_LOAD, TIME_UP, FEW_SAMPLES)))
    load_cores = max((float(timing.get("conditions", {}).get("other_load_cores", 0)) for timing in loaded), default=0.0)
    used = f"up to {percent(min(1.0, load_cores / cores))}" if load_cores and cores else "a part"
    causes = [
        (len(loaded), f"Other processes used {used} of the cores during"),
        (len(unsteady), "Times varied by more than 10\N{NO-BREAK SPACE}% within"),
        (len(short), "The time was too short for"),
    ]
    count, cause = max(causes, key=lambda each: each[0])
    others = "close other programs and time again" if loaded or unsteady else "time again"
    longer = " for longer (`--latency-seconds`; of `profile` `--seconds`)" if short else ""
    timed = f"{count} of {counted(len(timings), 'timing')}"
    return f"{cause} {timed}: {others}{longer} for narrower intervals."
