"""The page of `explain`: what it shows, that only its own script runs, and how a person moves in it."""

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import Tab, browsing
from read_page import HOSTILE, Page

from stillroom.report.explain_page import cluster_table, layer_table, page, sentences

TOKENS = ["[CLS]", "where", "is", HOSTILE, "[SEP]"]
ARROW_RIGHT, END = 39, 35


def weights(heads: int, seed: int) -> list[str]:
    """The attention of each head: a token gives the next one 200 of 255, less one a head, and the rest is spread by chance."""
    chance, found = np.random.default_rng(seed), []
    for head in range(heads):
        rows = chance.integers(0, 20, size=(len(TOKENS), len(TOKENS)), dtype=np.uint8)
        rows[np.arange(len(TOKENS)), (np.arange(len(TOKENS)) + 1) % len(TOKENS)] = 200 - head
        found.append(base64.b64encode(rows.tobytes()).decode())
    return found


def document(heads: bool = True) -> dict[str, Any]:
    """What `explain` finds of two models, whose heads are compared one by one or not."""
    text = {"text": f"where is {HOSTILE}", "attention": 0.5, "teacher_answer": "status", "student_answer": HOSTILE}
    layers = {"attention": 0.25, "attention_by_head": [0.5, 0.75] if heads else None, "value_relation": 0.125}
    return {
        "teacher": {"name": HOSTILE, "layers": 6, "heads": 2, "width": 32},
        "student": {"name": "small", "layers": 3, "heads": 2, "width": 24},
        "texts": 200, "texts_in_data": 4000, "tokens": 3000, "truncated": 1, "max_length": 128, "relation_heads": 4,
        "layers": [{"teacher_layer": 2 * i, "student_layer": i} | layers for i in (1, 2, 3)],
        "span_clusters": {
            "spans": 100, "unlabelled_spans": 20, "labels": ["NP"], "clusters": 2, "teacher": [0.4, 0.3, 0.2, 0.1, 0.1, 0.1],
            "student": [0.5, 0.4, 0.3],
        },
        "answers": {"task": "text-classification", "differing_texts": 30, "differing": [text]},
        "most_different": [text, {"text": "Lisbon", "attention": 0.1, "teacher_answer": [[0, 6, "city"]], "student_answer": []}],
        "settings": {"data": HOSTILE, "seed": 0, "text_column": ""},
    }  # fmt: skip


def shown(student_heads: int = 2) -> list[dict[str, Any]]:
    pairs = [
        {
            "teacher_layer": 2 * i, "student_layer": i, "attention": 0.25, "token": 1,
            "weights": {"teacher": weights(2, seed=i), "student": weights(student_heads, seed=10 + i)},
        }
        for i in (1, 2, 3)
    ]  # fmt: skip
    return [{"text": f"where is {HOSTILE}", "attention": 0.5, "cut": False, "tokens": TOKENS, "pairs": pairs}]


def explained() -> str:
    """The page of a text with long tokens."""
    return page(document(), shown())


def test_tables_leave_out_heads_that_cannot_be_compared_one_by_one() -> None:
    assert layer_table(document()).rows[0] == ["teacher 2, student 1", "0.2500", "0.6250", "0.5000", "0.7500", "0.1250"]
    without = layer_table(document(heads=False))
    assert without.rows[0] == ["teacher 2, student 1", "0.2500", "0.1250"]


def test_clusters_have_a_row_per_layer_and_what_was_left_out_is_said() -> None:
    clusters = cluster_table(document())
    assert clusters
    assert clusters.rows[2:4] == [["3", "0.2000", "0.3000"], ["4", "0.1000", None]]
    left_out = document() | {"span_clusters": {"left_out": "the data gives none"}}
    assert cluster_table(left_out) is None
    assert sentences(left_out) == ["The data gives none.", "The models answer differently on 30 of 200 texts."]
    assert "Left out: the data gives none." in Page(page(left_out, [])).words()


def test_a_reader_finds_every_part_and_texts_stay_text() -> None:
    read = Page(explained())
    assert read.sections() == ["layers", "clusters", "attention", "texts", "answers", "settings"]
    assert not {tag for tag, _ in read.tags} & {"img", "link", "iframe", "object"}
    assert [attributes for tag, attributes in read.tags if tag == "script"] == [{}]
    said = read.words()
    assert "200 of 4,000 texts with 3,000 tokens, 1 of them cut after 128 tokens" in said
    assert "city: Lisbon" in said
    assert "The table has the 1 of them" in said
    assert "text column" not in said


def test_no_script_runs_but_the_page_s_own_and_nothing_is_fetched() -> None:
    made = explained()
    (script,) = re.findall(r"<script>(.*?)</script>", made, re.DOTALL)
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'\"" in made
    assert "http:" not in made
    assert "https:" not in made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browsing(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


SAYS = "[...document.querySelectorAll('details[open] .says')].map((each) => each.textContent)"
WEIGHTS = """[...document.querySelectorAll('details[open] .side')]
    .map((side) => [...side.querySelectorAll('.token')].map((each) => each.style.getPropertyValue('--weight')))"""


def opened(browser: Tab, tmp_path: Path, made: str) -> None:
    (tmp_path / "explain.html").write_text(made, encoding="utf-8")
    browser.open((tmp_path / "explain.html").as_uri())
    assert browser.problems == []


def test_a_token_shows_where_it_attends_in_both_models(browser: Tab, tmp_path: Path) -> None:
    opened(browser, tmp_path, explained())
    # It begins at the token that differs most. The mean of 200 and 199 of 255 goes to the next token.
    teacher, student = browser.evaluate(SAYS)
    assert teacher.startswith("where → is 78 %, ")
    assert student.startswith("where → is 78 %, ")
    assert [side[2] for side in browser.evaluate(WEIGHTS)] == ["100%", "100%"]
    at = browser.evaluate(
        "(() => { const box = document.querySelector('.token').getBoundingClientRect(); return [box.x + 3, box.y + 3 + scrollY]; })()"
    )
    browser.evaluate(f"scrollTo(0, {at[1]} - 100)")
    where = {"x": at[0], "y": at[1] - browser.evaluate("scrollY")}
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", **where)
    browser.wait_for(f"{SAYS}[1].startsWith('[CLS] → where 78 %')")
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    browser.wait_for(f"{SAYS}[0].startsWith('where → is 78 %')")


def test_arrow_keys_move_along_the_tokens(browser: Tab, tmp_path: Path) -> None:
    opened(browser, tmp_path, explained())
    browser.evaluate("document.querySelector('.token[tabindex=\"0\"]').focus()")
    browser.press("ArrowRight", code=ARROW_RIGHT)
    assert browser.evaluate(SAYS)[1].startswith(f"is → {HOSTILE} 78 %")
    browser.press("End", code=END)
    browser.press("ArrowRight", code=ARROW_RIGHT)  # there is none further
    assert browser.evaluate(SAYS)[0].startswith("[SEP] → [CLS] 78 %")
    # One token of each model's line can be reached by Tab.
    assert browser.evaluate("document.querySelectorAll('details[open] .token[tabindex=\"0\"]').length") == 2


@pytest.mark.parametrize(("heads", "other"), [(2, "2"), (3, "0")], ids=["as many heads", "other heads"])
def test_a_head_is_chosen_in_both_models_if_they_have_as_many(
    heads: int, other: str, browser: Tab, tmp_path: Path
) -> None:
    opened(browser, tmp_path, page(document(), shown(heads)))
    browser.evaluate(
        "(() => { const choice = document.querySelector('select'); choice.value = '2'; choice.dispatchEvent(new Event('change')); })()"
    )
    assert browser.evaluate("document.querySelectorAll('details[open] select')[1].value") == other
    # A head of its own: 199 of 255 in the second head.
    weights = browser.evaluate("attention(document.querySelector('.side'), 1, 2, 5)[2]")
    assert weights == pytest.approx(199 / 255)


def test_what_is_folded_away_is_drawn_once_it_is_opened(browser: Tab, tmp_path: Path) -> None:
    opened(browser, tmp_path, explained())
    folded = "document.querySelectorAll('#attention details')[2]"
    assert browser.evaluate(f"{folded}.querySelector('.says').textContent") == ""
    browser.evaluate(f"{folded}.open = true")
    browser.wait_for(f"{folded}.querySelector('.says').textContent.startsWith('where → is 78 %')")
