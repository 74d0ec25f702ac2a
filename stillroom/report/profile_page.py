"""The page of a profile: which model to take, what it costs, and how that was found out, for somebody who was not there."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from latency.measure.machine import machine_line
from latency.measure.result_document import Budget, ModelRow, ProfileDocument, RatioRow, SingleStream, SweepRow
from stillroom.report.charts import kind_of
from stillroom.report.drawings import Bar, Stack, bars, stacks
from stillroom.report.latency_table import PAIRED, doubts, grid_charts, grid_table, grid_tables, speed_up
from stillroom.report.markup import (
    Cell,
    Markup,
    columns_table,
    details,
    element,
    escaped,
    facts,
    figure,
    filled,
    folded_if_long,
    joined,
    markdown,
    number,
    number_or_none,
    percent,
    score,
    size,
    table,
)
from stillroom.report.profile_charts import LengthBin, distribution, length_bins, lengths, pareto, roofline, server
from stillroom.report.run_page import html_page

NOTHING = Markup("")
PARTS = ("tokenise", "run", "decode")
KINDS_SHOWN = 8  # of operators; the rest together


class Estimate(NamedTuple):
    """A figure with the ends of its 95 % interval, as they are written."""

    value: str
    low: str
    high: str


Percentile = Literal["p50", "p99"]
Shown = Callable[[Estimate], Cell]


def profile_page(document: ProfileDocument, title: str = "Profile") -> str:
    """One self-contained HTML document, in the order that a reader asks. What was not measured is not spoken of."""
    sections: list[tuple[str, str, Callable[[ProfileDocument], Markup]]] = [
        ("answer", "The answer", _answer),
        ("models", "Models", _models),
        ("trade", "Quality against latency", _trade),
        ("distribution", "Distribution", _distribution),
        ("length", "Length", _length),
        ("time", "Where the time goes", _time),
        ("roofline", "What the machine could do", _roofline),
        ("server", "Server", _server),
        ("grid", "Batches and lengths", _grid),
        ("threads", "Threads", _threads),
        ("costs", "Costs", _costs),
        ("doubts", "Doubts", _doubts),
        ("conditions", "Conditions", _conditions),
    ]
    shown = [(name, heading, content) for name, heading, section in sections if (content := section(document))]
    body = [
        element("h1", title),
        element("p", _about(document), class_="quiet"),
        element(
            "nav",
            joined([element("a", heading, href=f"#{name}") for name, heading, _ in shown]),
            aria_label="Contents",
        ),
        *(element("section", joined([element("h2", heading), content]), id=name) for name, heading, content in shown),
    ]
    return html_page(title, body)


def profile_markdown(document: ProfileDocument) -> str:
    """The tables to paste: a row per model, then a row per candidate, batch and length.

    A line above says what was measured, when and on what, and one below what the marks mean.
    """
    above, below = f"`stillroom profile`: {_about(document)}", _legend(document)
    if "budget" in document:
        above = f"{above}. {_verdict(document['budget'])}"
    grid = markdown(*grid_table(document, document["candidates"], with_shape=True))
    if not document.get("models"):
        return f"{above}\n\n{grid}\n{below}\n"
    front = document.get("front", [])
    columns: list[tuple[str, Sequence[Cell]]] = [
        ("model", [row["name"] for row in document["models"]]),
        ("front", ["yes" if row["name"] in front else None for row in document["models"]]),
        *_model_columns(document, lambda one: f"{one.value} [{one.low}, {one.high}]"),
    ]
    return f"{above}\n\n{markdown(*filled(columns))}\n{grid}\n{below}\n"


def _legend(document: ProfileDocument) -> str:
    """One line on what a reader of the tables alone cannot know."""
    said = []
    if document.get("front"):
        said.append("front: no other model here is at least as good and as fast.")
    said.append("In brackets: 95 % intervals.")
    if document["ratios"]:
        said.append(PAIRED)
    said.append(
        "doubts: how many reservations a measurement has of itself (few samples, wide spread, drift, other load); the "
        "report spells them out."
    )
    said += [f"Left out: {line}." for line in document.get("left_out", [])]
    return " ".join(said)


def answer_lines(document: ProfileDocument) -> list[str]:
    """What there is to say, a sentence or two a line: budget, front, speed, warnings, and how much is in doubt."""
    lines = []
    if "budget" in document:
        lines.append(f"{_verdict(document['budget'])} {document['budget']['sentence']}")
    lines += [*_front_lines(document), *_speed_lines(document)]
    lines += [f"Warning: {warning}" for warning in document.get("warnings", [])]
    short, _ = doubts(document)
    return [*lines, short] if short else lines


def _verdict(budget: Budget) -> str:
    return {"met": "Budget met.", "perhaps": "Budget perhaps met.", "missed": "Budget missed."}[budget["verdict"]]


def _front_lines(document: ProfileDocument) -> list[str]:
    front = document.get("front", [])
    rows = [row for row in document.get("models", []) if row["name"] in front]
    if not rows or len(document["models"]) == 1:
        return []
    with_figures = [
        f"{row['name']} ({score(row['metric']['value'])} at {number(row['single_stream']['p50_ms'])} ms)"
        for row in sorted(rows, key=lambda row: row["single_stream"]["p50_ms"] if "single_stream" in row else 0.0)
        if "metric" in row and "single_stream" in row
    ]
    named = "; ".join(with_figures or [row["name"] for row in rows])
    metric = next((row["metric"]["name"] for row in rows if "metric" in row), "the metric")
    others = len(document["models"]) - len(rows)
    beaten = " For every other model there is one here that is at least as good and as fast." if others else ""
    return [f"On the Pareto front of {metric} and median latency: {named}.{beaten}"]


def _speed_lines(document: ProfileDocument) -> list[str]:
    """The fastest on one text, beside the first; and the most texts a second."""
    lines = []
    timed = [row for row in document.get("models", []) if "single_stream" in row]
    if timed:
        fastest = min(timed, key=lambda row: row["single_stream"]["p50_ms"])
        p50 = _timed(fastest["single_stream"], "p50")
        said = f"{p50.value} ms [{p50.low}, {p50.high}]" if p50.low else f"{p50.value} ms"
        p99_ms = number(fastest["single_stream"]["p99_ms"])
        first = "Fastest on one text" if len(timed) > 1 else "One text at a time"
        lines.append(
            f"{first}: {fastest['name']}, {said} at the median and {p99_ms} ms at p99."
            f"{_compared(document, fastest['name'])}"
        )
    elif document["candidates"]:
        batch, tokens = min((row["batch"], row["tokens"]) for row in document["candidates"])
        same = [row for row in document["candidates"] if (row["batch"], row["tokens"]) == (batch, tokens)]
        row = min(same, key=lambda row: row["p50_ms"])
        lines.append(
            f"Fastest at batch {batch}, {tokens} tokens: {row['name']}, {number(row['p50_ms'])} ms at the median."
            f"{_compared(document, row['name'])}"
        )
    offline = [row for row in document.get("models", []) if "offline" in row]
    if offline:
        most = max(offline, key=lambda row: row["offline"]["texts_per_s"])
        lines.append(
            f"Most texts a second when all are at hand: {most['name']}, {number(most['offline']['texts_per_s'])}."
        )
    return lines


def _compared(document: ProfileDocument, name: str) -> str:
    """How much faster than the first `name` is, as a sentence after another; empty for the first itself."""
    speed_ups = _speed_ups(document)
    if name not in speed_ups.ratios:
        return ""
    value, low, high = speed_up(speed_ups.ratios[name])
    return f" That is {value} times [{low}, {high}] the speed of {speed_ups.over} ({speed_ups.where})."


class SpeedUps(NamedTuple):
    """Ratios to the first model by the other's name, and on what."""

    over: str
    where: str
    ratios: dict[str, RatioRow]


def _speed_ups(document: ProfileDocument) -> SpeedUps:
    """Those of whole answers where these were timed, else of the models alone at the smallest batch's shortest length."""
    timed = [row for row in document.get("models", []) if "single_stream" in row]
    found = {
        row["name"]: RatioRow(
            a=timed[0]["name"], b=row["name"], ratio=over[0], low=over[1], high=over[2], batch=1, tokens=0
        )
        for row in timed
        if (over := row["single_stream"].get("over_first"))
    }
    if found:
        return SpeedUps(timed[0]["name"], "from text to answer, on the same texts", found)
    shape = min(((ratio["batch"], ratio["tokens"]) for ratio in document["ratios"]), default=(0, 0))
    ratios = {row["b"]: row for row in document["ratios"] if (row["batch"], row["tokens"]) == shape}
    reference = next((row["a"] for row in ratios.values()), "")
    return SpeedUps(reference, f"the model alone, batch {shape[0]}, {shape[1]} tokens", ratios)


def _about(document: ProfileDocument) -> str:
    """One line: what, when, on what."""
    names = {row["name"] for row in document["candidates"]} | {row["name"] for row in document.get("models", [])}
    runtimes = {row["runtime"] for row in [*document["candidates"], *document.get("models", [])]}
    work = document.get("work")
    parts = [
        f"{len(names)} models" if len(names) != 1 else "1 model",
        f"{work['texts']:,} texts of {work['source']}" if work else None,
        machine_line(document["machine"], runtimes),
    ]
    return " · ".join(part for part in parts if part)


def _answer(document: ProfileDocument) -> Markup:
    parts = []
    if "budget" in document:
        classes = {"met": "passed", "perhaps": "perhaps", "missed": "missed"}
        verdict = element("strong", _verdict(document["budget"]), class_=classes[document["budget"]["verdict"]])
        sentence = element("span", document["budget"]["sentence"])
        parts.append(element("p", joined([verdict, sentence]), class_="answer"))
    parts += [element("p", line) for line in [*_front_lines(document), *_speed_lines(document)]]
    if warnings := document.get("warnings"):
        listed = element("ul", joined([element("li", warning) for warning in warnings]))
        parts.append(element("aside", joined([element("strong", "Warnings"), listed]), class_="warnings"))
    short, _ = doubts(document)
    if short:
        said = joined([element("strong", short), element("a", "All doubts", href="#doubts")])
        parts.append(element("aside", said, class_="warnings"))
    return joined(parts)


def _models(document: ProfileDocument) -> Markup:
    models = document.get("models", [])
    if not models:
        return NOTHING
    front = document.get("front", [])
    named = [
        _numbered(i, row["name"], tag="on the front" if row["name"] in front else "") for i, row in enumerate(models)
    ]
    columns = [("model", named), *_model_columns(document, _over_interval)]
    left_out = [element("li", line) for line in [*document.get("left_out", []), *_left_out(models)]]
    listed = [element("h3", "What was left out"), element("ul", joined(left_out), class_="plain")] if left_out else []
    return joined([element("p", _how_to_read(document), class_="quiet"), _pinned(columns_table(columns)), *listed])


def _left_out(models: Sequence[ModelRow]) -> list[str]:
    """What each note says, once, after the models that it is of."""
    notes = dict.fromkeys(note for row in models for note in row["notes"])
    of_note = {note: [row["name"] for row in models if note in row["notes"]] for note in notes}
    return [
        f"{'all models' if len(names) == len(models) > 1 else ', '.join(names)}: {note}"
        for note, names in of_note.items()
    ]


def _how_to_read(document: ProfileDocument) -> str:
    models = document["models"]
    said = [
        "Latency is that of one real text at a time, from text to answer; the small print is 95 % intervals.",
    ]
    if (speed_ups := _speed_ups(document)).ratios:
        said.append(f"Speed-ups are over {speed_ups.over}: {speed_ups.where}. {PAIRED}")
    if any("offline" in row for row in models):
        said.append("Offline is all texts at hand, in batches by length.")
    if any("server" in row for row in models):
        said.append(
            "Server is the highest rate of texts arriving at random whose p99 stayed under the bound in brackets."
        )
    return " ".join(said)


def _model_columns(document: ProfileDocument, shown: Shown) -> list[tuple[str, Sequence[Cell]]]:
    """The main table without names, a cell for each model; `shown` writes a figure with its interval."""
    models = document["models"]
    ratios = _speed_ups(document).ratios
    metric = next((row["metric"]["name"] for row in models if "metric" in row), "metric")
    bounds_ms = {row["server"]["bound_ms"] for row in models if "server" in row}
    bound = f" ({number(bounds_ms.pop())} ms)" if len(bounds_ms) == 1 else ""

    def written(estimate: Estimate | None) -> Cell:
        if estimate is None:
            return None
        return shown(estimate) if estimate.low else estimate.value

    return [
        (metric, [written(_metric(row)) for row in models]),
        ("p50 ms", [written(_single_stream(row, "p50")) for row in models]),
        ("p99 ms", [written(_single_stream(row, "p99")) for row in models]),
        ("speed-up", [written(_ratio(ratios.get(row["name"]))) for row in models]),
        ("offline, texts/s", [written(_offline(row)) for row in models]),
        (f"server, texts/s{bound}", [_server_rate(row) for row in models]),
        ("cold start, ms", [number_or_none(row["cost"].get("cold_start_ms")) for row in models]),
        ("peak memory", [size(row["cost"].get("memory_peak_bytes")) for row in models]),
        ("size", [size(row["cost"].get("size_bytes")) for row in models]),
        ("price per million", [number_or_none(row["cost"].get("price_per_million")) for row in models]),
    ]


def _metric(row: ModelRow) -> Estimate | None:
    metric = row.get("metric")
    if metric is None:
        return None
    return Estimate(f"{metric['value']:.4f}", f"{metric['low']:.4f}", f"{metric['high']:.4f}")


def _single_stream(row: ModelRow, percentile: Percentile) -> Estimate | None:
    return _timed(row["single_stream"], percentile) if "single_stream" in row else None


def _timed(timed: SingleStream, percentile: Percentile) -> Estimate:
    """A percentile of one text at a time; the interval is empty where it is not known."""
    value_ms = timed["p50_ms"] if percentile == "p50" else timed["p99_ms"]
    low_ms, high_ms = timed["intervals_ms"].get(percentile, (None, None))
    return Estimate(number(value_ms), number_or_none(low_ms) or "", number_or_none(high_ms) or "")


def _offline(row: ModelRow) -> Estimate | None:
    offline = row.get("offline")
    if offline is None:
        return None
    low, high = offline["interval"]
    return Estimate(number(offline["texts_per_s"]), number(low), number(high))


def _ratio(ratio: RatioRow | None) -> Estimate | None:
    return None if ratio is None else Estimate(*speed_up(ratio))


def _server_rate(row: ModelRow) -> Cell:
    if "server" not in row:
        return None
    return number(row["server"]["rate_per_s"]) if row["server"]["rate_per_s"] else "none held"


def _trade(document: ProfileDocument) -> Markup:
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


def _distribution(document: ProfileDocument) -> Markup:
    drawn = distribution(document)
    reading = (
        "Each curve says which share of the texts was answered within that time, one at a time, from text to answer. "
        "Steep is steady; the legend gives p50, p90 and p99."
    )
    return joined([element("p", reading, class_="quiet"), drawn]) if drawn else NOTHING


def _length(document: ProfileDocument) -> Markup:
    drawn = lengths(document)
    if not drawn:
        return NOTHING
    binned = [
        (_numbered(i, row["name"]), {one.tokens: one for one in bins})
        for i, row in enumerate(document["models"])
        if "single_stream" in row and (bins := length_bins(row["single_stream"]))
    ]
    columns: list[tuple[str, Sequence[Cell]]] = [("model", [named for named, _ in binned])]
    for tokens in sorted({tokens for _, bins in binned for tokens in bins}):
        found = [bins.get(tokens) for _, bins in binned]
        columns.append((f"{number(tokens)} tokens, ms", [_middle(one) if one else None for one in found]))
    reading = "Run time alone, texts grouped by length: medians, and bands that hold the middle eight tenths."
    same = details("The same as a table", _pinned(columns_table(columns)))
    return joined([element("p", reading, class_="quiet"), drawn, same])


def _middle(one: LengthBin) -> Markup:
    return _over_interval(Estimate(number(one.p50_ms), number(one.p10_ms), number(one.p90_ms)))


def _time(document: ProfileDocument) -> Markup:
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


def _roofline(document: ProfileDocument) -> Markup:
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


def _server(document: ProfileDocument) -> Markup:
    drawn = server(document)
    reading = (
        "Texts arrive at random at that rate, whether or not earlier ones are answered; time counts from the moment a "
        "text was due. Filled marks stayed under the bound, hollow ones did not."
    )
    return joined([element("p", reading, class_="quiet"), drawn]) if drawn else NOTHING


def _grid(document: ProfileDocument) -> Markup:
    if not document["candidates"]:
        return NOTHING
    tables = [details(f"The figures at {caption}", _pinned(listed)) for caption, listed in grid_tables(document)]
    paired = [element("p", PAIRED, class_="quiet")] if document["ratios"] else []
    return joined([grid_charts(document), *tables, *paired])


def _threads(document: ProfileDocument) -> Markup:
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
    return joined([lines, folded_if_long(_pinned(columns_table(columns)), len(rows), "settings")])


def _spent(row: SweepRow) -> str:
    processes = "1 process" if row["processes"] == 1 else f"{row['processes']} processes"
    return f"{processes} of {row['threads']} {'thread' if row['threads'] == 1 else 'threads'}"


def _costs(document: ProfileDocument) -> Markup:
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
    named: tuple[str, Sequence[Cell]] = ("model", [_numbered(i, row["name"]) for i, row in enumerate(models)])
    return joined([element("p", reading, class_="quiet"), _pinned(columns_table([named, *columns]))])


def _doubts(document: ProfileDocument) -> Markup:
    short, said = doubts(document)
    listed = table(["measurement", "doubt"], said)
    return joined([element("p", short), folded_if_long(listed, len(said), "doubts")]) if said else NOTHING


def _conditions(document: ProfileDocument) -> Markup:
    parts = []
    if work := document.get("work"):
        percentiles = ", ".join(f"{name} {number(value)}" for name, value in work["tokens_percentiles"].items())
        said = f"{work['texts']:,} texts of {work['source']}, {number(work['tokens_mean'])} tokens long on average ({percentiles})."
        parts.append(element("p", said))
    models = document.get("models", [])
    if models:
        timed = [row.get("single_stream") for row in models]
        columns: list[tuple[str, Sequence[Cell]]] = [
            ("model", [_numbered(i, row["name"]) for i, row in enumerate(models)]),
            ("given as", [row["model"] for row in models]),
            ("runtime", [row["runtime"] for row in models]),
            ("precision", [row["precision"] for row in models]),
            ("device", [row["device"] for row in models]),
            ("threads", [row["threads"] for row in models]),
            ("texts timed", [len(one["samples"]) if one else None for one in timed]),
            ("turns", [len(one["turn_sizes"]) if one else None for one in timed]),
            ("scored on", [row["metric"]["examples"] if "metric" in row else None for row in models]),
        ]
        parts.append(_pinned(columns_table(columns)))
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
        (_numbered(i, row["name"]), row["single_stream"]["conditions"])
        for i, row in enumerate(models)
        if "single_stream" in row
    ]
    keys = dict.fromkeys(key for _, conditions in found for key in conditions)
    columns: list[tuple[str, Sequence[Cell]]] = [("model", [named for named, _ in found])]
    columns += [(key.replace("_", " "), [conditions.get(key) for _, conditions in found]) for key in keys]
    return [_pinned(columns_table(columns))] if keys else []


def _numbered(index: int, name: str, tag: str = "") -> Markup:
    """A model's number in its colour, its name, and a word about it below."""
    parts = [element("b", index + 1, class_=f"mark {kind_of(index)}"), element("span", name)]
    return joined([*parts, element("small", tag, class_="passed")] if tag else parts)


def _over_interval(estimate: Estimate) -> Markup:
    """The figure over its interval."""
    return Markup(f"{escaped(estimate.value)}<br>{element('small', f'{estimate.low} – {estimate.high}')}")


def _pinned(listed: Markup) -> Markup:
    """Tables whose first column stays where it is while the others scroll."""
    return element("div", listed, class_="pinned")


def _unbroken(command: str) -> Markup:
    """Lines that are broken between words alone, so that none ends in half an option."""
    return Markup(" ".join(element("span", word) for word in command.split(" ")))


def _millions(count: int | None) -> str | None:
    return None if count is None else f"{number(count / 1e6)} M"


def _in_units(value: float | None, unit: float) -> str | None:
    return None if value is None else number(value / unit)
