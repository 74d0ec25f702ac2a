"""What is shown of work under way where there is no terminal, and of names that would drive one."""

import json
from pathlib import Path

import pytest
from in_process import command
from lookup_bundles import city_table, write_bundle

from compress import Event
from stillroom import console
from stillroom.console import FIRST_UNITS, Bar, show


def test_the_time_left_is_shown_once_a_few_units_are_done(capfd: pytest.CaptureFixture[str]) -> None:
    shown = Bar("latency")
    shown(0, 100)
    shown.started -= 60.0
    for done in (1, FIRST_UNITS - 1, FIRST_UNITS):
        shown.printed -= 60.0
        shown(done, 100, "grid")
    first, second, third = capfd.readouterr().err.splitlines()
    assert first.strip() == "latency: 1/100, 0.0/s, grid"
    assert "left" not in second
    assert third.endswith("min left")


def test_reports_of_a_library_become_lines_and_bars(capfd: pytest.CaptureFixture[str]) -> None:
    for event in (
        Event("started", "relations"),
        Event("advanced", "relations", 1, 8, "loss 0.5"),
        Event("message", "half of it"),
        Event("started", "relations"),  # again, before the first has ended: two calls in two threads
        Event("finished", "relations"),
        Event("advanced", "relations", 2, 8),
        Event("finished", "relations"),
    ):
        show(event)
    assert "half of it" in capfd.readouterr().err


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A bundle whose names clear a terminal, and set its title; C1 of ISO 6429 is in it too."""
    table = city_table()
    return write_bundle(
        tmp_path / "hostile", table, name="a\x1b[2J\x9b2J\u202eb", labels=["O", "B-\x1b]0;t\x07", "I-\x9b"]
    )


def test_control_characters_in_names_do_not_reach_the_terminal(hostile: Path) -> None:
    code, out, said = command("inspect", hostile)
    assert code == 0
    assert (out + said).replace("\n", "").isprintable()
    as_json = command("inspect", hostile, "--json").out
    assert as_json.replace("\n", "").isprintable()
    assert json.loads(as_json)["name"] == "a\x1b[2J\x9b2J\u202eb"
    (hostile / "a\x1b[2J\x9b.json").touch()
    code, _, said = command("inspect", hostile)
    assert code == 2
    assert r"a\x1b[2J\x9b.json is not in the manifest" in said
    assert said.isprintable()


def test_tables_and_bars_escape_names_and_keep_the_blanks_and_joiners_of_scripts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    console.table("\x1b[2J", ["\x1b[2J"], [["[/b]\x1b[2J"], ["5\xa0%\u202f\u200d"]])
    console.say("\x1b[2J\rsaid")
    bar = Bar("\x1b[2J")
    bar(0, 10)
    bar.started -= 60.0
    bar.printed -= 60.0
    bar(1, 10, "\x1b[2J")
    captured = capfd.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert r"[/b]\x1b[2J" in captured.out
    assert "5\xa0%\u202f\u200d" in captured.out
    assert r"\x1b[2J\rsaid" in captured.err
