"""`run` within a latency budget: which student to train, and whether the one that was made meets the budget."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress import distributed
from compress.engine.resumable_stages import Workdir
from latency.measure.machine import MachineFacts
from latency.measure.result_document import ProfileDocument
from serve.errors import BadInput, GateMissed
from stillroom.commands.run.export_and_scores import budget_tokens
from stillroom.console import bar, say
from stillroom.inputs.preflight import RunInputs
from stillroom.inputs.recipe import Recipe, read_recipe
from stillroom.settings.search import MOST_TRIALS, TRIAL_STEPS
from stillroom.student_search.search import Limits, search_students

AUTO = "auto"
SEARCH = "search"  # the folder of the search in that of the run's stages
INT8 = "student ORT int8"


class BudgetMissed(GateMissed):
    """The bundle's int8 student is slower than the budget."""


def check_budget(recipe: Recipe) -> None:
    """Check that the settings about a budget go together.

    Raises:
        BadInput: they do not.
    """
    if recipe.student == AUTO:
        if not recipe.budget_ms:
            raise BadInput("--student auto needs --budget-ms: the milliseconds that a call of the student may take.")
        if recipe.max_minutes:
            raise BadInput(
                "--max-minutes cannot be planned before the student is known. Leave it out with --student auto, whose short trainings "
                "--search-minutes bounds, or find the student with `stillroom search` first."
            )
        if recipe.teacher_labels or recipe.start not in ("spread", "random"):
            raise BadInput(
                "--student auto tries students that start from the teacher's layers or at random. Leave --teacher-labels and --start "
                "out, or name a student."
            )
        if distributed.count() > 1:
            raise BadInput("--student auto runs in one process. Find the student with `stillroom search` first.")
    if recipe.budget_ms and not recipe.latency_seconds:
        raise BadInput("--budget-ms is checked by timing the student. Give --latency-seconds above 0.")


def limits_of(inputs: RunInputs) -> Limits:
    """What the search may take, by the recipe."""
    recipe = inputs.recipe
    assert recipe.budget_ms
    return Limits(
        recipe.budget_ms, recipe.percentile, budget_tokens(inputs), MOST_TRIALS, TRIAL_STEPS, recipe.search_minutes,
        0.5 if recipe.soft_weight is None else recipe.soft_weight,
    )  # fmt: skip


def found_students(
    inputs: RunInputs, teacher: Callable[[], tuple[Path, str]], machine: MachineFacts
) -> tuple[list[str], dict[str, Any]]:
    """The students to train, the best first, each faster than the one before it; and the search that found them.

    Raises:
        BadInput: no student meets the budget.
    """
    work = Workdir(inputs.workdir.root / SEARCH)
    with bar("latency") as shown:
        found = search_students(inputs, teacher, work, limits_of(inputs), machine, say, shown)
    if not found["chosen"]:
        raise BadInput(
            f"None of the {len(found['trials'])} students that were tried meets --budget-ms {inputs.recipe.budget_ms:g} when it is "
            "measured. Give a larger budget, or run again on a machine without other work."
        )
    first = next(i for i, row in enumerate(found["trials"]) if row["student"] == found["chosen"])
    students, fastest_ms = [], float("inf")
    for row in found["trials"][first:]:
        if row["predicted_ms"] < fastest_ms:
            students.append(row["student"])
            fastest_ms = row["predicted_ms"]
    return students, found


def student_of_bundle(out: Path) -> str:
    """The student of the bundle in `out`, which a run with --student auto made; empty where that cannot be read."""
    try:
        return str(read_recipe(out / "recipe.toml").get("student", ""))
    except BadInput:
        return ""


def check_met(inputs: RunInputs, latency: ProfileDocument, report: Path) -> None:
    """Check the measured latency of the int8 student against the budget, if there is one.

    `report` is the file that the message names.

    Raises:
        BudgetMissed: it is slower.
    """
    recipe = inputs.recipe
    if not recipe.budget_ms:
        return
    tokens = budget_tokens(inputs)
    row = next(
        each
        for each in latency["candidates"]
        if each["name"] == INT8 and each["batch"] == 1 and each["tokens"] == tokens
    )
    measured_ms = row["p50_ms"] if recipe.percentile == 50 else row["p99_ms"]
    said = f"p{recipe.percentile} of {measured_ms:.3g} ms on {tokens} tokens, and the budget is {recipe.budget_ms:g} ms"
    if measured_ms > recipe.budget_ms:
        raise BudgetMissed(
            f"The int8 student {inputs.shape} has {said}. Give a smaller --student, a larger --budget-ms, fewer --tokens or more "
            f"--threads. Report: {report}."
        )
    say(f"budget met: {said}")
