"""The report of a run or an export: one self-contained HTML file, or JSON without Jinja2.

A report is a dictionary of parts. Each is optional, and a section whose part is absent is left out.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from latency.measure.machine import machine_line
from serve.bundle.manifest import canonical_json
from serve.wording import all_of, counted
from stillroom.report.drawings import Interval, curve, intervals
from stillroom.report.formats import Cell, Outcome, Table, number, score, scored, scored_as, size, table
from stillroom.report.pages import Part, can_write_pages, page_bytes, rendered, write_page, write_text
from stillroom.report.search_page import sentences, tried
from stillroom.report.timings import doubts, latencies


def write_report(path: Path, report: dict[str, Any]) -> Path:
    """Writes `report` to `path` as one self-contained HTML file without scripts, in one step.

    Without Jinja2, writes JSON beside `path`. Returns the written file.
    """
    write_page(path, partial(report_page, report))
    if not path.is_file():
        path = path.with_suffix(".json")
        write_text(path, canonical_json(report).decode())
    return path


def report_files(report: dict[str, Any], **more: object) -> dict[str, bytes]:
    """`report` as the files of a bundle; `more` is added to the JSON."""
    page = {"report.html": page_bytes(report_page(report))} if can_write_pages() else {}
    return {**page, "report.json": canonical_json({**report, **more})}


def report_page(report: dict[str, Any]) -> str:
    """`report` as one self-contained HTML document."""
    tables, found, latency = _tables(report), report.get("found"), report.get("latency")
    metric_name, summary = report.get("metric_name", "metric"), report.get("summary", [])
    scores = [
        Interval(row["name"], row["metric"], row.get("low"), row.get("high"), f"{row['metric']:.4f}") for row in summary
    ]
    drawn = ("bars", f"{metric_name} of each model with its 95 % interval", intervals(scores))
    doubtful, parity = doubts(latency) if latency else None, report.get("parity", {})
    notes = {
        name: {**of, "beyond_tolerance": "not applied to int8"}
        if isinstance(of, Mapping) and of.get("precision") == "int8"
        else of
        for name, of in parity.items()
    }
    # The results first, then how they were made.
    sections: list[tuple[str, str, list[Part]]] = [
        ("results", "Results", [
            tables["summary"],
            ("quiet", report.get("summary_note", "") if summary else ""),
            ("figure", f"{metric_name}, with 95 % intervals", [drawn]),
            report.get("made"),
            report.get("names"),  # before the claims, which use these names
            *report.get("claims", []),
        ]),
        ("gates", "Gates", [tables["gates"]]),
        ("latency", "Latency", [
            ("doubts", *doubtful) if doubtful else None,
            *latencies(latency),
            ("details", "The machine", [latency["machine"]]),
        ] if latency else []),
        ("labels", "Labels", [tables["labels"]]),
        ("numbers", "Other scores", [tables["numbers"]]),
        ("questions", "Other scores", [tables["questions"]]),
        ("languages", "Languages", [tables["languages"]]),
        ("disagreements", "Disagreements", [("said", "run_disagreements", report.get("disagreeing")), tables["differing"]]),
        ("training", "Training", [_curves(stage) for stage in report.get("training", [])]),
        ("student", "Why this student", [*sentences(found), ("note", "run_student", found), tables["found"]] if found else []),
        ("agreement", "Agreement", [tables["agreement"]]),
        ("quantisation", "Quantisation", [
            tables["tried"],
            ("under", "Put back to float32, one after another", [tables["repaired"]]),
            ("under", "Cost of each product when only it is int8", [tables["costs"]]),
        ]),
        ("kernels", "Kernels", [tables["kernels"]]),
        ("vocabulary", "Vocabulary", [report.get("vocabulary")]),
        ("parity", "Parity", [
            ("note", "run_parity", notes != parity), tables["parity"], ("details", "All figures of the comparison", [notes])
        ]),
        ("recipe", "Recipe", [("details", "The settings of this run", [("pre", report.get("recipe", ""))])]),
        ("lineage", "Lineage", [("details", "Where this model comes from", [report.get("lineage")])]),
    ]  # fmt: skip
    lead: list[Part] = [
        ("answer", result_line(report)),
        ("quiet", " · ".join(filter(None, [report.get("task"), report.get("created")]))),
        ("quiet", machine_line(report.get("machine", {}))),
        ("warnings", report.get("warnings", ())),
    ]
    return rendered(report.get("title", "Report"), lead, sections)


def _curves(stage: dict[str, Any]) -> Part:
    of = f"of stage {stage['stage']} by step"
    drawn = {"loss": curve(stage["loss"], f"loss {of}"), "validation": curve(stage["validation"], f"validation {of}")}
    charts = [("figure", name, [chart]) for name, chart in drawn.items() if chart]
    told = (
        f"Best on validation at step {stage['best_step']:,}; it ended {stage['ended']}." if stage.get("ended") else ""
    )
    return "under", stage["stage"], [("quiet", told), ("charts", charts)]


def result_line(report: dict[str, Any]) -> str:
    """The score of int8 beside the teacher's and that of labels alone, times faster and smaller, and the gates; empty without int8."""
    rows = {row["name"]: row for row in report.get("summary", [])}
    if "int8" not in rows:
        return ""
    int8, metric_name = rows["int8"], report.get("metric_name", "metric")
    others = {"teacher": "teacher", "undistilled": "labels alone", "fp32": "fp32"}
    if "teacher" in rows:
        del others["fp32"]
    beside = [f"{title} {rows[name]['metric']:.4f}" for name, title in others.items() if name in rows]
    parts = [f"int8: {int8['metric']:.4f} ({metric_name})" + (f"; {', '.join(beside)}" if beside else "")]
    other = next((rows[name] for name in ("teacher", "student", "fp32") if name in rows), int8)
    gains = []
    if (ours_ms := int8.get("latency_ms")) and (theirs_ms := other.get("latency_ms")):
        gains.append(f"{number(theirs_ms / ours_ms)} times as fast")
    if (ours_bytes := int8.get("size_bytes")) and (theirs_bytes := other.get("size_bytes")):
        gains.append(f"{number(theirs_bytes / ours_bytes)} times smaller")
    if gains and other is not int8:
        parts.append(f"against the {other['name']}: {', '.join(gains)}")
    if gates := report.get("gates", []):
        missed = [gate["name"] for gate in gates if not gate["passed"]]
        parts.append(f"missed {counted(len(missed), 'gate')}: {all_of(missed)}" if missed else "every gate passed")
    return ". ".join(part[0].upper() + part[1:] if i else part for i, part in enumerate(parts)) + "."


def _tables(report: dict[str, Any]) -> dict[str, Table]:
    """The tables of the report; empty where it has no data for them."""
    summary, gates, labels = report.get("summary", []), report.get("gates", []), report.get("per_label", [])
    differing, languages = report.get("disagreements", []), report.get("per_language", [])
    numbers, questions = report.get("numbers", []), report.get("questions", [])
    search: Mapping[str, Any] = report.get("search") or {}
    found = {name: of for name, of in report.get("agreement", {}).items() if isinstance(of, Mapping)}
    parity = report.get("parity", {})
    checked = {name: of for name, of in parity.items() if isinstance(of, Mapping) and "passed" in of}
    fusions = report.get("fusions", {})
    kinds = list(dict.fromkeys(kind for counts in fusions.values() for kind in counts))
    # Of vectors the distance is one minus a cosine, and a text changes where its nearest text does.
    of_vectors = report.get("task") == "feature-extraction"
    divergence, changed = ("1 - cosine", "nearest texts") if of_vectors else ("divergence, nats", "labels")

    def of_three(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[Cell]]]:
        return [(name, [score(row[name]) for row in rows]) for name in ("teacher", "student", "int8")]

    def of_products(first: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
        return table(
            (first, [name for name, _ in rows]),
            ("of fp32's metric", [score(of["share"]) for _, of in rows]),
            (divergence, [f"{of['divergence']:.2g}" for _, of in rows]),
            rows_are="products",
        )

    return {
        "found": tried(report["found"]) if "found" in report else table(),
        "summary": table(
            ("model", [row["name"] for row in summary]),
            (
                report.get("metric_name", "metric"),
                [scored(row["metric"], row.get("low"), row.get("high")) for row in summary],
            ),
            ("latency, ms", [row.get("latency_ms") for row in summary]),
            ("size", [size(row.get("size_bytes")) for row in summary]),
        ),
        "gates": table(
            ("gate", [gate["name"] for gate in gates]),
            ("value", [score(gate["value"]) for gate in gates]),
            ("needed", [score(gate["needed"]) for gate in gates]),
            ("outcome", [Outcome(gate["passed"]) for gate in gates]),
        ),
        "labels": table(
            ("label", [row["label"] for row in labels]),
            ("support", [row["support"] for row in labels]),
            *of_three(labels),
            rows_are="labels",
        ),
        "languages": table(
            ("language", [row["language"] or "not named" for row in languages]),
            ("texts", [row["texts"] for row in languages]),
            *of_three(languages),
            rows_are="languages",
        ),
        "questions": table(
            ("model", [row["name"] for row in questions]),
            *(
                (title, [scored_as(row[name]) for row in questions])
                for name, title in (
                    ("exact_match", "exact match"),
                    ("f1_with_answer", "F1 with an answer"),
                    ("f1_without_answer", "F1 without"),
                )
                if questions and name in questions[0]
            ),
        ),
        "numbers": table(
            ("model", [row["name"] for row in numbers]),
            ("Spearman's rho", [scored_as(row["spearman"]) for row in numbers]),
            ("mean squared error", [scored_as(row["mean_squared_error"]) for row in numbers]),
        ),
        "differing": table(
            ("text", [row["text"] for row in differing]),
            ("teacher", [row["teacher"] for row in differing]),
            ("student", [row["student"] for row in differing]),
            ("gold", [row["gold"] for row in differing]),
            words=True,
            rows_are="texts",
        ),
        # The difference of each variant from fp32 on whole texts.
        "agreement": table(
            ("variant", list(found)),
            ("of fp32's metric", [score(of.get("share")) for of in found.values()]),
            (f"{changed} changed per 10k", [of["labels_changed_per_10k"] for of in found.values()]),
            ("answers changed", [of["answers_changed"] for of in found.values()]),
            ("spans changed", [of["spans_changed"] for of in found.values()]),
            (divergence, [f"{of['divergence']:.2g}" for of in found.values()]),
        ),
        # The search for the int8 graph, and the products that it put back to float32.
        "tried": of_products(
            "tried",
            [
                (f"{each['weight_bits']} bits, {'clipped' if each['clipped'] else 'whole'} ranges", each["verdict"])
                for each in search.get("tried", [])
            ],
        ),
        "repaired": of_products("product", [(each["product"], each) for each in search.get("repaired", [])]),
        "costs": of_products("product", [(each["product"], each) for each in search.get("costs", [])]),
        "parity": table(
            ("variant", list(checked)),
            ("outcome", [Outcome(of["passed"]) for of in checked.values()]),
            ("largest difference", [of.get("largest") for of in checked.values()]),
        ),
        "kernels": table(
            ("session as loaded", list(fusions)),
            *((kind, [counts.get(kind, 0) for counts in fusions.values()]) for kind in kinds),
        ),
    }
