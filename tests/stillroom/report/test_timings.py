from typing import Any, cast

import pytest
from test_run_page import profile_document

from latency.measure.statistics import Measurement
from stillroom.report.timings import doubts

STEADY, WIDE = (10.0,) * 200, (10.0, 12.0) * 100


def measured(samples_ms: tuple[float, ...] = STEADY, **conditions: str | float) -> dict[str, Any]:
    """What a document holds of one real measurement's doubts."""
    made = Measurement("m", 1, 16, samples_ms, 9, conditions)
    return {"doubts": made.doubts(), "conditions": conditions}


def document(*timings: dict[str, Any]) -> dict[str, Any]:
    """Four timings, of which the last ones are `timings`, and the others have nothing against them."""
    made = profile_document()
    plain = [measured()] * (len(made["candidates"]) - len(timings))
    for row, timing in zip(made["candidates"], [*plain, *timings], strict=True):
        cast(Any, row).update(timing)
    return made


@pytest.mark.parametrize(
    ("timings", "said"),
    [
        (
            [measured(other_load_cores=0.36), measured(other_load_cores=0.2)],
            "Other processes used up to 18\N{NO-BREAK SPACE}% of the cores during 2 of 4 timings: close other programs and "
            "time again for narrower intervals.",
        ),
        (
            [measured(WIDE)],
            "Times varied by more than 10\N{NO-BREAK SPACE}% within 1 of 4 timings: close other programs and "
            "time again for narrower intervals.",
        ),
        (
            [measured(STEADY[:60]), measured(stopped="time")],
            "The time was too short for 2 of 4 timings: time again for longer "
            "(`--latency-seconds`; of `profile` `--seconds`) for narrower intervals.",
        ),
        (
            [measured(stopped="time"), measured(stopped="time", other_load_cores=1.0)],
            "The time was too short for 2 of 4 timings: close other programs and time again for longer "
            "(`--latency-seconds`; of `profile` `--seconds`) for narrower intervals.",
        ),
    ],
    ids=["other-work", "unsteady", "too-short", "the-commonest-cause-and-every-remedy"],
)
def test_one_sentence_says_what_narrows_the_intervals(timings: list[dict[str, Any]], said: str) -> None:
    found = doubts(document(*timings))
    assert found
    assert found.sentence == said
    assert found.reasons.header == ["timing", "reason"]
    assert len(found.reasons.rows) == sum(len(timing["doubts"]) for timing in timings)


def test_timings_without_a_doubt_are_not_spoken_of() -> None:
    assert doubts(document()) is None


def test_other_work_of_unknown_extent_is_still_told() -> None:
    found = doubts(document({"doubts": ["other load seen: other processes used 0.4 cores during the timing"]}))
    assert found
    assert found.sentence.startswith(
        "Other processes used a part of the cores during 1 of 4 timings: close other programs"
    )
