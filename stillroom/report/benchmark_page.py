"""The output of `stillroom benchmark`: our scores beside the papers', for the terminal and as a page."""

import statistics
from typing import Any

from stillroom.report.formats import Cell, Table, table
from stillroom.report.pages import rendered

METRICS = {
    "accuracy": "accuracy", "f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman", "entity_f1": "entity F1",
    "answer_f1": "F1", "exact_match": "exact match",
}  # fmt: skip


# What the papers score a task by, where their row names nothing else.
USUAL_METRICS = {"squad1": "answer_f1", "squad2": "answer_f1", "mlqa": "answer_f1"}


def measured(document: dict[str, Any]) -> Table:
    """A row per scored file and metric, in percent."""
    rows = document["rows"]
    return table(
        ("task", [row["task"] for row in rows]),
        ("metric", [METRICS[row["metric"]] for row in rows]),
        (f"mean of {document['seeds']}" if document["seeds"] > 1 else "score", [_percent(row["mean"]) for row in rows]),
        ("sd", [None if row["standard_deviation"] is None else _percent(row["standard_deviation"]) for row in rows]),
        ("rate", [f"{row['learning_rate']:g}" for row in rows]),
        ("epochs", [f"{row['epochs']:g}" for row in rows]),
    )


def beside(document: dict[str, Any]) -> Table:
    """Our row, then a row per published model, a column per task; a paper's score in another or an unnamed metric has a mark.

    The mean is over all columns, of models that have all of them, where all have one metric.
    """
    ours = {row["task"]: row for row in reversed(document["rows"])}  # the first metric of each
    tasks = list(dict.fromkeys(row["task"] for row in document["rows"]))
    cells: dict[str, list[Cell]] = {task: [_percent(ours[task]["mean"])] for task in tasks}
    means: list[Cell] = [_percent(statistics.fmean(ours[task]["mean"] for task in tasks))]
    for row in document["published"]:
        scores = row["scores"] | {
            name: row["scores"][whole] for name, whole in {"MNLI-m": "MNLI"}.items() if whole in row["scores"]
        }
        for task in tasks:
            metric = row.get("metrics", {}).get(task, USUAL_METRICS.get(document["suite"], "accuracy"))
            mark = "" if metric == ours[task]["metric"] else "*"
            cells[task].append(f"{scores[task]:.1f}{mark}" if task in scores else None)
        whole = all(task in scores for task in tasks)
        means.append(f"{statistics.fmean(scores[task] for task in tasks):.1f}" if whole else None)
    models = [f"{document['model']['name']} ({document['model']['shape']}), this run"]
    models += [f"{row['model']} ({row['shape']})" for row in document["published"]]
    # GLUE's tasks have different metrics, and papers leave some out of their means.
    mean = [("mean", means)] if len(tasks) > 1 and document["suite"] != "glue" else []
    return table(("model", models), *((task, cells[task]) for task in tasks), *mean)


def sentences(document: dict[str, Any]) -> list[str]:
    """What the tables do not say."""
    said = []
    if document["not_run"]:
        said.append(f"Not run: {', '.join(document['not_run'])}.")
    if not any(row["shape"] == document["model"]["shape"] for row in document["published"]):
        said.append(f"No score of the papers for a {document['model']['shape']} on this suite is known here.")
    if any("*" in str(cell) for row in beside(document).rows for cell in row):
        said.append("* The paper scores this task by another metric, or does not name it.")
    return said


def page(document: dict[str, Any]) -> str:
    """One self-contained HTML document."""
    sources = [f"{row['model']} ({row['shape']}): {row['source']}" for row in document["published"]]
    return rendered(
        f"{document['model']['name']} on {document['suite']}",
        [("note", "benchmark", document), ("warnings", document["warnings"])],
        [
            ("beside", "Beside the papers", [beside(document), *(("quiet", said) for said in sentences(document))]),
            ("scores", "All scores", [measured(document)]),
            ("sources", "Where the papers' scores are from", [list(dict.fromkeys(sources))]),
            ("machine", "Machine", [document["machine"]]),
        ],
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
