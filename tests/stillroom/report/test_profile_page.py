import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from read_page import Page, part
from synthetic_profile import synthetic_profile

from stillroom.report.charts import BOTTOM_PX, MOST_TICKS, linear_axis, log_axis, ticks
from stillroom.report.drawings import Chart
from stillroom.report.profile_charts import distribution, length_bins, lengths, pareto, roofline, server
from stillroom.report.profile_page import answer_lines, profile_markdown, profile_page

SECTIONS = ["answer", "models", "trade", "distribution", "length", "time", "roofline", "server", "grid", "threads"]
SECTIONS += ["costs", "doubts", "conditions"]
SHAPES = {"line", "rect", "circle", "polyline", "polygon", "text", "svg"}


def page_of(document: dict[str, Any]) -> Page:
    return Page(profile_page(document))


def drawn(chart: Chart | None) -> str:
    assert chart
    return part("chart", chart)


def changed(document: dict[str, Any], change: Callable[[Any], object]) -> dict[str, Any]:
    change(document)
    return document


def without(*keys: str) -> Callable[[Any], None]:
    """Takes `keys` out of every model of a document, and out of its costs."""

    def take(document: Any) -> None:
        for row in document["models"]:
            for key in keys:
                row.pop(key, None)
                row["cost"].pop(key, None)

    return take


def renamed(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The document with `name` wherever its second model, its work, its metric or its command is told."""
    text = json.dumps(document)
    for old in (document["models"][1]["name"], "snips/test.jsonl", "entity F1", "LayerNormalization", "layer 0"):
        text = text.replace(old, json.dumps(name)[1:-1])
    return json.loads(text)


def rows(page: Page, first: str = "model") -> list[list[str]]:
    """The rows of the main table, or of the first whose first column is `first`."""
    return next(table for table in page.tables if table[0][0] == first)[1:]


def test_the_page_answers_first_and_then_shows_everything_in_order() -> None:
    page = page_of(synthetic_profile())
    assert page.sections() == SECTIONS
    words = page.words()
    assert words.index("Budget met. Of the models whose p99 is at most 5 ms") < words.index("On the Pareto front of")
    assert "Other programs used 0.4 of the 2 cores" in words
    assert (
        "Times varied by more than 10 % within 15 of 30 timings: close other programs and time again "
        "for narrower intervals. The reasons"
    ) in words


def test_a_missed_budget_is_said_in_words() -> None:
    def miss(document: Any) -> None:
        document["budget"] |= {
            "best": None, "verdict": "missed", "sentence": "No model answers within 0.1 ms at p99.",
        }  # fmt: skip

    words = page_of(changed(synthetic_profile(), miss)).words()
    assert "Budget missed. No model answers within 0.1 ms at p99." in words
    assert "Budget met" not in words


def test_a_budget_that_is_perhaps_met_is_neither_green_nor_red_and_says_so_everywhere() -> None:
    document = changed(synthetic_profile(), lambda each: each["budget"].update(verdict="perhaps"))
    page = page_of(document)
    assert f"Budget perhaps met. {document['budget']['sentence']}" in page.words()
    answer = next(i for i, (tag, attributes) in enumerate(page.tags) if attributes.get("class") == "answer")
    assert page.tags[answer + 1] == ("strong", {"class": "perhaps"})
    assert answer_lines(document)[0] == f"Budget perhaps met. {document['budget']['sentence']}"
    assert profile_markdown(document).splitlines()[0].endswith(" Budget perhaps met.")


def test_members_of_the_front_are_marked_with_a_word() -> None:
    document = synthetic_profile()
    marked = [row[0] for row in rows(page_of(document)) if row[0].endswith("on the front")]
    assert marked == [
        f"{i + 1} {row['name']} on the front"
        for i, row in enumerate(document["models"])
        if row["name"] in document["front"]
    ]
    assert 0 < len(marked) < len(document["models"])


def test_the_main_table_has_each_figure_with_its_interval() -> None:
    page = page_of(synthetic_profile())
    student = rows(page)[4]
    assert student[0] == "5 student 3x384 ORT int8 on the front"
    assert student[1] == "0.9349 0.9218 – 0.9471"
    p50, low, high = re.fullmatch(r"([\d.]+) ([\d.]+) – ([\d.]+)", student[2]).groups()  # type: ignore[union-attr]
    assert float(low) < float(p50) < float(high)
    assert rows(page)[0][4] == "–"  # the first is what the speed-ups are over
    assert student[-2] == "17.8 MB"


def test_whole_answers_decide_the_speed_up_where_they_were_timed() -> None:
    def slower_alone(document: Any) -> None:
        for row in document["models"][1:]:
            row["single_stream"]["over_first"] = [3.25, 3.0, 3.5]

    document = changed(synthetic_profile(), slower_alone)
    table = rows(page_of(document))
    assert all("3.25" in row[4] for row in table[1:])
    assert any("3.25 times [3.00, 3.50]" in line and "from text to answer" in line for line in answer_lines(document))


def test_no_column_is_without_a_value() -> None:
    document = changed(synthetic_profile(), without("price_per_million", "server", "metric", "peak_share"))
    header = page_of(document).tables[0][0]
    assert header[:3] == ["model", "p50 ms", "p99 ms"]
    for made in (document, synthetic_profile()):
        for header, *body in page_of(made).tables:
            for i, name in enumerate(header):
                assert {row[i] for row in body} - {"–"}, name


@pytest.mark.parametrize("wrong", [math.nan, 0.0, math.inf])
def test_what_is_no_number_is_not_drawn(wrong: float) -> None:
    document: Any = synthetic_profile(samples=40)
    for row in document["models"][1:3]:
        row["single_stream"] |= {"p50_ms": wrong, "samples": [[9.0, wrong, wrong, wrong]] * 40}
        row["single_stream"]["parts_ms"]["run"] = wrong
        row["server"]["trials"][0]["p99_ms"] = wrong
        row["cost"] |= {"gflop_per_s": wrong, "bytes_per_text": wrong}
        row["metric"]["value"] = wrong
    document["candidates"][0]["p50_ms"] = wrong
    document["peaks"]["bf16_gflop_per_s"] = wrong
    shapes = [attributes for tag, attributes in page_of(document).tags if tag in SHAPES]
    assert len(shapes) > 100
    told = " ".join(f"{value}" for attributes in shapes for key, value in attributes.items() if key != "aria-label")
    assert not re.findall(r".{30}\b(?:nan|inf).{20}", told)


def test_every_plot_has_one_mark_for_each_model() -> None:
    document = synthetic_profile(models=8)
    assert len(re.findall(r'<circle class="(?:fill|hollow) c\d d\d" cx="[\d.]+%"', drawn(pareto(document)))) == 8
    for draw in (distribution, lengths, server):
        made = drawn(draw(document))
        assert len(re.findall(r'<polyline class="series c\d d\d"', made)) == 8
        assert len(set(re.findall(r'<polyline class="series (c\d d\d)"', made))) == 8
        assert len(set(re.findall(r'<polyline class="series c\d (d\d)"', made))) == 5  # told apart without colours too
    filled = re.findall(r'<circle class="fill c\d d\d" cx="[\d.]+%"', drawn(roofline(document)))
    assert len(filled) == 8
    for draw in (pareto, distribution, lengths, roofline, server):
        legend = [
            item for item in Page(drawn(draw(document))).texts if item in {row["name"] for row in document["models"]}
        ]
        assert legend == [row["name"] for row in document["models"]]


def test_a_better_model_is_drawn_higher_and_a_faster_one_further_left() -> None:
    made = drawn(pareto(synthetic_profile(models=8)))
    marks = re.findall(r'<circle class="(?:fill|hollow) c(\d) d\d" cx="([\d.]+)%" cy="([\d.]+)"', made)
    places = {int(model): (float(x), float(y)) for model, x, y in marks}
    teacher, student, smallest = places[0], places[4], places[7]
    assert smallest[0] < student[0] < teacher[0]
    assert teacher[1] < student[1] < smallest[1]  # pixels count from the top


def test_the_budget_stands_where_it_is_and_is_named() -> None:
    document = synthetic_profile()
    made = drawn(pareto(document))
    assert "budget 5 ms, p99" in made
    line = re.search(r'<line class="guide" x1="([\d.]+)%"', made)
    tick = re.search(r'<text x="([\d.]+)%" y="[\d.]+" text-anchor="middle">5</text>', made)
    assert line
    assert tick
    assert line[1] == tick[1]
    assert "budget" not in drawn(pareto(changed(document, lambda each: each.pop("budget"))))


@pytest.mark.parametrize(
    ("gone", "section"),
    [
        (lambda each: each.pop("sweep"), "threads"),
        (lambda each: each.pop("peaks"), "roofline"),
        (without("server"), "server"),
        (without("flops_per_text"), "roofline"),
        (lambda each: each.update(candidates=[], ratios=[]), "grid"),
        (lambda each: [row["cost"].clear() for row in each["models"]], "costs"),
        (lambda each: [row["single_stream"].update(samples=[]) for row in each["models"]], "length"),
    ],
)
def test_what_was_not_measured_leaves_no_empty_heading(gone: Callable[[Any], object], section: str) -> None:
    text = profile_page(changed(synthetic_profile(samples=60), gone))
    page = Page(text)
    assert section not in page.sections()
    assert set(page.sections()) < set(SECTIONS)
    assert not re.search(r"</h[23]>\s*(</section>|<h[23])", text)


def test_without_a_metric_the_page_says_how_to_get_one() -> None:
    document = changed(synthetic_profile(), without("metric"))
    document["front"] = []
    words = page_of(document).words()
    assert "Give --data with labels to plot the metric against latency" in words
    assert "Pareto" not in words


def test_an_older_document_still_makes_a_page() -> None:
    from test_run_page import profile_document

    page = page_of(profile_document())
    assert page.sections() == ["answer", "grid", "doubts", "conditions"]
    assert "Fastest at batch 1, 16 tokens: int8, 10 ms at the median. That is 2.00 times [1.90, 2.12]" in page.words()
    assert not {"p95 ms", "device"} & {name for table in page.tables for name in table[0]}
    assert profile_markdown(profile_document()).split("\n\n")[1].startswith("| candidate | batch |")


def test_one_model_alone_is_compared_with_nothing() -> None:
    page = page_of(synthetic_profile(models=1))
    assert "One text at a time: teacher torch fp32" in page.words()
    assert "Pareto front of" not in page.words()
    assert "speed-up" not in page.tables[0][0]


def test_eight_models_with_two_thousand_samples_make_a_small_page() -> None:
    document = synthetic_profile(models=8, samples=2000)
    assert len(profile_page(document).encode()) < 400_000
    curves = re.findall(r'<polyline class="series c\d d\d" points="([^"]+)"', drawn(distribution(document)))
    assert all(100 < len(curve.split()) <= 200 for curve in curves)


def test_a_curve_ends_at_the_slowest_text() -> None:
    document: Any = synthetic_profile(models=1, samples=50)
    document["models"][0]["single_stream"]["samples"] = [[5.0, 0.0, float(ms), 0.0] for ms in range(1, 101)]
    found = re.search(r'points="([^"]+)"', drawn(distribution(document)))
    assert found
    points = [tuple(map(float, point.split(","))) for point in found[1].split()]
    assert points == sorted(points, key=lambda point: (point[0], -point[1]))
    assert points[-1][1] == pytest.approx(BOTTOM_PX - 270 / 1.03, abs=0.1)  # all of them
    middle = next(x for x, y in points if y <= BOTTOM_PX - 0.5 / 1.03 * 270)
    assert middle == pytest.approx(
        100 * math.log(50.5 * 1.2) / math.log(100 * 1.44), abs=1.5
    )  # 4 % of room at each end


def test_texts_of_one_length_stay_in_one_bin() -> None:
    document: Any = synthetic_profile(models=1, samples=30)
    timed = document["models"][0]["single_stream"]
    timed["samples"] = [[float(tokens), 0.1, tokens / 10, 0.1] for tokens in [4] * 50 + [9] * 3 + [30] * 20]
    bins = length_bins(timed)
    assert [one.tokens for one in bins] == [4.0, 30.0]  # too few of 9 for a bin of their own
    assert [one.p50_ms for one in bins] == [0.4, 3.0]


def test_the_markdown_has_a_row_for_each_model_and_each_cell_of_the_grid() -> None:
    document = renamed(synthetic_profile(models=4), "a|b")
    _, main, grid, _ = profile_markdown(document).split("\n\n")
    assert len(main.splitlines()) == 2 + 4
    assert len(grid.splitlines()) == 2 + 4 * 4
    assert main.splitlines()[3].startswith("| a\\|b | yes | 0.9409 [0.9278, 0.9531] |")
    for table in (main, grid):
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1


def test_the_markdown_can_be_read_where_it_is_pasted() -> None:
    document = synthetic_profile(models=4)
    above, _, _, below = profile_markdown(document).split("\n\n")
    assert above == (
        "`stillroom profile`: 4 models · 300 texts of snips/test.jsonl · 2026-11-22 · Intel(R) Xeon(R) Processor, 2 cores · "
        "torch 2.13.0, onnxruntime 1.31.1. Budget met."
    )
    for said in ("front: no other model", "doubts: the number", "95 % intervals", "paired turn by turn"):
        assert said in below
    assert below.count("\n") == 1

    def alone(document: Any) -> None:
        del document["front"], document["budget"]
        document["ratios"] = []

    above, *_, below = profile_markdown(changed(document, alone)).split("\n\n")
    assert "Budget" not in above
    assert "front" not in below
    assert "paired" not in below


def test_the_lines_for_the_screen_say_what_the_page_says_first() -> None:
    document = synthetic_profile()
    lines = answer_lines(document)
    assert lines[0] == f"Budget met. {document['budget']['sentence']}"
    assert lines[1].startswith(
        "On the Pareto front of entity F1 and median latency: student 3x384 ORT int8 (0.9349 at "
    )
    assert lines[2].startswith("Fastest on one text: student 3x384 ORT int8, ")
    assert "times [" in lines[2]
    assert lines[-2] == "Warning: Other programs used 0.4 of the 2 cores while this ran; the times are upper bounds."
    assert lines[-1].startswith(
        "Times varied by more than 10\N{NO-BREAK SPACE}% within 15 of 30 timings: close other programs"
    )
    words = page_of(document).words()
    assert all(" ".join(line.removeprefix("Warning: ").replace("`", "").split()) in words for line in lines)


def test_all_conditions_stand_on_the_page() -> None:
    words = page_of(synthetic_profile()).words()
    for said in (
        "stillroom profile teacher teacher.bundle",
        "300 texts of snips/test.jsonl",
        "avx512_vnni",
        "other load cores",
    ):
        assert said in words, said


@pytest.mark.parametrize(("low", "high"), [(0.4, 300.0), (1.2, 1.9), (3.0, 3.0), (1e-3, 1e6), (8.0, 41.0)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    for axis in (log_axis("ms", [low, high]), linear_axis("F1", [low, high])):
        found = ticks(axis)
        assert 2 <= len(found) <= MOST_TICKS + 1
        assert all(axis.low <= value <= axis.high for value, _ in found)
        assert len({text for _, text in found}) == len(found)
