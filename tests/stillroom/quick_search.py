"""Searches that time few students for a second, and keep the latency model where nobody else looks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stillroom.student_search import machine_latency

FEW = {"FITTED": 4, "CHECKED": 2, "SECONDS": 1.0, "TURNS": 6, "TURN_SECONDS": 0.01}


@contextmanager
def quick_searches(cache: Path) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW.items():
            patch.setattr(machine_latency, name, value)
        patch.setattr("stillroom.student_search.search.CHECK_SECONDS", 0.2)
        patch.setenv("STILLROOM_CACHE", str(cache))
        yield patch
