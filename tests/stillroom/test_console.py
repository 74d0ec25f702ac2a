"""What is shown of work under way where there is no terminal."""

import pytest

from compress import Event
from stillroom.console import FIRST_UNITS, Bar, show


def test_what_is_left_is_not_told_after_the_first_units(capfd: pytest.CaptureFixture[str]) -> None:
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
