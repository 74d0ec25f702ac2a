"""`--max-minutes` over a whole run: two timings decide the steps, and what was cut is told."""

from pathlib import Path

import pytest

from serve.errors import GateMissed
from stillroom.inputs.preflight import RunInputs
from stillroom.inputs.recipe import Recipe
from stillroom.verbs.run import time_budget
from stillroom.verbs.run.pipeline import run


@pytest.mark.slow
def test_students_get_the_time_that_the_teacher_left_and_what_was_cut_is_told(
    tiny_teacher: Path,
    task_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # A step of the student seems to take twice as long at first as it does once the teacher is trained.
    others = {"teacher step": 0.25, "text": 0.0, "second": 1 / 105}  # one second for what does not train
    timings = [others | {"student step": student} for student in (0.1, 0.05)]
    asked: list[RunInputs] = []

    def timed(inputs: RunInputs) -> dict[str, float]:
        asked.append(inputs)
        return timings[len(asked) - 1]

    monkeypatch.setattr(time_budget, "timed_rates", timed)
    recipe = Recipe(
        teacher=str(tiny_teacher), task="token-classification", data=str(task_data), out=str(tmp_path / "bundle"), max_minutes=1.0,
        latency_seconds=0,
        teacher_epochs=40, student_epochs=125, teacher_learning_rate=5e-3, student_learning_rate=1e-7, soft_weight=0.5, threads=1,
        student="layers=1,hidden=32,heads=4,ffn=32",
    )  # fmt: skip
    with pytest.raises(GateMissed) as missed:  # at this rate the student learns nothing, which spares the timing
        run(recipe)
    assert missed.value.document is not None
    cut = [warning for warning in missed.value.document["warnings"] if warning.startswith("--max-minutes 1 leaves")]
    assert len(cut) == 2
    # Of 59 s the students keep 30 %, so the teacher has 41.3 s at 0.25 s a step.
    assert "leaves the teacher 165 of 320 steps" in cut[0]
    steps = int(cut[1].partition("leaves each student ")[2].partition(" of 1,000 steps")[0])
    # The teacher's steps really take milliseconds, so most of the 59 s is left, at 0.05 s a step of two trainings. The first timing left
    # 17.7 s, or 88 steps.
    assert 300 <= steps <= 590
    assert f"the student on labels alone: {steps} steps" in capfd.readouterr().err
    with pytest.raises(GateMissed) as again:  # there is no third timing, which would fail
        run(recipe)
    assert again.value.document == missed.value.document
