from stillroom.report.comparison_page import HEADER, markdown

ROW = {
    "student": "3x384",
    "mean": 0.5,
    "low": 0.4,
    "high": 0.6,
    "less_none": None,
    "standard_deviation": None,
    "seconds": 60,
    "peak_memory_bytes": 1_000_000,
}


def test_a_name_with_a_bar_stays_one_cell_of_the_markdown_table() -> None:
    *_, line = markdown({"rows": [ROW | {"method": "mine|yours"}]}).splitlines()
    assert line.startswith("| mine\\|yours | 3x384 | 0.5000 |")
    assert line.replace("\\|", "").count("|") == len(HEADER) + 1
