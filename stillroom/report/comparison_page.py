"""The output of `stillroom compare`: a table for the terminal, the same in Markdown, and an HTML page."""

from collections.abc import Collection
from typing import Any

from stillroom.report import formats
from stillroom.report.drawings import Interval, intervals
from stillroom.report.formats import Table, difference, score, scored, scored_as, size, table
from stillroom.report.pages import Part, rendered

CHOICES = {"start": "{}", "teacher_layer": "teacher layer {}", "distill_tokens": "{:,} tokens"}


def compared(document: dict[str, Any]) -> Table:
    """A row per method, student and choice, best first. A choice has a column where it has several values."""
    rows = document["rows"]
    several = _several(document)
    return table(
        ("method", [row["method"] for row in rows]),
        ("student", [row["student"] for row in rows]),
        ("start", [row["start"] if "start" in several else None for row in rows]),
        ("teacher layer", [row["teacher_layer"] if "teacher_layer" in several else None for row in rows]),
        ("mean", [scored(row["mean"], row["low"], row["high"]) for row in rows]),
        ("sd over seeds", [score(row["standard_deviation"]) for row in rows]),
        ("against labels", [difference(row["less_labels"]) for row in rows]),
        ("plain text", [f"{row['plain_tokens']:,} tokens" if row["plain_tokens"] else "" for row in rows]),
        ("label rate", [f"{row['label_learning_rate']:g}" for row in rows]),
        ("validation by rate", [_by_rate(row) for row in rows]),
        ("minutes", [f"{row['seconds'] / 60:.1f}" for row in rows]),
        ("peak memory", [size(row["peak_memory_bytes"]) for row in rows]),
    )


def supported_gains(document: dict[str, Any]) -> str:
    """Which rows gain over labels by a supported difference, as a sentence."""
    several = _several(document)
    found = [name_of(row, several) for row in document["rows"] if (row["less_labels"] or {}).get("supported")]
    return f"Supported gains over labels: {'; '.join(found)}." if found else "No gain over labels is supported."


def _several(document: dict[str, Any]) -> set[str]:
    """The choices of which the rows have several values."""
    return {name for name in CHOICES if len({row[name] for row in document["rows"]} - {None}) > 1}


def _by_rate(row: dict[str, Any]) -> str | None:
    """The score on validation with each rate of seed 0; None where there was no choice."""
    tried = [f"{one['learning_rate']:g}: {score(one['validation'])}" for one in row["label_rates"]]
    tried += [f"{rate:g}: the loss was not finite" for rate in row["diverged_rates"]]
    return "; ".join(tried) if tried[1:] else None


def markdown(document: dict[str, Any]) -> str:
    """The table in Markdown, with 95 % intervals in brackets."""
    made = compared(document)
    return formats.markdown(made.header, made.rows)


def page(document: dict[str, Any]) -> str:
    """One self-contained HTML document."""
    best, several, rows = document["best"], _several(document), document["rows"]
    export = document.get("export") or {"bundle": None, "report": None}  # what became of `--export best`
    missed = f"No bundle was written, because a gate was missed: {export['report']} says which."
    measured = f"{document['metric'].replace('_', ' ')} on test, mean over {document['settings']['seeds']} seeds"
    bundle = f"Its bundle is {export['bundle']}." if export["bundle"] else missed if export["report"] else ""
    means = [
        Interval(name_of(row, several), row["mean"], row["low"], row["high"], score(row["mean"]) or "") for row in rows
    ]
    losses: list[Part] = [
        ("details", name_of(row, several), [{stage: _ranges(of) for stage, of in row["losses"].items()}])
        for row in rows
    ]
    return rendered(
        "Methods compared",
        [
            ("note", "comparison", measured, scored_as(document["teacher"]), rows),
            ("quiet", supported_gains(document)),
            ("quiet", f"Best on validation: {name_of(best, several)}, seed {best['seed']}. {bundle}".strip()),
            ("warnings", [doubt for row in rows for doubt in row["doubts"]]),
        ],
        [
            ("table", "Table", [compared(document)]),
            ("means", "Means with their intervals", [("bars", measured, intervals(means))]),
            ("losses", "First and last loss of each stage", losses),
            ("settings", "Settings", [document["settings"]]),
        ],
    )


def name_of(row: dict[str, Any], several: Collection[str] = ()) -> str:
    """A method on a student, and its value of each of the choices `several`."""
    chosen = [form.format(row[name]) for name, form in CHOICES.items() if name in several and row[name] is not None]
    return ", ".join([row["method"], row["student"], *chosen])


def _ranges(stage: dict[str, Any]) -> dict[str, object]:
    """The losses of a stage: ranges over seeds, as text."""
    ranges = {name: value for name, value in stage.items() if name != "steps"}
    return {"steps": stage["steps"]} | {name: f"{low:.4g} to {high:.4g}" for name, (low, high) in ranges.items()}
