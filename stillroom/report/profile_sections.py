"""Tables, bars and sentences for the sections of a profile's page; empty where nothing was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from serve.wording import counted
from stillroom.report.drawings import Bar, Row, bars, stack
from stillroom.report.formats import Cell, Estimate, Model, Table, number, percent, size, table
from stillroom.report.pages import Part
from stillroom.report.profile_charts import length_bins

PARTS = ("tokenise", "run", "decode")
KINDS_SHOWN = 8  # of operators; the rest together


def models_of(document: dict[str, Any]) -> list[Model]:
    """The models with their numbers."""
    return [Model(i, row["name"]) for i, row in enumerate(document.get("models", []))]


def length_table(document: dict[str, Any]) -> Table:
    """Run times by length: medians, with the 10th and 90th percentiles."""
    binned = [
        (model, {one.tokens: one for one in bins})
        for model, row in zip(models_of(document), document.get("models", []), strict=True)
        if "single_stream" in row and (bins := length_bins(row["single_stream"]))
    ]
    columns: list[tuple[str, Sequence[Cell]]] = [("model", [model for model, _ in binned])]
    for tokens in sorted({tokens for _, bins in binned for tokens in bins}):
        found = [bins.get(tokens) for _, bins in binned]
        cells = [Estimate(number(one.p50_ms), number(one.p10_ms), number(one.p90_ms)) if one else None for one in found]
        columns.append((f"{number(tokens)} tokens, ms", cells))
    return table(*columns)


def parts_of_calls(document: dict[str, Any]) -> list[Row]:
    """The parts of a call on one text, a bar for each model."""
    rows = []
    for i, row in enumerate(document.get("models", [])):
        if parts_ms := row["single_stream"]["parts_ms"] if "single_stream" in row else {}:
            parts = [parts_ms.get(part, 0.0) for part in PARTS]
            rows.append(stack(f"{i + 1} {row['name']}", parts, f"{' + '.join(map(number, parts))} ms"))
    return rows


def operators_of(document: dict[str, Any]) -> list[Part]:
    """The operators of the profiled graphs."""
    times: list[Part] = []
    for name, found in ((row["name"], row["operators"]) for row in document.get("models", []) if "operators" in row):
        top, shares = found["top"], {"by kind of operator": found["by_kind"], "by layer": found["by_layer"]}
        columns: list[tuple[str, Sequence[Cell]]] = [
            ("operator", [one["kind"] for one in top]),
            ("layer", [one["layer"] for one in top]),
            ("ms", [one["ms"] for one in top]),
            ("of the time", [percent(one["share"]) for one in top]),
            ("nodes", [one["calls"] for one in top]),
        ]
        spent = f"{percent(found['matrix_share'])} of its time in matrix products ({found['tokens']} tokens)"
        charts = [("figure", caption, [("bars", caption, _share_bars(of))]) for caption, of in shares.items() if of]
        times.append(("details", f"{name} spends {spent}", [("charts", charts), table(*columns)]))
    return times


def _share_bars(shares: Mapping[str, float]) -> list[Row]:
    """The KINDS_SHOWN largest shares, and the sum of the others."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    rest = sum(share for _, share in ordered[KINDS_SHOWN:])
    others = len(ordered) - KINDS_SHOWN
    kept = [*ordered[:KINDS_SHOWN], *([(counted(others, "other"), rest)] if rest else [])]
    return bars([Bar(name, share, share, percent(share) or "") for name, share in kept])


def nearest_to_the_peak(document: dict[str, Any]) -> str:
    """A sentence: the model with the largest share of the machine's peak."""
    known = [row for row in document.get("models", []) if "peak_share" in row["cost"]]
    if not known:
        return ""
    nearest = max(known, key=lambda row: row["cost"]["peak_share"])
    return (
        f"Nearest to the machine's peak: {nearest['name']}, offline at {percent(nearest['cost']['peak_share'])} "
        f"of the rate of large matrix products in {nearest['precision']}."
    )


def threads_of(document: dict[str, Any]) -> tuple[list[str], Table]:
    """The results of every split of the cores: a sentence for each model, and a table."""
    rows = document.get("sweep", [])

    def spent(row: dict[str, Any]) -> str:
        return f"{counted(row['processes'], 'process', 'processes')} of {counted(row['threads'], 'thread')}"

    said = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        most, least = max(own, key=lambda row: row["texts_per_s"]), min(own, key=lambda row: row["p50_ms"])
        said.append(
            f"{name}: most texts with {spent(most)}, {number(most['texts_per_s'])} a second; "
            f"lowest median with {spent(least)}, {number(least['p50_ms'])} ms."
        )
    return said, table(
        ("model", [row["name"] for row in rows]),
        ("processes x threads", [f"{row['processes']} x {row['threads']}" for row in rows]),
        ("p50 ms", [row["p50_ms"] for row in rows]),
        ("p99 ms", [row["p99_ms"] for row in rows]),
        ("texts/s together", [row["texts_per_s"] for row in rows]),
        rows_are="settings",
    )


def cost_tables(document: dict[str, Any]) -> list[Part]:
    """The costs of each model: start and memory, and for each text."""
    costs = [row["cost"] for row in document.get("models", [])]

    def units(value: float | None, unit: float, suffix: str = "") -> str | None:
        return None if value is None else f"{number(value / unit)}{suffix}"

    tables: dict[str, list[tuple[str, Sequence[Cell]]]] = {
        "Start and memory": [
            ("cold start, ms", [cost.get("cold_start_ms") for cost in costs]),
            ("load, ms", [cost.get("load_ms") for cost in costs]),
            ("first answer, ms", [cost.get("first_answer_ms") for cost in costs]),
            ("peak memory", [size(cost.get("memory_peak_bytes")) for cost in costs]),
            ("memory after", [size(cost.get("memory_steady_bytes")) for cost in costs]),
            ("size", [size(cost.get("size_bytes")) for cost in costs]),
            ("parameters", [units(cost.get("parameters"), 1e6, " M") for cost in costs]),
        ],
        "Each text": [
            ("GFLOP per text", [units(cost.get("flops_per_text"), 1e9) for cost in costs]),
            ("GFLOP/s", [cost.get("gflop_per_s") for cost in costs]),
            ("of the peak", [percent(cost.get("peak_share")) for cost in costs]),
            ("MB moved per text", [units(cost.get("bytes_per_text"), 1e6) for cost in costs]),
            ("of the bandwidth", [percent(cost.get("bandwidth_share")) for cost in costs]),
            ("joules per text", [cost.get("joules_per_text") for cost in costs]),
            ("texts per hour", [units(cost.get("texts_per_hour"), 1) for cost in costs]),
            ("price per million", [cost.get("price_per_million") for cost in costs]),
        ],
    }
    models = ("model", models_of(document))
    return [("under", name, [table(models, *columns)]) for name, columns in tables.items() if table(*columns)]


def texts_in_words(document: dict[str, Any]) -> str:
    """The timed texts, in a sentence."""
    if "work" not in document:
        return ""
    work = document["work"]
    percentiles = ", ".join(f"{name} {number(value)}" for name, value in work["tokens_percentiles"].items())
    return f"{work['texts']:,} texts of {work['source']}, {number(work['tokens_mean'])} tokens long on average ({percentiles})."


def conditions_of(document: dict[str, Any]) -> Table:
    """The settings of each model's run."""
    models = document.get("models", [])
    timed = [row.get("single_stream") for row in models]
    return table(
        ("model", models_of(document)),
        ("given as", [row["model"] for row in models]),
        ("runtime", [row["runtime"] for row in models]),
        ("precision", [row["precision"] for row in models]),
        ("device", [row["device"] for row in models]),
        ("threads", [row["threads"] for row in models]),
        ("texts timed", [len(one["samples"]) if one else None for one in timed]),
        ("turns", [len(one["turn_sizes"]) if one else None for one in timed]),
        ("scored on", [row["metric"]["examples"] if "metric" in row else None for row in models]),
    )


def timing_conditions(document: dict[str, Any]) -> Table:
    """The recorded conditions of the timings of one text at a time, a column each."""
    found = [
        (model, row["single_stream"]["conditions"])
        for model, row in zip(models_of(document), document.get("models", []), strict=True)
        if "single_stream" in row
    ]
    keys = dict.fromkeys(key for _, conditions in found for key in conditions)
    columns = [(key.replace("_", " "), [conditions.get(key) for _, conditions in found]) for key in keys]
    return table(("model", [model for model, _ in found]), *columns) if columns else table()
