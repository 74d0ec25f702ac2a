"""The output of `stillroom transfer`: the table and the curves for the terminal and the page, and what they show in sentences."""

from collections.abc import Mapping
from typing import Any

from stillroom.report.charts import Plane, band, dot, kind_of, line, linear_axis, log_axis, plot
from stillroom.report.drawings import Chart, Key
from stillroom.report.formats import Table, difference, score, scored_as, table
from stillroom.report.pages import Part, rendered

WITH, WITHOUT = 0, 1  # colours
NO_SOURCE = "no source"


def transferred(document: dict[str, Any]) -> Table:
    """A row per source, best on validation first, and the student without one; a column per target."""
    rows = document["table"]
    names = [each["name"] for each in document["targets"]]
    return table(
        ("source", [row["source"] or NO_SOURCE for row in rows]),
        *((name, [scored_as(row["cells"][name]["test"]) for row in rows]) for name in names),
        ("mean", [scored_as(row["mean"]["test"]) for row in rows]),
        ("minus no source", [difference(row["minus_none"]) for row in rows]),
        ("seeds above no source", [row["minus_none"] and _above(row["minus_none"]) for row in rows]),
        ("minus the chosen", [difference(row["minus_chosen"]) for row in rows]),
        ("mean on validation", [score(row["mean"]["validation"]["value"]) for row in rows]),
    )


def points(document: dict[str, Any]) -> Table:
    """A row per target and number of labels: the student of the chosen source beside the same one without a source."""
    rows = [(curve, point) for curve in document["curves"] for point in curve["points"]]
    return table(
        ("target", [curve["target"] for curve, _ in rows]),
        ("labels", [f"{point['labels']:,}" for _, point in rows]),
        (f"from {document['chosen']}", [scored_as(point["with_source"]) for _, point in rows]),
        (NO_SOURCE, [scored_as(point["without"]) for _, point in rows]),
        ("difference", [difference(point["difference"]) for _, point in rows]),
        ("seeds above", [_above(point["difference"]) for _, point in rows]),
    )


def sentences(document: dict[str, Any]) -> list[str]:
    """What was found: which source, whether the intervals support it, and what it is worth with few labels and with all."""
    chosen = document["chosen"]
    row = next(row for row in document["table"] if row["source"] == chosen)
    said = [
        f"{chosen} is the source with the best mean over targets on validation, {score(row['mean']['validation']['value'])}; on test "
        f"its mean is {scored_as(row['mean']['test'])}."
    ]
    groups: dict[str, list[str]] = {"ahead of": [], "behind": [], "not shown to differ from": []}
    for other in document["table"]:
        if other["source"] not in (chosen, None):  # by the interval of the difference
            less = other["minus_chosen"]
            how = "ahead of" if less["high"] < 0 else "behind" if less["low"] > 0 else "not shown to differ from"
            groups[how].append(other["source"])
    if others := ", and ".join(f"{how} {' and '.join(names)}" for how, names in groups.items() if names):
        said.append(f"On test {chosen} is {others}.")
    said.append(f"Its lead over the same student without a source is on test {_worth(row['minus_none'])}.")
    few = [each for each in document["mean_differences"] if each["labels"] is not None]
    said += [f"With {each['labels']:,} labels of each target that lead is {_worth(each)}." for each in few]
    alone = next(row for row in document["table"] if row["source"] is None)
    if alone["mean"]["validation"]["value"] >= row["mean"]["validation"]["value"]:
        said.append(
            "With all labels no source is worth its steps here: on validation the student without one is as good or better."
        )
    return said


def page(document: dict[str, Any]) -> str:
    """One self-contained HTML document."""
    tasks = [*document["sources"], *document["targets"]]
    curves = [_chart(document, curve) for curve in document["curves"] if len(curve["points"]) > 1]
    described = table(
        ("task", [each["name"] for each in tasks]),
        ("is", ["source"] * len(document["sources"]) + ["target"] * len(document["targets"])),
        ("kind", [each["task"] for each in tasks]),
        ("labels", [each["labels"] for each in tasks]),
        ("texts of train", [each["texts"]["train"] for each in tasks]),
        ("left out", [each.get("left_out") for each in tasks]),
        ("metric", [each["metric"] for each in tasks]),
        ("its teacher on validation", [score(each.get("teacher_validation")) for each in tasks]),
    )
    few: list[Part] = [
        ("note", "transfer_curves"),
        *(("figure", curve.title, [curve]) for curve in curves),
        points(document),
    ]
    return rendered(
        "Which source transfers",
        [*sentences(document), ("note", "transfer", document)],
        [
            ("table", "From source to target", [("note", "transfer_table", document), transferred(document)]),
            ("curves", "With few labels", few),
            ("tasks", "Tasks", [described]),
            ("seconds", "Seconds of training", [document["seconds"]]),
            ("settings", "Settings", [document["settings"]]),
            ("machine", "Machine", [document["machine"]]),
        ],
    )


def _chart(document: dict[str, Any], curve: dict[str, Any]) -> Chart:
    """Score against the number of labels, with the source and without, each with the band of its interval."""
    arms = {WITH: "with_source", WITHOUT: "without"}
    values = [point[arm][key] for point in curve["points"] for arm in arms.values() for key in ("low", "high")]
    plane = Plane(
        log_axis("labels", [point["labels"] for point in curve["points"]]), linear_axis(curve["metric"], values)
    )
    parts = []
    for kind, arm in arms.items():
        lower, middle, upper = (
            [(point["labels"], point[arm][key]) for point in curve["points"]] for key in ("low", "value", "high")
        )
        parts.append(band(plane, lower, upper, kind_of(kind)))
        parts.append(line(plane, middle, kind_of(kind)))
        parts += [dot(plane, each, kind_of(kind), radius_px=4) for each in middle]
    legend = [Key(WITH, f"from {document['chosen']}", "", "line"), Key(WITHOUT, NO_SOURCE, "", "line")]
    return plot(plane, parts, f"{curve['target']}: {curve['metric']} against labels", legend)


def _above(found: Mapping[str, Any]) -> str:
    """In how many seeds a difference is above 0."""
    return f"{sum(value > 0 for value in found['seeds'])} of {len(found['seeds'])}"


def _worth(found: Mapping[str, Any]) -> str:
    """A mean difference in words: how far apart, whether it is a supported gain (see `gain`), and the seeds that agree."""
    supported = "supported" if found["supported"] else "not supported"
    return f"{difference(found)} on average over targets ({supported}; above 0 in {_above(found)} seeds)"
