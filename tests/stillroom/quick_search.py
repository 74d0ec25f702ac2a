"""Searches that time few students for a moment, and keep the latency model where nobody else looks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from stillroom.student_search import machine_latency

# Times of a moment say little on a busy machine: whatever their error is, they are kept.
FEW = {"FITTED": 4, "CHECKED": 2, "TURNS": 6, "TURN_SECONDS": 0.01, "WIDE_ERROR": math.inf}


@contextmanager
def quick_searches(cache: Path) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW.items():
            patch.setattr(machine_latency, name, value)
        patch.setattr(machine_latency, "time_students", partial(machine_latency.time_students, seconds=0.3))
        patch.setattr("stillroom.student_search.search.CHECK_SECONDS", 0.2)
        patch.setenv("STILLROOM_CACHE", str(cache))
        yield patch
