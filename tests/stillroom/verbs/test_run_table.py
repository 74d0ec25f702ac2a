"""What ends a run on the screen."""

import json
from pathlib import Path
from typing import Any

import pytest

from stillroom.console import results
from stillroom.verbs.run import show_run


def write_report(out: Path, *, doubts: list[str]) -> dict[str, Any]:
    """A bundle's report.json of two candidates, the second with `doubts`; what `run` returns of it."""
    row = {"batch": 1, "tokens": 16, "p50_ms": 24.6, "p90_ms": 30.0, "p99_ms": 40.0, "texts_per_s": 40.0}
    document = {
        "metric_name": "entity_f1, test",
        "summary": [{"name": "teacher", "metric": 0.9, "low": 0.8, "high": 0.95, "size_bytes": 1_000}],
        "claims": [],
        "latency": {
            "machine": {"cpu": "Some CPU", "cores": 2},
            "candidates": [
                {**row, "name": "teacher torch fp32", "doubts": []},
                {**row, "name": "student ORT int8", "doubts": doubts, "p50_ms": 51.9},
            ],
            "ratios": [
                {
                    "a": "teacher torch fp32", "b": "student ORT int8", "batch": 1, "tokens": 16,
                    "ratio": 2.4, "low": 2.2, "high": 2.6,
                }
            ],
        },
    }  # fmt: skip
    out.mkdir()
    (out / "report.json").write_text(json.dumps(document), encoding="utf-8")
    return {
        "bundle": str(out),
        "speedup": 2.4,
        "speedup_interval": [2.2, 2.6],
        "speedup_tokens": 16,
        "speedup_over": "teacher",
        "minutes": 1.0,
        "report": str(out / "report.html"),
        "report_with_texts": str(out.with_name(f"{out.name}.work") / "report.html"),
    }


def shown(document: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(results, "width", 300)
    show_run(document)
    return capsys.readouterr().out


def test_a_run_says_what_narrows_the_intervals_of_its_timings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt = (
        "Times varied by more than 10\N{NO-BREAK SPACE}% within 1 of 2 timings: close other programs and time again "
        "for narrower intervals."
    )
    doubted = write_report(tmp_path / "doubted", doubts=["drifted", "wide spread"])
    assert doubt in shown(doubted, capsys, monkeypatch)
    sure = write_report(tmp_path / "sure", doubts=[])
    assert "narrower" not in shown(sure, capsys, monkeypatch).replace(str(tmp_path), "")


def test_the_speed_ups_of_a_run_are_said_to_be_no_quotients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = shown(write_report(tmp_path / "made", doubts=[]), capsys, monkeypatch)
    table, note = said.index("2.4x [2.2, 2.6]"), said.index("differ from quotients of the p50 column")
    assert table < note < said.index("The int8 student is")


def test_a_run_names_the_report_of_its_bundle_and_the_one_with_texts_while_it_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = write_report(tmp_path / "made", doubts=[])
    said = shown(document, capsys, monkeypatch)
    assert f"Report  {tmp_path / 'made' / 'report.html'}\n" in said
    assert f"{tmp_path / 'made.work' / 'report.html'} shows texts of the data, and is not part of the bundle\n" in said
    without = shown({**document, "report_with_texts": None}, capsys, monkeypatch)
    assert "made.work" not in without
