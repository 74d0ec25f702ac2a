"""The sections of a profile's page that are charts and tables: one function each, empty where nothing was measured."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from latency.measure.result_document import ModelRow, ProfileDocument, SweepRow
from stillroom.report.charts import kind_of
from stillroom.report.drawings import Bar, Stack, bars, stacks
from stillroom.report.latency_table import PAIRED, doubts, grid_charts, grid_tables
from stillroom.report.markup import (
    Cell,
    Markup,
    columns_table,
    details,
    element,
    escaped,
    facts,
    figure,
    folded_if_long,
    joined,
    number,
    number_or_none,
    percent,
    size,
    table,
)
from stillroom.report.profile_charts import LengthBin, distribution, length_bins, lengths, pareto, roofline, server

NOTHING = Markup("")
PARTS = ("tokenise", "run", "decode")
KINDS_SHOWN = 8  # of operators; the rest together


class Estimate(NamedTuple):
    """A figure with the ends of its 95 % interval, as they are written."""

    value: str
    low: str
    high: str


def trade_section(document: ProfileDocument) -> Markup:
    """Which models are worth a thought: the metric against latency, with the front."""
    models = document.get("models", [])
    if not models:
        return NOTHING
    if not any("metric" in row for row in models):
        said = "No model has a metric here: --data with labels gives each one its metric and draws it against latency."
        return element("p", said)
    drawn = pareto(document)
    if not drawn:
        return NOTHING
    reading = (
        "Up is better, left is faster. Filled marks and the step line are the Pareto front; the crosses are 95 % "
        "intervals, and where they overlap the order may be chance."
    )
    if (budget := document.get("budget")) and budget["percentile"] != 50:
        reading += f" The dotted tails reach to p{budget['percentile']}, for which the budget is."
    return joined([element("p", reading, class_="quiet"), drawn])


def distribution_section(document: ProfileDocument) -> Markup:
    """How the times of single texts are spread."""
    drawn = distribution(document)
    reading = (
        "Each curve says which share of the texts was answered within that time, one at a time, from text to answer. "
        "Steep is steady; the legend gives p50, p90 and p99."
    )
    return joined([element("p", reading, class_="quiet"), drawn]) if drawn else NOTHING


def length_section(document: ProfileDocument) -> Markup:
    """How run time grows with a text's tokens."""
    drawn = lengths(document)
    if not drawn:
        return NOTHING
    binned = [
        (numbered(i, row["name"]), {one.tokens: one for one in bins})
        for i, row in enumerate(document["models"])
        if "single_stream" in row and (bins := length_bins(row["single_stream"]))
    ]
    columns: list[tuple[str, Sequence[Cell]]] = [("model", [named for named, _ in binned])]
    for tokens in sorted({tokens for _, bins in binned for tokens in bins}):
        found = [bins.get(tokens) for _, bins in binned]
        columns.append((f"{number(tokens)} tokens, ms", [_middle(one) if one else None for one in found]))
    reading = "Run time alone, texts grouped by length: medians, and bands that hold the middle eight tenths."
    same = details("The same as a table", pinned(columns_table(columns)))
    return joined([element("p", reading, class_="quiet"), drawn, same])


def _middle(one: LengthBin) -> Markup:
    return over_interval(Estimate(number(one.p50_ms), number(one.p10_ms), number(one.p90_ms)))


def time_section(document: ProfileDocument) -> Markup:
    """The parts of a call, and the operators of the graphs."""
    parts = [part for part in (_parts_of_calls(document), _operators(document)) if part]
    return joined(parts)


def _parts_of_calls(document: ProfileDocument) -> Markup:
    rows = [
        Stack(
            f"{i + 1} {row['name']}",
            [row["single_stream"]["parts_ms"].get(part, 0.0) for part in PARTS],
            " + ".join(number(row["single_stream"]["parts_ms"].get(part, 0.0)) for part in PARTS) + " ms",
        )
        for i, row in enumerate(document.get("models", []))
        if "single_stream" in row and row["single_stream"]["parts_ms"]
    ]
    if not rows:
        return NOTHING
    reading = "Each bar is one text's whole time for that model: medians of its parts, in their order."
    key = element("p", joined([element("span", part, class_=f"part c{7 - i}") for i, part in enumerate(PARTS)]))
    return joined([element("p", reading, class_="quiet"), key, stacks(rows, "parts of a call, by model")])


def _operators(document: ProfileDocument) -> Markup:
    parts = []
    for row in document.get("models", []):
        found = row.get("operators")
        if found is None:
            continue
        said = (
            f"{row['name']} spends {percent(found['matrix_share'])} of its time in products of matrices "
            f"({found['tokens']} tokens)"
        )
        top: list[list[Cell]] = [
            [one["kind"], one["layer"], number(one["ms"]), percent(one["share"]), one["calls"]] for one in found["top"]
        ]
        charts = [
            figure(caption, bars(_share_bars(shares), f"{caption} of {row['name']}"))
            for caption, shares in (("by kind of operator", found["by_kind"]), ("by layer", found["by_layer"]))
            if shares
        ]
        inside = [element("div", joined(charts), class_="charts")] if charts else []
        if top:
            inside.append(table(["operator", "layer", "ms", "of the time", "nodes"], top))
        parts.append(details(said, joined(inside)))
    return joined([element("h3", "Operators of the graph"), *parts]) if parts else NOTHING


def _share_bars(shares: Mapping[str, float]) -> list[Bar]:
    """The largest first, and what KINDS_SHOWN leaves over as one."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    rest = sum(share for _, share in ordered[KINDS_SHOWN:])
    kept = [
        *ordered[:KINDS_SHOWN],
        *(
            [("1 other" if len(ordered) == KINDS_SHOWN + 1 else f"{len(ordered) - KINDS_SHOWN} others", rest)]
            if rest
            else []
        ),
    ]
    return [Bar(name, share, share, percent(share) or "", reference=False) for name, share in kept]


def roofline_section(document: ProfileDocument) -> Markup:
    """Each model under what the machine reached."""
    drawn = roofline(document)
    if not drawn:
        return NOTHING
    reading = (
        "The lines are what this machine reached: the slope by moving bytes, the ceilings by products of large matrices. "
        "Filled marks are offline, where a batch shares its weights; hollow ones below are one text at a time, which "
        "the slope bounds unless the weights stay in the caches. Models of nearly the same intensity are drawn side by side."
    )
    parts = [element("p", reading, class_="quiet"), drawn]
    known = [row for row in document["models"] if "peak_share" in row["cost"]]
    if known:
        nearest = max(known, key=lambda row: row["cost"]["peak_share"])
        said = (
            f"Nearest to what the machine can do: {nearest['name']}, offline at {percent(nearest['cost']['peak_share'])} "
            f"of the rate that large matrices reached in {nearest['precision']}."
        )
        parts.insert(0, element("p", said))
    return joined(parts)


def server_section(document: ProfileDocument) -> Markup:
    """The p99 at every rate of arrivals that was tried."""
    drawn = server(document)
    reading = (
        "Texts arrive at random at that rate, whether or not earlier ones are answered; time counts from the moment a "
        "text was due. Filled marks stayed under the bound, hollow ones did not."
    )
    return joined([element("p", reading, class_="quiet"), drawn]) if drawn else NOTHING


def grid_section(document: ProfileDocument) -> Markup:
    """The models alone, by batch and length."""
    if not document["candidates"]:
        return NOTHING
    tables = [details(f"The figures at {caption}", pinned(listed)) for caption, listed in grid_tables(document)]
    paired = [element("p", PAIRED, class_="quiet")] if document["ratios"] else []
    return joined([grid_charts(document), *tables, *paired])


def threads_section(document: ProfileDocument) -> Markup:
    """What every split of the cores gives."""
    rows = document.get("sweep", [])
    if not rows:
        return NOTHING
    said = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        most, least = max(own, key=lambda row: row["texts_per_s"]), min(own, key=lambda row: row["p50_ms"])
        said.append(
            f"{name}: most texts with {_spent(most)}, {number(most['texts_per_s'])} a second; "
            f"lowest median with {_spent(least)}, {number(least['p50_ms'])} ms."
        )
    columns: list[tuple[str, Sequence[Cell]]] = [
        ("model", [row["name"] for row in rows]),
        ("processes", [row["processes"] for row in rows]),
        ("threads each", [row["threads"] for row in rows]),
        ("p50 ms", [number(row["p50_ms"]) for row in rows]),
        ("p99 ms", [number(row["p99_ms"]) for row in rows]),
        ("texts/s together", [number(row["texts_per_s"]) for row in rows]),
    ]
    lines = element("ul", joined([element("li", line) for line in said]), class_="plain")
    return joined([lines, folded_if_long(pinned(columns_table(columns)), len(rows), "settings")])


def _spent(row: SweepRow) -> str:
    processes = "1 process" if row["processes"] == 1 else f"{row['processes']} processes"
    return f"{processes} of {row['threads']} {'thread' if row['threads'] == 1 else 'threads'}"


def costs_section(document: ProfileDocument) -> Markup:
    """What each model takes from the machine."""
    models = document.get("models", [])
    costs = [row["cost"] for row in models]
    columns: list[tuple[str, Sequence[Cell]]] = [
        ("cold start, ms", [number_or_none(cost.get("cold_start_ms")) for cost in costs]),
        ("load, ms", [number_or_none(cost.get("load_ms")) for cost in costs]),
        ("first answer, ms", [number_or_none(cost.get("first_answer_ms")) for cost in costs]),
        ("peak memory", [size(cost.get("memory_peak_bytes")) for cost in costs]),
        ("memory after", [size(cost.get("memory_steady_bytes")) for cost in costs]),
        ("size", [size(cost.get("size_bytes")) for cost in costs]),
        ("parameters", [_millions(cost.get("parameters")) for cost in costs]),
        ("GFLOP per text", [_in_units(cost.get("flops_per_text"), 1e9) for cost in costs]),
        ("GFLOP/s", [number_or_none(cost.get("gflop_per_s")) for cost in costs]),
        ("of the peak", [percent(cost.get("peak_share")) for cost in costs]),
        ("MB moved per text", [_in_units(cost.get("bytes_per_text"), 1e6) for cost in costs]),
        ("of the bandwidth", [percent(cost.get("bandwidth_share")) for cost in costs]),
        ("joules per text", [number_or_none(cost.get("joules_per_text")) for cost in costs]),
        ("texts per hour", [number_or_none(cost.get("texts_per_hour")) for cost in costs]),
        ("price per million", [number_or_none(cost.get("price_per_million")) for cost in costs]),
    ]
    if not any(cell is not None for _, cells in columns for cell in cells):
        return NOTHING
    reading = "Cold start is from the start of a process to its first answer; memory is resident, of the whole process."
    named: tuple[str, Sequence[Cell]] = ("model", [numbered(i, row["name"]) for i, row in enumerate(models)])
    return joined([element("p", reading, class_="quiet"), pinned(columns_table([named, *columns]))])


def doubts_section(document: ProfileDocument) -> Markup:
    """Every reservation that a measurement has of itself."""
    short, said = doubts(document)
    listed = table(["measurement", "doubt"], said)
    return joined([element("p", short), folded_if_long(listed, len(said), "doubts")]) if said else NOTHING


def conditions_section(document: ProfileDocument) -> Markup:
    """On what, and how, all of it was measured."""
    parts = []
    if work := document.get("work"):
        percentiles = ", ".join(f"{name} {number(value)}" for name, value in work["tokens_percentiles"].items())
        said = f"{work['texts']:,} texts of {work['source']}, {number(work['tokens_mean'])} tokens long on average ({percentiles})."
        parts.append(element("p", said))
    models = document.get("models", [])
    if models:
        timed = [row.get("single_stream") for row in models]
        columns: list[tuple[str, Sequence[Cell]]] = [
            ("model", [numbered(i, row["name"]) for i, row in enumerate(models)]),
            ("given as", [row["model"] for row in models]),
            ("runtime", [row["runtime"] for row in models]),
            ("precision", [row["precision"] for row in models]),
            ("device", [row["device"] for row in models]),
            ("threads", [row["threads"] for row in models]),
            ("texts timed", [len(one["samples"]) if one else None for one in timed]),
            ("turns", [len(one["turn_sizes"]) if one else None for one in timed]),
            ("scored on", [row["metric"]["examples"] if "metric" in row else None for row in models]),
        ]
        parts.append(pinned(columns_table(columns)))
        parts += [details("The conditions of one text at a time", told) for told in _timing_conditions(models)]
    parts.append(details("The machine", facts({**document["machine"]}), open_=True))
    if document.get("peaks"):
        parts.append(details("What it reached on large matrices and on copying", facts({**document["peaks"]})))
    if command := document.get("command"):
        parts += [element("h3", "To take these figures again"), element("pre", _unbroken(command), class_="command")]
    return joined(parts)


def _timing_conditions(models: Sequence[ModelRow]) -> list[Markup]:
    """A table of what was written down beside the timings, a column each; none where nothing was."""
    found = [
        (numbered(i, row["name"]), row["single_stream"]["conditions"])
        for i, row in enumerate(models)
        if "single_stream" in row
    ]
    keys = dict.fromkeys(key for _, conditions in found for key in conditions)
    columns: list[tuple[str, Sequence[Cell]]] = [("model", [named for named, _ in found])]
    columns += [(key.replace("_", " "), [conditions.get(key) for _, conditions in found]) for key in keys]
    return [pinned(columns_table(columns))] if keys else []


def numbered(index: int, name: str, tag: str = "") -> Markup:
    """A model's number in its colour, its name, and a word about it below."""
    parts = [element("b", index + 1, class_=f"mark {kind_of(index)}"), element("span", name)]
    return joined([*parts, element("small", tag, class_="passed")] if tag else parts)


def over_interval(estimate: Estimate) -> Markup:
    """The figure over its interval."""
    return Markup(f"{escaped(estimate.value)}<br>{element('small', f'{estimate.low} – {estimate.high}')}")


def pinned(listed: Markup) -> Markup:
    """Tables whose first column stays where it is while the others scroll."""
    return element("div", listed, class_="pinned")


def _unbroken(command: str) -> Markup:
    """Lines that are broken between words alone, so that none ends in half an option."""
    return Markup(" ".join(element("span", word) for word in command.split(" ")))


def _millions(count: int | None) -> str | None:
    return None if count is None else f"{number(count / 1e6)} M"


def _in_units(value: float | None, unit: float) -> str | None:
    return None if value is None else number(value / unit)
