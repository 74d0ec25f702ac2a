"""`stillroom run`: from a teacher to a bundle, stage by stage.

A rerun skips finished stages, and a changed input repeats exactly the stages that depend on it (`stages.py`).
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress import distributed
from compress.runs.hardware import same_bits
from compress.runs.input_summary import log_inputs
from compress.runs.resumable_stages import Workdir
from compress.runs.stages import check_same_inputs
from compress.settings import AUTO
from export.packing.builder import DOCUMENTED
from export.packing.writer import clear_leftovers
from latency.measure.machine import machine_facts
from serve.bundle.manifest import MANIFEST, canonical_json
from serve.errors import BadInput, BundleError
from serve.files import replacing
from serve.tasks import open_bundle
from stillroom.console import say
from stillroom.inputs.preflight import RunInputs, prepare, timed_tokens, work_of
from stillroom.inputs.recipe import Recipe, read_recipe
from stillroom.report.pages import page_or
from stillroom.settings import MOST_TRIALS, SOFT_WEIGHT, TRIAL_STEPS
from stillroom.verbs.run.report import INT8, MODELS, REPORT, read_json, write_bundle
from stillroom.verbs.run.stages import BudgetMissed, Run
from stillroom.verbs.run.time_budget import Plan, timed_plan

SEARCH = "search"  # the folder of the search in that of the run's stages
MISSED = "missed.json"  # in it: students that were trained in full and too slow, with their time and what decided it


def run(recipe: Recipe) -> dict[str, Any]:
    """Make the bundle that `recipe` describes, if it is not there already; the document that `--json` prints.

    Raises:
        BadInput: all faults of the inputs, in one message, before any training.
        GateMissed: the student missed a gate or the latency budget; the report is written, the bundle is not.
    """
    started = time.monotonic()
    machine = machine_facts()  # before any work, which would count as load of the machine
    check_budget(recipe)
    if recipe.student != AUTO:
        return _run(prepare(recipe), started, machine)
    out = Path(os.path.abspath(recipe.out))
    if (out / MANIFEST).is_file():
        try:
            student = str(read_recipe(out / "recipe.toml")["student"])
        except (BadInput, KeyError):
            raise BadInput(
                f"--out {out} holds a bundle that `run` did not make. Remove it, or give another folder."
            ) from None
        return _run(prepare(replace(recipe, student=student), auto=True), started, machine)
    students, found = _found(recipe, machine)
    missed: list[dict[str, Any]] = []
    for student in students:
        inputs = prepare(replace(recipe, student=student), auto=True)
        inputs.found = found | {"missed": missed, "shipped": student if missed else None}
        decided_by = Run(inputs, machine).fingerprints["latency"]
        before = missed_before(inputs.workdir.root).get(student, {})
        if before.get("fingerprint") == decided_by:
            missed.append({"student": student, "measured_ms": before["measured_ms"]})
            continue
        try:
            return _run(inputs, started, machine)
        except BudgetMissed as fault:
            say(fault.message)
            kept = inputs.workdir.root / SEARCH / MISSED
            kept.parent.mkdir(parents=True, exist_ok=True)
            late = {student: {"measured_ms": fault.measured_ms, "fingerprint": decided_by}}
            with replacing(kept) as beside:
                beside.write_bytes(canonical_json(missed_before(inputs.workdir.root) | late))
            missed.append({"student": student, "measured_ms": fault.measured_ms})
    each = ", ".join(f"{one['student']} {one['measured_ms']:.3g} ms" for one in missed)
    raise BudgetMissed(
        f"No student meets --budget-ms {recipe.budget_ms:g} after its training: {each}. Give a larger budget; or, if other programs slowed "
        f"them down, remove {work_of(out) / SEARCH / MISSED} and run again.",
        missed[-1]["measured_ms"],
    )


def _found(recipe: Recipe, machine: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The students for --student auto, see `found_students`; the teacher is the one that the run will use."""
    from stillroom.student_search.space import own_shape

    inputs = prepare(replace(recipe, student=own_shape(recipe.teacher, recipe.revision)))
    same_bits(inputs.recipe.threads)
    if inputs.gives_answers_alone:
        raise BadInput(
            f"--student auto needs a teacher that can be opened, and {recipe.teacher} can only be asked. Name a student."
        )
    run = Run(inputs, machine)
    with inputs.workdir.locked():
        return found_students(inputs, lambda: (run.make("teacher")["teacher"], run.fingerprints["teacher"]), machine)


def _run(inputs: RunInputs, started: float, machine: dict[str, Any]) -> dict[str, Any]:
    """The bundle of a named student; see `run`."""
    same_bits(inputs.recipe.threads)
    run = Run(inputs, machine)
    out = Path(os.path.abspath(inputs.recipe.out))
    check_same_inputs(inputs.recipe, inputs.contents)
    distributed.join(inputs.recipe.device)
    if distributed.broadcast((out / MANIFEST).is_file()):
        distributed.only_main()
        return _already_there(out, run.fingerprints["bundle"])
    _say_understood(inputs)
    with inputs.workdir.locked(run.fingerprints["student"]):
        run.make()
        assert run.model_report
        clear_leftovers(out)
        searched_s = sum(row["seconds"] for row in run.inputs.found["trials"]) if run.inputs.found else 0.0
        worked_s = sum(run.inputs.workdir.seconds.values()) + searched_s  # earlier calls included
        minutes = round(max(worked_s, time.monotonic() - started) / 60, 2)
        write_bundle(out, run.inputs, run.folders, run.report, run.model_report, minutes)
    return _result(out)


def plan_of(recipe: Recipe) -> Plan:
    """What `run` would do and how long it would take, from a few timed steps; nothing is trained or kept.

    Raises:
        BadInput: as `run`.
    """
    check_budget(recipe)
    if recipe.student == AUTO:
        raise BadInput("--dry-run needs a named student; `stillroom search` finds one for a budget.")
    inputs = prepare(recipe)
    same_bits(inputs.recipe.threads)
    told, plan = _say_understood(inputs), timed_plan(inputs, Run(inputs).stages)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    return dataclasses.replace(plan, understood=told, warnings=(*inputs.warnings, *plan.warnings))


def _say_understood(inputs: RunInputs) -> dict[str, Any]:
    """Prints how the inputs were understood, and warnings about them; returns the former as data."""
    recipe = inputs.recipe
    steps: dict[str, int] = {}
    # With a budget they are known once steps were timed.
    if not recipe.max_minutes:
        steps = {"teacher": inputs.teacher_steps, "student": inputs.student_steps}
    return log_inputs(inputs, steps, say)


def _already_there(out: Path, run_fingerprint: str) -> dict[str, Any]:
    """The result of an earlier run.

    Raises:
        BadInput: `out` is a bundle of another recipe.
    """
    try:
        bundle = open_bundle(out)
    except BundleError as fault:
        raise BadInput(
            f"--out {out} holds a damaged bundle: {fault.message} Remove it, and this command makes it again."
        ) from None
    if bundle.manifest.lineage.get("run") != run_fingerprint:
        raise BadInput(f"--out {out} holds a bundle of other inputs or settings. Remove it, or give another folder.")
    say(f"{out} is already the bundle of this command; every file of it was verified.")
    return _result(out)


def _result(out: Path) -> dict[str, Any]:
    """The `--json` document, from the bundle's report and manifest."""
    report = read_json(out / "report.json")
    metrics = open_bundle(out).manifest.metrics
    # The p50 of the torch teacher, or without a teacher that is a model of the student in torch, over that of the shipped variant.
    ratios = [row for row in report["latency"]["ratios"] if row["b"] == INT8 and row["batch"] == 1]
    speed = min(ratios, key=lambda row: row["tokens"])
    values = {row["name"]: row["metric"] for row in report["summary"]}
    with_texts = page_or(work_of(out) / REPORT, "report.json")
    return {
        "bundle": str(out),
        "metric": metrics["metric"],
        "method": report["choice"]["method"],
        **{name: values.get(name) for name in MODELS},
        "speedup": speed["ratio"],
        "speedup_interval": [speed["low"], speed["high"]],
        "speedup_tokens": speed["tokens"],
        "speedup_over": speed["a"].partition(" ")[0],
        "minutes": report["minutes"],
        "understood": report["understood"],
        "report": str(page_or(out / REPORT, "report.json")),
        "report_with_texts": str(with_texts) if with_texts.is_file() else None,
        **{key: report[key] for key in DOCUMENTED},
    }


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
    inputs: RunInputs, teacher: Callable[[], tuple[Path, str]], machine: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """The students to train, the best first, each faster than the one before it; and the search that found them.

    Raises:
        BadInput: no student meets the budget.
    """
    from stillroom.student_search.search import search_students
    from stillroom.student_search.trials import Limits

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


def missed_before(work: Path) -> dict[str, dict[str, Any]]:
    """By student: the time and the fingerprint of those that missed the budget in earlier calls of a run with the stages `work`."""
    try:
        found: dict[str, dict[str, Any]] = json.loads((work / SEARCH / MISSED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
