"""`run` within a latency budget: which student to train, and whether the one that was made meets the budget."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress import distributed
from compress.runs.resumable_stages import Workdir
from compress.settings import AUTO
from latency.measure.machine import MachineFacts
from latency.measure.result_document import ProfileDocument
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput, GateMissed
from serve.files import replacing
from stillroom.inputs.preflight import RunInputs, timed_tokens
from stillroom.inputs.recipe import Recipe, read_recipe
from stillroom.settings import MOST_TRIALS, SOFT_WEIGHT, TRIAL_STEPS
from stillroom.student_search.search import Limits, search_students
from stillroom.verbs.run.report import INT8

SEARCH = "search"  # the folder of the search in that of the run's stages
MISSED = "missed.json"  # in it: students that were trained in full and too slow, with their time and what decided it


class BudgetMissed(GateMissed):
    """The int8 student is slower than the budget."""

    def __init__(self, message: str, measured_ms: float) -> None:
        super().__init__(message)
        self.measured_ms = measured_ms


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


def found_students(
    inputs: RunInputs, teacher: Callable[[], tuple[Path, str]], machine: MachineFacts
) -> tuple[list[str], dict[str, Any]]:
    """The students to train, the best first, each faster than the one before it; and the search that found them.

    Raises:
        BadInput: no student meets the budget.
    """
    recipe = inputs.recipe
    assert recipe.budget_ms
    limits = Limits(
        recipe.budget_ms, recipe.percentile, timed_tokens(inputs, recipe.tokens), MOST_TRIALS, TRIAL_STEPS, recipe.search_minutes,
        SOFT_WEIGHT if recipe.soft_weight is None else recipe.soft_weight,
    )  # fmt: skip
    found = search_students(inputs, teacher, Workdir(inputs.workdir.root / SEARCH), limits, machine)
    if not found["chosen"]:
        raise BadInput(
            f"None of the {len(found['trials'])} students that were tried meets --budget-ms {recipe.budget_ms:g} when it is measured. "
            "Give a larger budget, or run again on a machine without other work, which times the trained ones again."
        )
    first = next(i for i, row in enumerate(found["trials"]) if row["student"] == found["chosen"])
    students, fastest_ms = [], float("inf")
    for row in found["trials"][first:]:
        if row["predicted_ms"] < fastest_ms:
            students.append(row["student"])
            fastest_ms = row["predicted_ms"]
    return students, found


def student_of_bundle(out: Path) -> str:
    """The student of the bundle in `out`.

    Raises:
        BadInput: it was not made by `run`.
    """
    try:
        return str(read_recipe(out / "recipe.toml")["student"])
    except (BadInput, KeyError):
        raise BadInput(
            f"--out {out} holds a bundle that `run` did not make. Remove it, or give another folder."
        ) from None


def check_met(inputs: RunInputs, latency: ProfileDocument, report: Path) -> None:
    """Check the measured latency of the int8 student against the budget, if there is one.

    `report` is the file that the message names.

    Raises:
        BudgetMissed: it is slower.
    """
    recipe = inputs.recipe
    if not recipe.budget_ms:
        return
    tokens = timed_tokens(inputs, recipe.tokens)
    row = next(
        each
        for each in latency["candidates"]
        if each["name"] == INT8 and each["batch"] == 1 and each["tokens"] == tokens
    )
    measured_ms = row["p50_ms"] if recipe.percentile == 50 else row["p99_ms"]
    if measured_ms > recipe.budget_ms:
        raise BudgetMissed(
            f"The int8 student {inputs.shape} has p{recipe.percentile} of {measured_ms:.3g} ms on {tokens} tokens, and the budget is "
            f"{recipe.budget_ms:g} ms. Report: {report}.",
            measured_ms,
        )


def missed_before(work: Path) -> dict[str, dict[str, Any]]:
    """By student: the time and the fingerprint of those that missed the budget in earlier calls of a run with the stages `work`."""
    try:
        found: dict[str, dict[str, Any]] = json.loads((work / SEARCH / MISSED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def keep_missed(work: Path, student: str, measured_ms: float, decided_by: str) -> None:
    """Keeps that a student missed the budget; `decided_by` is the fingerprint of its timing."""
    (work / SEARCH).mkdir(parents=True, exist_ok=True)
    found = missed_before(work) | {student: {"measured_ms": measured_ms, "fingerprint": decided_by}}
    with replacing(work / SEARCH / MISSED) as beside:
        beside.write_bytes(canonical_json(found))
