"""The output of `stillroom compare`: a table for the terminal, the same in Markdown, and an HTML page."""

from typing import Any

from stillroom.report import formats
from stillroom.report.drawings import Interval, intervals
from stillroom.report.formats import Estimate, Table, score, scored, size, table
from stillroom.report.pages import rendered


def compared(document: dict[str, Any]) -> Table:
    """A row per method and student, best first."""
    rows = document["rows"]
    return table(
        ("method", [row["method"] for row in rows]),
        ("student", [row["student"] for row in rows]),
        ("mean", [scored(row["mean"], row["low"], row["high"]) for row in rows]),
        ("sd over seeds", [score(row["standard_deviation"]) for row in rows]),
        ("against labels", [_difference(row["less_labels"]) for row in rows]),
        ("plain text", [f"{row['plain_tokens']:,} tokens" if row["plain_tokens"] else "" for row in rows]),
        ("minutes", [f"{row['seconds'] / 60:.1f}" for row in rows]),
        ("peak memory", [size(row["peak_memory_bytes"]) for row in rows]),
    )


def _difference(less: dict[str, float] | None) -> Estimate | None:
    return None if less is None else Estimate(*(f"{less[key]:+.4f}" for key in ("value", "low", "high")))


def markdown(document: dict[str, Any]) -> str:
    """The table in Markdown, with 95 % intervals in brackets."""
    made = compared(document)
    return formats.markdown(made.header, made.rows)


def page(document: dict[str, Any]) -> str:
    """One self-contained HTML document."""
    teacher = document["teacher"]
    named = f"{document['metric'].replace('_', ' ')} on test, mean over {document['settings']['seeds']} seeds"
    return rendered(
        "comparison.html",
        {
            "title": "Methods compared",
            "document": document,
            "named": named,
            "teacher": scored(teacher["value"], teacher["low"], teacher["high"]),
            "table": compared(document),
            "means": intervals(
                [
                    Interval(name_of(row), row["mean"], row["low"], row["high"], score(row["mean"]) or "")
                    for row in document["rows"]
                ]
            ),
            "losses": [
                (name_of(row), {stage: _losses_in_words(of) for stage, of in row["losses"].items()})
                for row in document["rows"]
            ],
        },
    )


def name_of(row: dict[str, Any]) -> str:
    """A method on a student."""
    return f"{row['method']}, {row['student']}"


def _losses_in_words(stage: dict[str, Any]) -> dict[str, object]:
    """Ranges over seeds, as text."""
    ranges = {name: value for name, value in stage.items() if name != "steps"}
    return {"steps": stage["steps"]} | {name: f"{low:.4g} to {high:.4g}" for name, (low, high) in ranges.items()}
