"""`stillroom capacity` by its command line, on a report with known times."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from timed_report import timed_report

import stillroom
from serve.errors import BadInput


def capacity(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stillroom", "capacity", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    (tmp_path / "report.json").write_text(json.dumps(timed_report(crowded=1.3)), encoding="utf-8")
    return tmp_path


def test_machines_are_enough_and_one_less_is_not(report: Path) -> None:
    done = capacity(
        report,
        "--rate",
        9000,
        "--p99-ms",
        20,
        "--headroom",
        0,
        "--price-per-core-hour",
        0.05,
        "--queries",
        2000,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    told = capacity(report, "--rate", 900, "--queries", 1000)
    assert "900 texts a second within 50 ms at p99 need 1 machine of 2 cores with student ORT int8" in " ".join(
        told.stdout.split()
    )
    sizes = document["sizes"]
    assert [size["processes"] for size in sizes] == [1, 2]
    assert sizes[0]["holds_per_s"] < sizes[1]["holds_per_s"] < 2.2 * sizes[0]["holds_per_s"]
    assert all(size["p99_ms"] <= 20 for size in sizes)
    each = sizes[-1]["holds_per_s"]
    assert (document["machines"] - 1) * each < 9000 <= document["machines"] * each
    assert document["cores"] == 2 * document["machines"]
    assert document["one_lost"] == document["machines"] + 1
    assert document["p99_ms"] <= 20
    assert document["price_per_hour"] == pytest.approx(document["cores"] * 0.05)
    assert document["price_per_million"] == pytest.approx(document["price_per_hour"] / 32.4, rel=1e-3)
    spare = stillroom.capacity(report / "report.json", 9000, p99_ms=20, queries=2000, headroom=0.5)
    assert spare["machines"] >= 2 * document["machines"] - 1
    slower = stillroom.capacity(report, 9000, p99_ms=20, queries=2000, front_us=400)
    assert slower["sizes"][-1]["holds_per_s"] < each


def test_a_machine_of_more_cores_has_more_fronts_and_says_what_is_assumed(report: Path) -> None:
    document = stillroom.capacity(report, 9000, cores=8, queries=1000)
    assert "8 cores as fast as the 2 that were measured" in " ".join(document["assumptions"])
    assert [(size["processes"], size["fronts"]) for size in document["sizes"]] == [(1, 1), (2, 1), (4, 1), (8, 2)]
    four, eight = (size["holds_per_s"] for size in document["sizes"][2:])
    assert 1.3 * four < eight < 2 * four  # all cores at work are 1.3 times slower, half of them less


def test_what_cannot_be_told_is_said(report: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--p99-ms is 0\.1, and at any rate p99 is above it: one text alone takes"):
        stillroom.capacity(report, 100, p99_ms=0.1, queries=1000)
    (tmp_path / "text.json").write_text("no", encoding="utf-8")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    for path, reason in (
        (tmp_path / "missing", "cannot be read"),
        (tmp_path / "text.json", "is not JSON"),
        (tmp_path / "list.json", "is no report of `stillroom profile`"),
    ):
        done = capacity(path, "--rate", 10)
        assert done.returncode == 2
        assert reason in " ".join(done.stderr.split())


def test_no_process_is_lost_where_fronts_have_unequal_shares(report: Path) -> None:
    four, five = (
        next(
            size
            for size in stillroom.capacity(report, 100, cores=cores, queries=1000)["sizes"]
            if size["processes"] == cores
        )
        for cores in (4, 5)
    )
    assert (four["fronts"], five["fronts"]) == (1, 2)
    assert five["holds_per_s"] > four["holds_per_s"]
    assert five["cores_busy"] <= 5


def test_a_notebook_can_ask(report: Path) -> None:
    async def cell() -> float:
        return float(stillroom.capacity(report, 100, queries=1000)["p50_ms"])

    assert asyncio.run(cell()) == stillroom.capacity(report, 100, queries=1000)["p50_ms"]
