from typing import Any

from read_page import Page

from stillroom.report.comparison_page import markdown, page

ROW: dict[str, Any] = {
    "student": "3x384",
    "start": "spread",
    "teacher_layer": None,
    "distill_tokens": None,
    "label_learning_rate": 6e-4,
    "diverged_rates": [],
    "label_rates": [
        {"learning_rate": 2e-4, "validation": 0.4, "seconds": 90.0},
        {"learning_rate": 6e-4, "validation": 0.55, "seconds": 90.0},
    ],
    "choice_seconds": 90.0,
    "mean": 0.5,
    "low": 0.4,
    "high": 0.6,
    "less_labels": None,
    "plain_tokens": 1_000_000,
    "standard_deviation": None,
    "seconds": 60,
    "peak_memory_bytes": 1_000_000,
}


def document(method: str) -> dict[str, Any]:
    """What `compare` finds of `method` and one more."""
    losses = {"relations": {"steps": 100, "first": [2.5, 2.7], "last": [0.4, 0.5]}}
    less = {"value": 0.0123, "low": 0.003, "high": 0.02, "supported": True}
    one = ROW | {
        "method": method,
        "losses": losses,
        "doubts": [f"{method}: the loss did not fall"],
        "less_labels": less,
    }
    return {
        "teacher": {"value": 0.95, "low": 0.93, "high": 0.97},
        "metric": "entity_f1",
        "best": {
            "method": method,
            "student": "3x384",
            "start": "spread",
            "teacher_layer": None,
            "distill_tokens": None,
            "seed": 2,
        },
        "settings": {"teacher": method, "data": method, "methods": [method], "seeds": 3},
        "rows": [one, one | {"method": "labels", "doubts": [], "less_labels": None, "standard_deviation": 0.012}],
    }


def test_a_name_with_a_bar_stays_one_cell_of_the_markdown_table() -> None:
    header, _, line = markdown({"rows": [ROW | {"method": "mine|yours"}]}).splitlines()
    assert line.startswith("| mine\\|yours | 3x384 | 0.5000 [0.4000, 0.6000] |")
    assert line.replace("\\|", "").count("|") == header.count("|")


def test_the_page_shows_the_table_its_chart_and_what_is_doubtful() -> None:
    shown = Page(page(document("minilmv2")))
    assert shown.sections() == ["table", "means", "losses", "settings"]
    header, first, second = shown.tables[0]
    assert header == [
        "method",
        "student",
        "mean",
        "sd over seeds",
        "against labels",
        "plain text",
        "label rate",
        "validation by rate",
        "minutes",
        "peak memory",
    ]
    assert first == [
        "minilmv2",
        "3x384",
        "0.5000 0.4000 – 0.6000",
        "–",
        "+0.0123 +0.0030 – +0.0200",
        "1,000,000 tokens",
        "0.0006",
        "0.0002: 0.4000; 0.0006: 0.5500",
        "1.0",
        "1 MB",
    ]
    numbers = [attributes["class"] for tag, attributes in shown.tags if tag == "td"][:8]
    assert numbers == ["number"] * 8
    assert second[3:5] == ["0.0120", "–"]
    words = shown.words()
    assert "entity f1 on test, mean over 3 seeds. The teacher reaches 0.9500 [0.9300, 0.9700]." in words
    assert (
        "(label rate) is the best on validation with seed 0. The trainings that were not taken cost 3.0 minutes more"
        in words
    )
    assert "Best on validation: minilmv2, 3x384, seed 2." in words
    assert "Supported gains over labels: minilmv2, 3x384." in words
    lone = document("minilmv2")
    lone["rows"][0]["less_labels"] = {"value": 0.01, "low": 0.003, "high": 0.02, "supported": False}
    assert "No gain over labels is supported." in Page(page(lone)).words()
    assert "Warnings minilmv2: the loss did not fall" in words
    assert "relations steps 100 first 2.5 to 2.7 last 0.4 to 0.5" in words


def test_a_choice_of_several_values_names_its_rows_and_one_value_does_not() -> None:
    found = document("minilmv2")
    assert "spread" not in page(found)
    found["rows"] += [one | {"start": start, "teacher_layer": layer} for one, start, layer in (
        (found["rows"][0], "last", 11), (found["rows"][0], "last", 12), (found["rows"][1], None, None))]  # fmt: skip
    shown = Page(page(found))
    header, *rows = shown.tables[0]
    assert header[:4] == ["method", "student", "start", "teacher layer"]
    assert [row[2:4] for row in rows] == [["spread", "–"], ["spread", "–"], ["last", "11"], ["last", "12"], ["–", "–"]]
    assert "minilmv2, 3x384, last, teacher layer 12" in shown.words()
    assert "| minilmv2 | 3x384 | last | 12 |" in markdown(found)


def test_one_rate_was_no_choice_and_a_missed_gate_is_told() -> None:
    found = document("minilmv2")
    for row in found["rows"]:
        row |= {"label_rates": row["label_rates"][1:], "choice_seconds": 0}
    found["export"] = {"bundle": None, "report": "bundle.report.html"}
    words = Page(page(found)).words()
    assert "label rate" in words
    assert "validation by rate" not in words
    assert "not taken" not in words
    assert "No bundle was written, because a gate was missed: bundle.report.html says which." in words
