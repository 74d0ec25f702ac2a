from typing import Any

from read_page import HOSTILE, Page

from stillroom.report.comparison_page import markdown, page

ROW: dict[str, Any] = {
    "student": "3x384",
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
    less = {"value": 0.0123, "low": 0.003, "high": 0.02}
    one = ROW | {
        "method": method,
        "losses": losses,
        "doubts": [f"{method}: the loss did not fall"],
        "less_labels": less,
    }
    return {
        "teacher": {"value": 0.95, "low": 0.93, "high": 0.97},
        "metric": "entity_f1",
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
        "1.0",
        "1 MB",
    ]
    numbers = [attributes["class"] for tag, attributes in shown.tags if tag == "td"][:6]
    assert numbers == ["number"] * 6
    assert second[3:5] == ["0.0120", "–"]
    words = shown.words()
    assert "entity f1 on test, mean over 3 seeds. The teacher reaches 0.9500 [0.9300, 0.9700]." in words
    assert "Warnings minilmv2: the loss did not fall" in words
    assert "relations steps 100 first 2.5 to 2.7 last 0.4 to 0.5" in words


def test_hostile_text_stays_text() -> None:
    shown = Page(page(document(HOSTILE)))
    assert not {tag for tag, _ in shown.tags} & {"script", "img"}
    assert not [name for _, attributes in shown.tags for name in attributes if name.startswith("on")]
    assert HOSTILE in shown.texts
    assert len(shown.tags) == len(Page(page(document("plain"))).tags)
