"""What is shown of work under way where there is no terminal."""

import pytest

from stillroom.console import FIRST_UNITS, Bar


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
