import re
import stat
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from read_page import Page, part

from stillroom.report.drawings import curve
from stillroom.report.formats import markdown, number, size, table
from stillroom.report.run_page import write_report
from stillroom.report.timings import all_figures


def profile_document(names: tuple[str, ...] = ("teacher", "int8"), text: str = "Some CPU") -> dict[str, Any]:
    rows = [
        {
            "name": name,
            "runtime": "torch" if i == 0 else "onnxruntime",
            "precision": "fp32",
            "batch": batch,
            "tokens": 16,
            "p50_ms": 20.0 / (i + 1),
            "p90_ms": 22.0 / (i + 1),
            "p99_ms": 25.0 / (i + 1),
            "texts_per_s": batch * 50.0 * (i + 1),
            "size_bytes": 91_000_000 if i == 0 else 1_500,
            "doubts": [text] if i else [],
            "warmup": 9,
            "conditions": {"threads": 2},
            "samples_ms": [20.0],
            "turn_sizes": [1],
        }
        for batch in (1, 8)
        for i, name in enumerate(names)
    ]
    ratios = [
        {"a": names[0], "b": name, "ratio": 2.0, "low": 1.9, "high": 2.125, "batch": batch, "tokens": 16}
        for batch in (1, 8)
        for name in names[1:]
    ]
    machine = {"cpu": text, "cores": 2, "flags": ["avx2"], "versions": {"torch": "2.13"}}
    return {"machine": machine, "candidates": rows, "ratios": ratios}


def full_report(text: str = "plain") -> dict[str, Any]:
    """Every section there is, with `text` wherever a string from outside can stand."""
    document = {
        "title": text,
        "task": text,
        "created": text,
        "metric_name": text,
        "warnings": [text],
        "summary": [
            {"name": text, "metric": 0.9225, "low": 0.91, "high": 0.93, "latency_ms": 34.0, "size_bytes": 91_000_000},
            {"name": "int8", "metric": 0.9185, "low": None, "high": None},
        ],
        "claims": [text],
        "gates": [
            {"name": text, "value": 0.996, "needed": 0.99, "passed": True},
            {"name": "teacher gate", "value": 0.95, "needed": 0.97, "passed": False},
        ],
        "latency": profile_document((text, "int8"), text),
        "per_label": [{"label": text, "support": 12, "teacher": 0.9, "student": None, "int8": 0.8}],
        "disagreements": [{"text": text, "teacher": text, "student": text, "gold": text}],
        "training": [
            {
                "stage": text,
                "loss": [[0, 2.5], [10, 0.5]],
                "validation": [[10, 0.75]],
                "best_step": 10,
                "ended": "after all 10 steps",
            }
        ],
        "parity": {text: {text: text, "shapes": [text]}, "largest_difference": 2e-6},
        "recipe": text,
        "lineage": {text: [text], "teacher": {"name": text}},
    }
    return document


def written(path: Path, report: dict[str, Any]) -> Page:
    write_report(path, report)
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_shows_every_part_of_a_full_report(tmp_path: Path) -> None:
    page = written(tmp_path / "report.html", full_report())
    assert page.sections() == [
        "results",
        "gates",
        "latency",
        "labels",
        "disagreements",
        "training",
        "parity",
        "recipe",
        "lineage",
    ]
    for shown in ("0.9225", "0.9100 – 0.9300", "91 MB", "34", "passed", "missed", "2.00", "1.90 – 2.12", "2e-06", "12"):
        assert shown in page.texts, shown
    assert "Best on validation at step 10; it ended after all 10 steps." in page.words()


def test_the_page_begins_with_the_result(tmp_path: Path) -> None:
    report = full_report()
    report["metric_name"] = "accuracy, test"
    report["summary"] = [
        {"name": "teacher", "metric": 0.9, "latency_ms": 30.0, "size_bytes": 90_000_000},
        {"name": "undistilled", "metric": 0.85},
        {"name": "int8", "metric": 0.89, "latency_ms": 2.5, "size_bytes": 9_000_000},
    ]
    words = written(tmp_path / "report.html", report).words()
    line = (
        "int8: 0.8900 (accuracy, test); teacher 0.9000, labels alone 0.8500. "
        "Against the teacher: 12 times as fast, 10 times smaller. Missed 1 gate: teacher gate."
    )
    assert line in words
    assert words.index(line) < words.index("Warnings") < words.index("Gates")
    report["gates"], report["summary"] = report["gates"][:1], report["summary"][2:]
    assert "int8: 0.8900 (accuracy, test). Every gate passed." in written(tmp_path / "alone.html", report).words()
    assert "int8:" not in written(tmp_path / "none.html", {"gates": report["gates"]}).words()


def test_what_is_absent_is_not_spoken_of(tmp_path: Path) -> None:
    assert written(tmp_path / "empty.html", {}).sections() == []
    page = written(tmp_path / "gates.html", {"gates": full_report()["gates"], "summary": [], "training": []})
    assert page.sections() == ["gates"]
    assert "Warnings" not in page.texts
    plain = written(tmp_path / "summary.html", {"summary": [{"name": "teacher", "metric": 0.5}]})
    assert plain.tables == [[["model", "metric"], ["teacher", "0.5000"]]]


def test_the_page_can_be_read_by_who_was_not_there(tmp_path: Path) -> None:
    report = full_report()
    report["latency"]["machine"] |= {"measured_at": "2026-11-22T20:14:07Z"}
    report |= {
        "machine": report["latency"]["machine"],
        "made": "A student was distilled from a teacher.",
        "names": {"undistilled": "trained on labels alone"},
        "summary_note": "Latency is the median of one text.",
        "claims": ["int8 against undistilled"],
    }
    words = written(tmp_path / "report.html", report).words()
    line, made, name, claim, note, labels = (
        words.index(said)
        for said in (
            "2026-11-22 · plain, 2 cores · torch 2.13",
            "A student was distilled from a teacher.",
            "undistilled trained on labels alone",
            "int8 against undistilled",
            "Latency is the median of one text.",
            "Speed-ups are ratios paired turn by turn, so they differ from quotients of the p50 column.",
        )
    )
    assert line < note < made < name < claim < labels


def test_texts_that_differ_are_counted_and_said_to_stand_elsewhere(tmp_path: Path) -> None:
    found = {"count": 63, "texts": 400, "split": "test", "shown": 40}
    page = written(tmp_path / "report.html", {"disagreeing": {**found, "shown_in": "my.work/report.html"}})
    assert page.sections() == ["disagreements"]
    assert (
        "differ on 63 of 400 texts of test. A bundle contains no texts of the data; my.work/report.html" in page.words()
    )
    rows = full_report()["disagreements"]
    page = written(tmp_path / "report.html", {"disagreeing": {**found, "shown": 1}, "disagreements": rows})
    assert "differ on 63 of 400 texts of test. The table shows the first 1." in page.words()
    assert "A bundle contains" not in page.words()
    none = {"count": 0, "texts": 400, "split": "test", "shown": 0, "shown_in": "my.work/report.html"}
    assert "my.work" not in written(tmp_path / "report.html", {"disagreeing": none}).words()


def test_a_report_replaces_the_old_one_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(KeyError):
        write_report(path, {"gates": [{"name": "no value"}]})
    with pytest.raises(UndefinedError):
        write_report(path, {"disagreeing": {"count": 1}})
    assert path.read_text() == "old"
    write_report(path, {"title": "lone surrogate \ud83d is survived"})
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_long_table_is_folded_away(tmp_path: Path) -> None:
    label = full_report()["per_label"][0]
    page = written(tmp_path / "report.html", {"per_label": [label] * 150})
    assert "All 150 labels" in page.texts


def test_the_markdown_table_has_a_row_per_candidate_and_workload(tmp_path: Path) -> None:
    timed = profile_document(("teacher", "in|t8"))
    figures = all_figures(timed)
    lines = markdown(figures.header, figures.rows).splitlines()
    assert len(lines) == 2 + 4
    assert lines[0].startswith("| candidate | batch | tokens | p50 ms | p90 ms | p99 ms |")
    assert "metric" not in lines[0]  # nobody has one
    assert lines[3] == (
        "| in\\|t8 | 1 | 16 | 10 | 11 | 12.5 | 100 | 2.00 [1.90, 2.12] | 1.5 kB | 1 | onnxruntime | fp32 |"
    )
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_a_curve_spans_its_points_and_leaves_out_what_is_not_finite() -> None:
    drawing = part("chart", curve([[0, 1.0], [50, float("nan")], [100, 3.0]], "loss"))
    assert 'points="0.00,178.0 100.00,20.0"' in drawing
    assert curve([[0, float("inf")]], "loss") is None


def test_a_curve_of_many_steps_is_thinned_and_keeps_its_last_point() -> None:
    drawing = part("chart", curve([[step, 1 / (step + 1)] for step in range(10_000)], "loss"))
    points = re.findall(r"[\d.]+\.\d\d,[\d.]+", drawing)
    assert len(points) <= 402
    assert points[-1].startswith("100.00,")


def test_numbers_are_set_right_and_words_left() -> None:
    made = table(("name", ["a", "b"]), ("value", ["1.5 MB", None]), ("word", ["fp32", "8 bit"]), ("none", [None, None]))
    page = Page(part("grid", made))
    assert page.tables == [[["name", "value", "word"], ["a", "1.5 MB", "fp32"], ["b", "–", "8 bit"]]]
    assert [attributes.get("class") for tag, attributes in page.tags if tag == "td"] == ["number", "text"] * 2


def test_values_read_as_a_person_would_write_them() -> None:
    assert [number(value) for value in (1234.4, 12.345, 0.00123, 0.0, float("nan"))] == [
        "1,234",
        "12.3",
        "0.00123",
        "0",
        "nan",
    ]
    assert [size(value) for value in (3_200_000_000, 91_000_000, 12, None)] == ["3.2 GB", "91 MB", "12 B", None]
    facts = Page(part("facts", {"a_b": {"c": None, "d": True, "e": 0.12345, "f": [1, "<b>"], "g": []}}))
    assert facts.words() == "a b c – d yes e 0.123 f 1; <b> g –"
