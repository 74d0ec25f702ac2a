"""What `stillroom compare` shows: a table for the screen, the same as Markdown, and one HTML page."""

from typing import Any

from stillroom.report import markup
from stillroom.report.drawings import Interval, intervals
from stillroom.report.markup import Markup, details, element, facts, interval, joined, score, size, table
from stillroom.report.run_page import html_page

HEADER = ("method", "student", "mean", "95 % interval", "sd over seeds", "less none", "minutes", "peak memory")


def cells(document: dict[str, Any]) -> list[list[str]]:
    """The rows of the table, best first."""
    shown = []
    for row in document["rows"]:
        less = row["less_none"]
        spread = row["standard_deviation"]
        shown.append(
            [
                row["method"],
                row["student"],
                f"{row['mean']:.4f}",
                interval(row["low"], row["high"]) or "",
                "–" if spread is None else f"{spread:.4f}",
                "–" if less is None else f"{less['value']:+.4f} [{less['low']:+.4f}, {less['high']:+.4f}]",
                f"{row['seconds'] / 60:.1f}",
                size(row["peak_memory_bytes"]) or "",
            ]
        )
    return shown


def markdown(document: dict[str, Any]) -> str:
    """The table in Markdown."""
    return markup.markdown(HEADER, cells(document))


def page(document: dict[str, Any]) -> str:
    """One self-contained HTML document."""
    teacher, metric = document["teacher"], document["metric"].replace("_", " ")
    dots = [
        Interval(f"{row['method']}, {row['student']}", row["mean"], row["low"], row["high"], score(row["mean"]) or "")
        for row in document["rows"]
    ]
    named = f"{metric} on test, mean over {document['settings']['seeds']} seeds"
    losses = joined(
        [
            details(
                f"{row['method']}, {row['student']}",
                facts({stage: _losses_in_words(of) for stage, of in row["losses"].items()}),
            )
            for row in document["rows"]
        ]
    )
    body = [
        element("h1", "Methods compared"),
        element(
            "p",
            f"{named}. The teacher reaches {score(teacher['value'])} ({interval(teacher['low'], teacher['high'])}). Ranks hold at "
            "this budget only; intervals are of other texts, and the spread is of other seeds.",
            class_="quiet",
        ),
        element("ul", joined([element("li", doubt) for row in document["rows"] for doubt in row["doubts"]])),
        element("section", joined([element("h2", "Table"), table(HEADER, cells(document))])),
        element("section", joined([element("h2", "Means with their intervals"), intervals(dots, named)])),
        element("section", joined([element("h2", "Where the loss of each stage began and ended"), losses])),
        element("section", joined([element("h2", "Settings"), facts(document["settings"])])),
    ]
    return html_page("Methods compared", [Markup(part) for part in body])


def _losses_in_words(stage: dict[str, Any]) -> dict[str, object]:
    """Ranges over seeds as they are shown."""
    ranges = {name: value for name, value in stage.items() if name != "steps"}
    return {"steps": stage["steps"]} | {name: f"{low:.4g} to {high:.4g}" for name, (low, high) in ranges.items()}
