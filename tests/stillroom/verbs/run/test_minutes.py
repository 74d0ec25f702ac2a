"""`--max-minutes`: how it is shared, and over a whole run, in which two timings decide the steps and what was cut is told."""

from pathlib import Path

import pytest

from compress.runs.stages import Cost, RunStage
from serve.errors import GateMissed
from stillroom.inputs.preflight import RunInputs
from stillroom.inputs.recipe import Recipe
from stillroom.verbs.run import time_budget
from stillroom.verbs.run.pipeline import run
from stillroom.verbs.run.time_budget import (
    PLAIN_TEXT,
    REST,
    SHARES,
    STUDENT,
    TEACHER,
    UNDISTILLED,
    Plan,
    fitted,
    refitted,
)

NEEDED = {"teacher": "t", "task": "token-classification", "data": "d", "out": "o"}


def test_too_few_minutes_go_to_the_teacher_first_and_the_students_share_the_rest() -> None:
    def stages_of(*costs: Cost) -> list[RunStage]:
        return [RunStage(cost.listed_as, (), costs=(cost,)) for cost in costs]

    whole = Plan(teacher_steps=1000, distill_tokens=20_000, student_steps=4000, seconds={})
    rates = {"teacher step": 0.3, "student step": 0.1, "token": 0.01, "second": 1.0}
    undistilled = Cost(UNDISTILLED, "student step", lambda plan: plan.student_steps)
    others = (
        Cost(TEACHER, "teacher step", lambda plan: plan.teacher_steps),
        Cost(PLAIN_TEXT, "token", lambda plan: plan.distill_tokens),
        Cost(STUDENT, "student step", lambda plan: plan.student_steps),
        Cost(REST, "second", lambda _: 100.0),
    )
    stages = stages_of(*others, undistilled)
    # 300 s for the teacher, 200 s for plain text, 400 s each for labels alone and the student, and 100 s for the rest.
    assert fitted(whole, stages, rates, Recipe(**NEEDED)).minutes == pytest.approx(1400 / 60)
    assert not fitted(whole, stages, rates, Recipe(**NEEDED)).warnings
    half = fitted(whole, stages, rates, Recipe(**NEEDED, max_minutes=900 / 60))
    assert (half.teacher_steps, half.distill_tokens, half.student_steps) == (1000, 10_000, 2000)
    assert half.minutes == pytest.approx(900 / 60)
    assert len(half.warnings) == 1
    assert "2,000 of 4,000 steps" in half.warnings[0]
    # 300 s to train, of which students keep 30 %
    short = fitted(whole, stages, rates, Recipe(**NEEDED, max_minutes=400 / 60))
    assert (short.teacher_steps, short.student_steps) == (700, 360)
    assert "leaves the teacher 700 of 1,000 steps" in short.warnings[0]
    without = fitted(whole, stages_of(*others), rates, Recipe(**NEEDED))
    assert without.minutes == pytest.approx(1000 / 60)
    # Two shares of the soft labels are tried, each for a fifth of the student's steps: 2 x 80 s more.
    share = Cost(SHARES, "student step", lambda plan: plan.student_steps / 5)
    shares = stages_of(*others, undistilled, share, share)
    assert fitted(whole, shares, rates, Recipe(**NEEDED)).minutes == pytest.approx(1560 / 60)
    half = fitted(whole, shares, rates, Recipe(**NEEDED, max_minutes=900 / 60))
    assert half.minutes == pytest.approx(900 / 60, rel=0.01)
    # The teacher was to take 300 s and took 50: its 250 s go to the students, who have 750 of the 1000 s that they want.
    again = refitted(short, whole, stages, [], rates, Recipe(**NEEDED, max_minutes=900 / 60), spent_s=50.0)
    assert (again.teacher_steps, again.student_steps, again.distill_tokens) == (700, 3000, 15_000)
    assert "leaves the teacher 700 of 1,000 steps" in again.warnings[0]
    assert "leaves each student 3,000 of 4,000 steps" in again.warnings[1]
    enough = refitted(whole, whole, stages, [], rates, Recipe(**NEEDED, max_minutes=2000 / 60), spent_s=50.0)
    assert enough.student_steps == 4000
    assert not enough.warnings
    late = refitted(short, whole, stages, [], rates, Recipe(**NEEDED, max_minutes=900 / 60), spent_s=5000.0)
    assert late.student_steps == 400  # a tenth, however late it is


@pytest.mark.slow
def test_students_get_the_time_that_the_teacher_left_and_what_was_cut_is_told(
    tiny_teacher: Path, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
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
