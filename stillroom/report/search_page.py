"""The output of `stillroom search`: a table for the terminal and the page, and the page with score against predicted latency."""

from typing import Any

from stillroom.report.charts import Plane, dot, kind_of, labels, line, linear_axis, log_axis, plot, upright, whisker
from stillroom.report.drawings import Chart
from stillroom.report.formats import Table, difference, number, score, scored_as, table
from stillroom.report.pages import rendered

CHOSEN, ON_FRONT, OTHER = 0, 1, 2  # colours


def tried(document: dict[str, Any]) -> Table:
    """A row per trained student, best first."""
    rows = document["trials"]
    return table(
        ("student", [_name(row) for row in rows]),
        ("heads", [row["heads"] for row in rows]),
        ("feed-forward", [row["ffn"] for row in rows]),
        (f"{document['metric']} on validation", [scored_as(row["validation"]) for row in rows]),
        ("minus the chosen", [difference(row["minus_chosen"]) for row in rows]),
        (f"predicted p{document['percentile']}, ms", [row["predicted_ms"] for row in rows]),
        ("measured, ms", [row["measured_ms"] for row in rows]),
        ("parameters, M", [f"{row['parameters'] / 1e6:.1f}" for row in rows]),
        ("Pareto front", ["yes" if row["on_front"] else "" for row in rows]),
        ("seconds", [f"{row['seconds']:.0f}" for row in rows]),
    )


def named(document: dict[str, Any]) -> Table:
    """A row per named shape of the papers that fits the teacher."""
    rows = document["papers"]
    return table(
        ("student", [row["student"] for row in rows]),
        (f"predicted p{document['percentile']}, ms", [row["predicted_ms"] for row in rows]),
        ("meets the budget", ["yes" if row["meets"] else "no" for row in rows]),
    )


def sentences(document: dict[str, Any]) -> list[str]:
    """What was found, in sentences."""
    budget = f"p{document['percentile']} of {number(document['budget_ms'])} ms on {document['tokens']} tokens"
    if document["chosen"] is None:
        said = [
            f"No student that was trained meets {budget}: each was measured, and is slower than predicted. Give a larger --budget-ms."
        ]
    else:
        row = _chosen(document)
        said = [
            f"{document['chosen']} is the best that meets {budget}: {document['metric']} {score(row['validation']['value'])} on validation "
            f"after {document['trial_steps']} steps (the teacher has {score(document['teacher']['validation'])}), "
            f"{number(row['measured_ms'])} ms measured."
        ]
        if equal := as_good(document):
            fastest = min(equal, key=lambda each: float(each["predicted_ms"]))
            said.append(
                f"{len(equal)} faster one{'s are' if len(equal) > 1 else ' is'} not shown to be worse: the fastest is "
                f"{fastest['student']}, {number(fastest['predicted_ms'])} ms."
            )
    for missed in document.get("missed", []):
        said.append(
            f"{missed['student']} was trained in full and is too slow: {number(missed['measured_ms'])} ms measured."
        )
    if shipped := document.get("shipped"):
        said.append(f"{shipped} ships.")
    errors = document["latency_model"]["errors"]
    said.append(
        f"Predicted times were wrong by {errors['median']:.1%} at the median and {errors['worst']:.1%} at worst on {errors['students']} "
        "students, from a fit to the others."
    )
    return said


def as_good(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The trained students that are predicted to be faster than the chosen one and not shown to score less."""
    chosen = _chosen(document)
    return [
        row
        for row in document["trials"]
        if row["minus_chosen"] and row["minus_chosen"]["high"] >= 0 and row["predicted_ms"] < chosen["predicted_ms"]
    ]


def page(document: dict[str, Any]) -> str:
    """One self-contained HTML document."""
    model = document["latency_model"]
    units = [float(each) for each in model["ms_by_operator"].values()]
    costs = table(("operator", list(model["ms_by_operator"])), ("ms of one unit", units))
    train = ["To train the chosen student to a bundle:", ("pre", document["command"])] if "command" in document else []
    return rendered(
        f"Students for {number(document['budget_ms'])} ms",
        [*sentences(document), *train, ("note", "search", document)],
        [
            ("front", "Score against latency", [("note", "search_front", document), _front(document)]),
            ("trials", "Trained students", [tried(document)]),
            ("papers", "Shapes of the papers", [named(document)]),
            ("model", "How times are predicted", [("note", "search_model", model), costs]),
            ("machine", "Machine", [document["machine"]]),
        ],
    )


def _front(document: dict[str, Any]) -> Chart | None:
    """Score against predicted latency, with the Pareto front as a line and the budget as a vertical one."""
    rows = document["trials"]
    if not rows:
        return None
    values = [float(row["validation"][key]) for row in rows for key in ("value", "low", "high")]
    times = [float(row["predicted_ms"]) for row in rows]
    plane = Plane(
        log_axis(f"predicted p{document['percentile']} of one text, ms", [*times, document["budget_ms"]]),
        linear_axis(document["metric"], values),
    )
    at = {row["student"]: (row["predicted_ms"], row["validation"]["value"]) for row in rows}
    corners = sorted(at[row["student"]] for row in rows if row["on_front"])
    parts = [line(plane, corners, "front")]
    for row in rows:
        x, low, high = row["predicted_ms"], row["validation"]["low"], row["validation"]["high"]
        parts.append(whisker(plane, (x, low), (x, high), kind_of(_colour(document, row))))
    parts.append(upright(plane, document["budget_ms"], f"budget {number(document['budget_ms'])} ms"))
    for row in rows:
        parts.append(
            dot(plane, at[row["student"]], kind_of(_colour(document, row)), hollow=row["student"] != document["chosen"])
        )
    shown = [row for row in rows if row["on_front"] or row["student"] == document["chosen"]]
    parts.append(labels(plane, [(at[row["student"]], _name(row)) for row in shown]))
    return plot(plane, parts, f"{document['metric']} against predicted latency", [])


def _colour(document: dict[str, Any], row: dict[str, Any]) -> int:
    return CHOSEN if row["student"] == document["chosen"] else ON_FRONT if row["on_front"] else OTHER


def _name(row: dict[str, Any]) -> str:
    """Layers and width, as the papers name students."""
    return f"{row['layers']}x{row['hidden']}"


def _chosen(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in document["trials"] if row["student"] == document["chosen"])
    return found
