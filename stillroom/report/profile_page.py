"""The page of a profile: which model to choose, its costs, and how they were measured."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from latency.measure.machine import machine_line
from stillroom.report.formats import Cell, Estimate, markdown, number, score, scored_as, size, table
from stillroom.report.pages import Part, rendered
from stillroom.report.profile_charts import distribution, lengths, pareto, roofline, server
from stillroom.report.profile_sections import (
    PARTS,
    conditions_of,
    cost_tables,
    length_table,
    models_of,
    nearest_to_the_peak,
    operators_of,
    parts_of_calls,
    texts_in_words,
    threads_of,
    timing_conditions,
)
from stillroom.report.timings import PAIRED, all_figures, doubts, latencies, speed_up


def profile_page(document: dict[str, Any], title: str = "Profile") -> str:
    """One self-contained HTML document, the answer first. Sections without measurements are left out."""
    models, front = document.get("models", []), document.get("front", [])
    named = [model._replace(about="on the front" if model.name in front else "") for model in models_of(document)]
    # Each note once, after the names of its models.
    of_note: dict[str, list[str]] = {}
    for row in models:
        for note in row["notes"]:
            of_note.setdefault(note, []).append(row["name"])
    noted = [
        f"{'all models' if len(names) == len(models) > 1 else ', '.join(names)}: {note}"
        for note, names in of_note.items()
    ]
    has = {part for row in models for part in row}
    found, budget, calls = doubts(document), document.get("budget"), parts_of_calls(document)
    trade, length = pareto(document), lengths(document)
    no_metric = "No model has a metric here. Give --data with labels to plot the metric against latency."
    sections: list[tuple[str, str, list[Part]]] = [
        ("answer", "The answer", [
            ("verdict", budget["verdict"], _verdict(budget), budget["sentence"]) if budget else None,
            *_front_lines(document),
            *_speed_lines(document),
            ("warnings", document.get("warnings", [])),
            ("advice", found.sentence) if found else None,
        ]),
        ("models", "Models", [
            ("note", "profile_models", has, _speed_ups(document), PAIRED),
            table(("model", named), *_model_columns(document)),
            ("under", "Left out", [[*document.get("left_out", []), *noted]]),
        ] if named else []),
        ("trade", "Quality against latency", [
            ("note", "profile_trade", budget), trade
        ] if trade else [no_metric] if named and "metric" not in has else []),
        ("distribution", "Distribution", [("note", "profile_distribution"), distribution(document)]),
        ("length", "Length", [
            ("note", "profile_length"), length, ("details", "The same as a table", [length_table(document)])
        ] if length else []),
        ("time", "Where the time goes", [
            ("note", "profile_time", PARTS) if calls else None,
            ("bars", "parts of a call, by model", calls),
            ("under", "Operators of the graph", operators_of(document)),
        ]),
        ("roofline", "Roofline of the machine", [("note", "profile_roofline", nearest_to_the_peak(document)), roofline(document)]),
        ("server", "Server", [("note", "profile_server"), server(document)]),
        ("grid", "Batches and lengths", latencies(document, folded=True)),
        ("threads", "Threads", [*threads_of(document)]),
        ("costs", "Costs", [("note", "profile_costs"), *cost_tables(document)]),
        ("doubts", "Doubts", [("doubts", *found)] if found else []),
        ("conditions", "Conditions", [
            texts_in_words(document),
            conditions_of(document),
            ("details", "The conditions of one text at a time", [timing_conditions(document)]),
            ("opened", "The machine", [document["machine"]]),
            ("details", "Its measured peaks: large matrix products and copying", [document.get("peaks")]),
            ("under", "To repeat this measurement", [("command", document.get("command", ""))]),
        ]),
    ]  # fmt: skip
    return rendered(title, [("quiet", _about(document))], sections)


def profile_markdown(document: dict[str, Any]) -> str:
    """The tables to paste: a row per model, then a row per candidate, batch and length.

    The line above says what was measured, when and on which machine; the line below explains the columns.
    """
    above, front = f"`stillroom profile`: {_about(document)}", document.get("front", [])
    if "budget" in document:
        above = f"{above}. {_verdict(document['budget'])}"
    tables = [all_figures(document)]
    if models := document.get("models"):
        names = [row["name"] for row in models]
        on_front = ["yes" if name in front else None for name in names]
        tables.insert(0, table(("model", names), ("front", on_front), *_model_columns(document)))
    below = [
        *(["front: no other model here is at least as good and as fast."] if front else []),
        "In brackets: 95 % intervals.",
        *([PAIRED] if document["ratios"] else []),
        "doubts: the number of reasons to doubt a row (few samples, wide spread, drift, other load); report.json lists them.",
        *(f"Left out: {line}." for line in document.get("left_out", [])),
    ]
    grids = "\n".join(markdown(made.header, made.rows) for made in tables)
    return f"{above}\n\n{grids}\n{' '.join(below)}\n"


def answer_lines(document: dict[str, Any]) -> list[str]:
    """The answers in lines of a sentence or two: budget, front, speed, warnings, and doubts."""
    lines = []
    if "budget" in document:
        lines.append(f"{_verdict(document['budget'])} {document['budget']['sentence']}")
    lines += [*_front_lines(document), *_speed_lines(document)]
    lines += [f"Warning: {warning}" for warning in document.get("warnings", [])]
    found = doubts(document)
    return [*lines, found.sentence] if found else lines


def _verdict(budget: dict[str, Any]) -> str:
    return {"met": "Budget met.", "perhaps": "Budget perhaps met.", "missed": "Budget missed."}[budget["verdict"]]


def _front_lines(document: dict[str, Any]) -> list[str]:
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
    beaten = " Every other model has one on the front that is at least as good and as fast." if others else ""
    return [f"On the Pareto front of {metric} and median latency: {named}.{beaten}"]


def _speed_lines(document: dict[str, Any]) -> list[str]:
    """The fastest model on one text, compared with the first; and the most texts a second."""
    lines = []
    timed = [row for row in document.get("models", []) if "single_stream" in row]
    if timed:
        fastest = min(timed, key=lambda row: row["single_stream"]["p50_ms"])
        p50 = _percentile(fastest, "p50")
        assert p50
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
        lines.append(f"Most texts a second offline: {most['name']}, {number(most['offline']['texts_per_s'])}.")
    return lines


def _compared(document: dict[str, Any], name: str) -> str:
    """A sentence with the speed of `name` relative to the first model; empty for the first itself."""
    speed_ups = _speed_ups(document)
    found = speed_up(speed_ups.ratios.get(name))
    if found is None:
        return ""
    return (
        f" That is {found.value} times [{found.low}, {found.high}] the speed of {speed_ups.over} ({speed_ups.where})."
    )


class SpeedUps(NamedTuple):
    """Ratios to the first model by the other's name, and the workload."""

    over: str
    where: str
    ratios: dict[str, dict[str, Any]]


def _speed_ups(document: dict[str, Any]) -> SpeedUps:
    """End-to-end speed-ups if timed, else those of the models alone at the smallest batch and its shortest length."""
    timed = [row for row in document.get("models", []) if "single_stream" in row]
    found = {
        row["name"]: {
            "a": timed[0]["name"],
            "b": row["name"],
            "ratio": over[0],
            "low": over[1],
            "high": over[2],
            "batch": 1,
            "tokens": 0,
        }
        for row in timed
        if (over := row["single_stream"].get("over_first"))
    }
    if found:
        return SpeedUps(timed[0]["name"], "from text to answer, on the same texts", found)
    shape = min(((ratio["batch"], ratio["tokens"]) for ratio in document["ratios"]), default=(0, 0))
    ratios = {row["b"]: row for row in document["ratios"] if (row["batch"], row["tokens"]) == shape}
    reference = next((row["a"] for row in ratios.values()), "")
    return SpeedUps(reference, f"the model alone, batch {shape[0]}, {shape[1]} tokens", ratios)


def _about(document: dict[str, Any]) -> str:
    """One line: the models, the texts, the machine and the time."""
    names = {row["name"] for row in document["candidates"]} | {row["name"] for row in document.get("models", [])}
    runtimes = {row["runtime"] for row in [*document["candidates"], *document.get("models", [])]}
    work = document.get("work")
    parts = [
        f"{len(names)} models" if len(names) != 1 else "1 model",
        f"{work['texts']:,} texts of {work['source']}" if work else None,
        machine_line(document["machine"], runtimes),
    ]
    return " · ".join(part for part in parts if part)


def _model_columns(document: dict[str, Any]) -> list[tuple[str, Sequence[Cell]]]:
    """The columns of the main table without the names, a cell for each model."""
    models = document["models"]
    ratios = _speed_ups(document).ratios
    metric = next((row["metric"]["name"] for row in models if "metric" in row), "metric")
    bounds_ms = {row["server"]["bound_ms"] for row in models if "server" in row}
    bound = f" ({number(bounds_ms.pop())} ms)" if len(bounds_ms) == 1 else ""
    offline = [
        Estimate(*map(number, (row["offline"]["texts_per_s"], *row["offline"]["interval"])))
        if "offline" in row
        else None
        for row in models
    ]
    rates = [row["server"]["rate_per_s"] if "server" in row else None for row in models]
    return [
        (metric, [scored_as(row["metric"]) if "metric" in row else None for row in models]),
        ("p50 ms", [_percentile(row, "p50") for row in models]),
        ("p99 ms", [_percentile(row, "p99") for row in models]),
        ("speed-up", [speed_up(ratios.get(row["name"])) for row in models]),
        ("offline, texts/s", offline),
        (f"server, texts/s{bound}", [None if rate is None else number(rate) if rate else "no rate" for rate in rates]),
        ("cold start, ms", [row["cost"].get("cold_start_ms") for row in models]),
        ("peak memory", [size(row["cost"].get("memory_peak_bytes")) for row in models]),
        ("size", [size(row["cost"].get("size_bytes")) for row in models]),
        ("price per million", [row["cost"].get("price_per_million") for row in models]),
    ]


def _percentile(row: Mapping[str, Any], percentile: str) -> Estimate | None:
    """`p50` or `p99` of one text at a time; the interval is empty where it is not known. None where it was not timed."""
    if "single_stream" not in row:
        return None
    timed = row["single_stream"]
    return Estimate(*map(number, (timed[f"{percentile}_ms"], *timed["intervals_ms"].get(percentile, ()))))
