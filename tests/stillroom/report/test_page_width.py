"""Pages in a real browser: nothing is wider than its page, on a desk and on a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Tab, browsing
from synthetic_profile import synthetic_profile
from test_comparison_page import document as comparison
from test_explain_page import explained
from test_run_page import full_report

from stillroom.report.comparison_page import page
from stillroom.report.profile_page import profile_page
from stillroom.report.run_page import report_page

# What is cut or hangs over, with everything that is folded away opened.
OVERHANGING = """
(() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  const all = [document.documentElement, ...document.querySelectorAll("table, pre, .scroll, figure, p, dl")];
  return all.filter((each) => each.scrollWidth > each.clientWidth + 1 || each.getBoundingClientRect().right > innerWidth)
    .map((each) => `${each.tagName} ${each.className}: ${each.scrollWidth} of ${each.clientWidth}: ${each.textContent.slice(0, 60)}`);
})()
"""


def run_page() -> str:
    """A report of seven models by four shapes, as a run with both runtimes writes it."""
    report = full_report("text-classification")
    report["latency"] = synthetic_profile(models=7)
    search = [
        {"product": f"/encoder/layer.{i}/attention/self/query/MatMul", "share": 0.9991, "divergence": 6e-5}
        for i in range(30)
    ]
    agreement = {
        "share": 1.0,
        "labels_changed_per_10k": 13.2,
        "answers_changed": 2,
        "spans_changed": 3,
        "divergence": 6.2e-5,
    }
    report |= {
        "agreement": {"fp32": agreement, "int8 openvino": agreement},
        "search": {"tried": [{"weight_bits": 7, "clipped": True, "verdict": search[0]}], "repaired": search, "costs": search},
        "fusions": {"student fp32 onnxruntime": {"attention": 3, "bias-gelu": 3, "layer-normalization": 7, "matmul-nbits": 2}},
        "recipe": f"teacher = \"{'/a/long/path' * 12}\"\nseed = 0",
        "per_label": [{"label": "SearchScreeningEvent", "support": 120, "teacher": 0.9, "student": 0.8, "int8": 0.8}] * 30,
        "disagreements": [{"text": "word " * 60, "teacher": "SearchCreativeWork 0.55", "student": "x" * 60, "gold": "PlayMusic"}] * 3,
    }  # fmt: skip
    return report_page(report)


PAGES = {
    "run": run_page,
    "profile": lambda: profile_page(synthetic_profile(models=8)),
    "comparison": lambda: page(comparison("minilmv2")),
    "explain": explained,
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browsing(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_its_page(name: str, width: int, dark: bool, browser: Tab, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.html"
    file.write_text(PAGES[name](), encoding="utf-8")
    browser.open(file.as_uri(), width=width, dark=dark)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate(OVERHANGING) == []
    assert browser.problems == []


def test_text_in_charts_keeps_its_size_on_a_phone(browser: Tab, tmp_path: Path) -> None:
    file = tmp_path / "profile.html"
    file.write_text(profile_page(synthetic_profile()), encoding="utf-8")
    browser.open(file.as_uri(), width=390)
    heights = """[...document.querySelectorAll("svg text")]
        .map((each) => parseFloat(getComputedStyle(each).fontSize) * each.getScreenCTM().a)"""
    assert browser.evaluate(f"Math.min(...{heights})") >= 12
