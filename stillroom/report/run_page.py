"""The report of a run: one HTML file that opens anywhere, and the same latency table as Markdown."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from latency.measure.machine import MachineFacts, machine_line
from latency.measure.result_document import ProfileDocument
from serve.bundle.manifest import canonical_json
from serve.bundle.replaced_files import replacing
from stillroom.report.drawings import Interval, curve, intervals
from stillroom.report.latency_table import PAIRED, doubts_in_short, grid_charts, grid_tables
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
    interval,
    joined,
    number,
    score,
    size,
    table,
)
from stillroom.report.style import STYLE


class SummaryRow(TypedDict):
    """One model of the story: teacher, undistilled, student, fp32, int8."""

    name: str
    metric: float
    low: NotRequired[float | None]  # 95 % bootstrap interval of the metric
    high: NotRequired[float | None]
    latency_ms: NotRequired[float | None]
    size_bytes: NotRequired[int | None]


class GateRow(TypedDict):
    """One bar, and what came of it."""

    name: str
    value: float | None
    needed: float
    passed: bool


class LabelRow(TypedDict):
    """One label's scores."""

    label: str
    support: int
    teacher: float | None
    student: float | None
    int8: float | None


class Disagreement(TypedDict):
    """One text that teacher and student answer differently; the answers as text."""

    text: str
    teacher: str
    student: str
    gold: str


class Disagreeing(TypedDict):
    """On how many texts teacher and student differ, and how many of them are shown."""

    count: int
    texts: int  # of the split
    split: str
    shown: int
    shown_in: NotRequired[str]  # the report with the texts, where this is the one without


class TrainingStage(TypedDict):
    """The curves of one stage, as [step, value] pairs."""

    stage: str
    loss: Sequence[Sequence[float]]
    validation: Sequence[Sequence[float]]


class Report(TypedDict, total=False):
    """What `write_report` shows. Every part is optional, and what is absent is not spoken of."""

    title: str
    task: str
    understood: Mapping[str, object]  # of the inputs, before anything was trained
    created: str
    machine: MachineFacts
    made: str  # what was trained from what, on which data
    names: Mapping[str, str]  # what each model of the summary is
    metric_name: str
    warnings: Sequence[str]
    summary: Sequence[SummaryRow]
    summary_note: str  # what its columns are
    claims: Sequence[str]
    gates: Sequence[GateRow]
    latency: ProfileDocument
    per_label: Sequence[LabelRow]
    disagreeing: Disagreeing
    disagreements: Sequence[Disagreement]
    training: Sequence[TrainingStage]
    agreement: Mapping[str, object]
    search: Mapping[str, object] | None
    fusions: Mapping[str, Mapping[str, int]]
    vocabulary: Mapping[str, object]
    parity: Mapping[str, object]
    confidence: Mapping[str, object]
    recipe: str  # TOML
    lineage: Mapping[str, object]


def write_report(path: Path, report: Report) -> None:
    """Writes `report` to `path` as one self-contained HTML file, without scripts; a reader never sees half of it."""
    write_page(path, report_page(report))


def report_files(report: Report, **more: object) -> dict[str, bytes]:
    """`report` as the files that a bundle holds; `more` stands in the JSON beside it."""
    return {"report.html": page_bytes(report_page(report)), "report.json": canonical_json({**report, **more})}


def write_page(path: Path, page: str) -> None:
    """Writes the HTML `page` to `path`; a reader never sees half of it."""
    with replacing(path) as beside:
        beside.write_bytes(page_bytes(page))


def page_bytes(page: str) -> bytes:
    """The HTML `page` as it stands in a file: UTF-8, with a reference for what that cannot hold."""
    return page.encode("utf-8", errors="xmlcharrefreplace")


def report_page(report: Report) -> str:
    """`report` as one self-contained HTML document."""
    title = report.get("title", "Report")
    about = " · ".join(filter(None, [report.get("task"), report.get("created")]))
    # In the order that a reader asks: is it good, did it pass, is it fast, where is it wrong, how was it made.
    sections: list[tuple[str, Callable[[Report], Markup], bool]] = [
        ("Results", _results, bool(report.get("summary") or report.get("claims"))),
        ("Gates", _gates, bool(report.get("gates"))),
        ("Latency", _latency, bool(report.get("latency"))),
        ("Labels", _labels, bool(report.get("per_label"))),
        ("Disagreements", _disagreements, bool(report.get("disagreements") or report.get("disagreeing"))),
        ("Training", _training, bool(report.get("training"))),
        ("Agreement", _agreement, bool(report.get("agreement"))),
        ("Quantisation", _search, bool(report.get("search"))),
        ("Kernels", _fusions, bool(report.get("fusions"))),
        ("Vocabulary", lambda each: facts(each["vocabulary"]), bool(report.get("vocabulary"))),
        ("Parity", _parity, bool(report.get("parity"))),
        ("Recipe", _recipe, bool(report.get("recipe"))),
        ("Lineage", _lineage, bool(report.get("lineage"))),
    ]
    shown = [(name, section(report)) for name, section, present in sections if present]
    links = joined([element("a", name, href=f"#{name.lower()}") for name, _ in shown])
    body = [
        element("h1", title),
        *(element("p", line, class_="quiet") for line in (about, machine_line(report.get("machine", {}))) if line),
        element("p", report["made"]) if report.get("made") else Markup(""),
        _warnings(report.get("warnings", [])),
        element("nav", links, aria_label="Contents") if len(shown) > 1 else Markup(""),
        *(element("section", joined([element("h2", name), content]), id=name.lower()) for name, content in shown),
    ]
    return html_page(title, body)


def html_page(title: str, body: Sequence[Markup]) -> str:
    """A whole document in this project's style, without scripts and without anything from elsewhere."""
    # Nothing may run and nothing may be fetched, even should some text slip through unescaped.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escaped(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{joined(body)}
</body>
</html>
"""


def _warnings(warnings: Sequence[str]) -> Markup:
    if not warnings:
        return Markup("")
    listed = element("ul", joined([element("li", warning) for warning in warnings]))
    return element("aside", joined([element("strong", "Warnings"), listed]), class_="warnings")


def _results(report: Report) -> Markup:
    rows = report.get("summary", [])
    metric_name = report.get("metric_name", "metric")
    # What the models are comes before the claims, which are the first to name them.
    parts = [facts(report["names"])] if report.get("names") else []
    parts += [element("p", claim) for claim in report.get("claims", [])]
    if rows:
        drawn = [
            Interval(row["name"], row["metric"], row.get("low"), row.get("high"), f"{row['metric']:.4f}")
            for row in rows
        ]
        chart = intervals(drawn, f"{metric_name} of each model with its 95 % interval")
        parts.append(figure(f"{metric_name}, with 95 % intervals", chart))
        columns: list[tuple[str, list[Cell]]] = [
            ("model", [row["name"] for row in rows]),
            (metric_name, [score(row["metric"]) for row in rows]),
            ("95 % interval", [interval(row.get("low"), row.get("high")) for row in rows]),
            ("latency, ms", [row.get("latency_ms") for row in rows]),
            ("size", [size(row.get("size_bytes")) for row in rows]),
        ]
        parts.append(columns_table(columns))
        if report.get("summary_note"):
            parts.append(element("p", report["summary_note"], class_="quiet"))
    return joined(parts)


def _gates(report: Report) -> Markup:
    rows: list[list[Cell]] = []
    for gate in report["gates"]:
        outcome = "passed" if gate["passed"] else "missed"
        rows.append(
            [gate["name"], score(gate["value"]), score(gate["needed"]), element("span", outcome, class_=outcome)]
        )
    return table(["gate", "value", "needed", "outcome"], rows)


def _latency(report: Report) -> Markup:
    document = report["latency"]
    tables = [joined([element("h3", caption), listed]) for caption, listed in grid_tables(document)]
    paired = [element("p", PAIRED, class_="quiet")] if document["ratios"] else []
    machine = details("The machine", facts(document["machine"]))
    return joined([grid_charts(document), doubts_in_short(document), *tables, *paired, machine])


def _labels(report: Report) -> Markup:
    rows: list[list[Cell]] = [
        [row["label"], row["support"], score(row["teacher"]), score(row["student"]), score(row["int8"])]
        for row in report["per_label"]
    ]
    return folded_if_long(table(["label", "support", "teacher", "student", "int8"], rows), len(rows), "labels")


def _disagreements(report: Report) -> Markup:
    rows: list[list[Cell]] = [
        [element("div", row["text"], class_="words"), row["teacher"], row["student"], row["gold"]]
        for row in report.get("disagreements", [])
    ]
    parts = []
    if found := report.get("disagreeing"):
        said = f"Teacher and int8 student differ on {found['count']} of {found['texts']} texts of {found['split']}."
        if found["shown"]:
            which = "all of them" if found["shown"] == found["count"] else f"the first {found['shown']}"
            where = f"{found['shown_in']}, where it was made, shows {which}" if "shown_in" in found else ""
            said += f" A bundle holds no texts of the data: {where}." if where else f" Here are {which}."
        parts.append(element("p", said))
    if rows:
        parts.append(folded_if_long(table(["text", "teacher", "student", "gold"], rows), len(rows), "texts"))
    return joined(parts)


def _training(report: Report) -> Markup:
    parts = []
    for stage in report["training"]:
        charts = [
            figure(name, drawing)
            for name, drawing in (
                ("loss", curve(stage["loss"], f"loss of stage {stage['stage']} by step")),
                ("validation", curve(stage["validation"], f"validation of stage {stage['stage']} by step")),
            )
            if drawing
        ]
        if charts:
            parts += [element("h3", stage["stage"]), element("div", joined(charts), class_="charts")]
    return joined(parts)


def _agreement(report: Report) -> Markup:
    """How far each variant is from fp32 on whole texts, a row each."""
    rows = [(name, dict(found)) for name, found in report["agreement"].items() if isinstance(found, Mapping)]
    columns: list[tuple[str, list[Cell]]] = [
        ("variant", [name for name, _ in rows]),
        ("of fp32's metric", [score(found.get("share")) for _, found in rows]),
        ("labels changed per 10k", [number(found["labels_changed_per_10k"]) for _, found in rows]),
        ("answers changed", [found["answers_changed"] for _, found in rows]),
        ("spans changed", [found["spans_changed"] for _, found in rows]),
        ("divergence, nats", [f"{found['divergence']:.2g}" for _, found in rows]),
    ]
    return columns_table(columns)


def _search(report: Report) -> Markup:
    """How the int8 graph was found, and what had to be put back to float32."""
    found = report["search"]
    assert found is not None
    attempts: list[list[Cell]] = [
        [
            f"{each['weight_bits']} bits, {'clipped' if each['clipped'] else 'whole'} ranges",
            score(each["verdict"]["share"]),
            f"{each['verdict']['divergence']:.2g}",
        ]
        for each in _rows(found, "tried")
    ]
    parts = [table(["tried", "of fp32's metric", "divergence, nats"], attempts)]
    for key, heading, first in (
        ("repaired", "Put back to float32, one after another", "product"),
        ("costs", "What each product costs when it alone is int8", "product"),
    ):
        rows: list[list[Cell]] = [
            [each["product"], score(each["share"]), f"{each['divergence']:.2g}"] for each in _rows(found, key)
        ]
        if rows:
            listed = table([first, "of fp32's metric", "divergence, nats"], rows)
            parts += [element("h3", heading), folded_if_long(listed, len(rows), "products")]
    return joined(parts)


def _rows(found: Mapping[str, object], key: str) -> list[Mapping[str, Any]]:
    rows = found.get(key)
    return list(rows) if isinstance(rows, list) else []


def _fusions(report: Report) -> Markup:
    kinds = list(dict.fromkeys(kind for counts in report["fusions"].values() for kind in counts))
    rows: list[list[Cell]] = [
        [variant, *(counts.get(kind, 0) for kind in kinds)] for variant, counts in report["fusions"].items()
    ]
    return table(["session as loaded", *kinds], rows)


def _parity(report: Report) -> Markup:
    shown: dict[str, object] = {}
    for name, found in report["parity"].items():
        shown[name] = found
        if isinstance(found, Mapping) and found.get("precision") == "int8":
            shown[name] = {**found, "beyond_tolerance": "does not judge int8"}
    reading = "Logits beside those of a reference: torch for fp32, fp32 for the others."
    if shown != report["parity"]:
        reading += (
            " The tolerance does not judge int8, whose rounding moves every logit: int8 passes when a text gives the same bits "
            "alone and in company, and its gate judges what rounding costs."
        )
    return joined([element("p", reading, class_="quiet"), facts(shown)])


def _recipe(report: Report) -> Markup:
    return details("The settings of this run", element("pre", report["recipe"]))


def _lineage(report: Report) -> Markup:
    return details("What this was made from", facts(report["lineage"]))
