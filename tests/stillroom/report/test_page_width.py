"""Pages in a real browser: nothing is wider than its page, on a desk and on a phone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Tab, browsing
from synthetic_profile import synthetic_profile
from test_comparison_page import document as comparison
from test_explain_page import explained
from test_run_page import full_report

from stillroom.report import benchmark_page, search_page, transfer_page
from stillroom.report.comparison_page import page
from stillroom.report.profile_page import profile_page
from stillroom.report.run_page import report_page


def found_document() -> dict[str, Any]:
    """A search of 24 students, the second of which was chosen."""
    score = {"value": 0.9123, "low": 0.9012, "high": 0.9234}
    rows = [
        {
            "student": f"layers={1 + i % 6},hidden=384,heads=12,ffn={512 + 32 * i}", "layers": 1 + i % 6, "hidden": 384, "heads": 12,
            "ffn": 512 + 32 * i, "parameters": 16_000_000 + i, "predicted_ms": 1.0 + 0.1 * i, "measured_ms": 1.25 if i < 2 else None,
            "validation": {name: value - 0.01 * i for name, value in score.items()},
            "minus_chosen": None if i == 1 else {"value": -0.01, "low": -0.02, "high": 0.001}, "on_front": i % 3 == 1, "seconds": 61.0,
        }
        for i in range(24)
    ]  # fmt: skip
    return {
        "chosen": rows[1]["student"], "budget_ms": 1.3, "percentile": 50, "tokens": 55, "threads": 1, "metric": "entity_f1",
        "teacher": {"name": "a teacher", "validation": 0.93}, "considered": 228, "fitting": 120, "trial_steps": 200, "sampler": "tpe",
        "trials": rows,
        "papers": [{"student": "3x384", "predicted_ms": 1.04, "meets": True}],
        "latency_model": {
            "measured_at": "2026-11-27T02:24:00Z", "students": 26, "errors": {"median": 0.006, "worst": 0.013, "students": 6},
            "ms_by_operator": {"feed-forward": 4.1e-07}, "p99_over_p50": 1.32,
        },
        "command": f"stillroom run --teacher {'a/long/path/' * 12}teacher --student {rows[1]['student']}",
        "machine": {"cpu": "AMD EPYC", "cores": 2},
    }  # fmt: skip


def benchmarked() -> dict[str, Any]:
    """Scores on XNLI's fifteen languages beside two rows of the papers."""
    languages = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
    row = {
        "metric": "accuracy",
        "mean": 0.7123,
        "standard_deviation": 0.0012,
        "seeds": [0.71, 0.72],
        "learning_rate": 5e-5,
        "epochs": 5.0,
    }
    published = {"suite": "xnli", "shape": "3x384", "source": "a paper", "scores": dict.fromkeys(languages, 60.0)}
    return {
        "model": {"name": "student", "shape": "3x384"}, "suite": "xnli", "grid": "one", "seeds": 2,
        "rows": [{"task": language, **row} for language in languages],
        "published": [{**published, "model": name} for name in ("MiniLMv2", "a teacher with a rather long name")],
        "not_run": [], "warnings": ["XNLI/train.tsv: 1 row was left out"], "machine": {"cpu": "AMD EPYC", "cores": 2},
    }  # fmt: skip


def transferred() -> dict[str, Any]:
    """Four sources with long names on four targets."""
    score = {"value": 0.9123, "low": 0.9012, "high": 0.9234, "seeds": [0.91, 0.92]}
    minus = {"value": -0.0123, "low": -0.0212, "high": 0.0034, "supported": False, "seeds": [-0.01, 0.01]}
    sources, targets = (
        [f"questions-of-customers-{i}" for i in range(4)],
        [f"messages-of-{i}" for i in range(4)],
    )
    task = {"task": "token-classification", "labels": 39, "texts": {"train": 13_084}, "metric": "entity_f1"}
    cells = {target: {"validation": score, "test": score, "seeds": [0.91, 0.92]} for target in targets}
    rows = [
        {
            "source": source, "cells": cells, "mean": {"validation": score, "test": score},
            "minus_none": minus if source else None, "minus_chosen": None if source == sources[0] else minus,
        }
        for source in (*sources, None)
    ]  # fmt: skip
    points = [
        {"labels": n, "all": n == 13_084, "with_source": score, "without": score, "difference": minus}
        for n in (10, 50, 100, 500, 13_084)
    ]
    return {
        "student": "layers=2,hidden=192,heads=12,ffn=768", "method": "xtremedistil-transfer", "seeds": 2, "chosen": sources[0],
        "sources": [{"name": name, "left_out": 3, "teacher_validation": 0.9, **task} for name in sources],
        "targets": [{"name": name, **task} for name in targets],
        "table": rows, "curves": [{"target": target, "metric": "entity_f1", "points": points} for target in targets],
        "mean_differences": [{"labels": 10, **minus}, {"labels": None, **minus}],
        "seconds": {"teacher": 1.0}, "settings": {"seeds": 2, "labels": [10, 50]}, "machine": {"cpu": "AMD EPYC", "cores": 2},
    }  # fmt: skip


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
    "search": lambda: search_page.page(found_document()),
    "benchmark": lambda: benchmark_page.page(benchmarked()),
    "transfer": lambda: transfer_page.page(transferred()),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browsing(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desk-light", "phone-dark"])
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
