"""`stillroom run`: from a teacher to a bundle, stage by stage.

A rerun skips finished stages, and a changed input repeats exactly the stages that depend on it (`stage_fingerprints.py`).
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from compress import distributed
from compress.data.batches import TaskText
from compress.runs import task_stages
from compress.runs.agreement import check_same_inputs, contents_of
from compress.runs.hardware import same_bits
from compress.runs.lineage import read_lineage
from compress.runs.method_runner import MethodInputs, asks_words, fit_head, run_method
from compress.runs.soft_labels import make_soft_labels, save_answers
from compress.runs.understood import understood, understood_lines
from compress.settings import AUTO
from export.packing.builder import DOCUMENTED, ModelReport
from export.packing.writer import clear_leftovers
from latency.measure.machine import MachineFacts, machine_facts
from latency.measure.result_document import ProfileDocument
from serve.bundle.manifest import MANIFEST, canonical_json
from serve.errors import BadInput, BundleError
from serve.tasks import open_bundle
from stillroom.commands.run import export_and_scores
from stillroom.commands.run.stage_fingerprints import ANSWERS, STUDENTS_PLAN, fingerprints
from stillroom.commands.run.teacher_answers import make_answers, with_teachers_answers
from stillroom.commands.run.time_budget import Plan, full_plan, students_plan, timed_plan
from stillroom.commands.run.within_budget import (
    MISSED,
    SEARCH,
    BudgetMissed,
    check_budget,
    check_met,
    found_students,
    keep_missed,
    missed_before,
    student_of_bundle,
)
from stillroom.console import say
from stillroom.inputs.preflight import TRIMMED, RunInputs, prepare, work_of
from stillroom.inputs.recipe import Recipe
from stillroom.report.pages import page_or
from stillroom.report.run_page import write_report
from stillroom.student_search.space import own_shape


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
        return _run(prepare(replace(recipe, student=student_of_bundle(out)), auto=True), started, machine)
    students, found = _found(recipe, machine)
    missed: list[dict[str, Any]] = []
    for student in students:
        inputs = prepare(replace(recipe, student=student), auto=True)
        inputs.found = found | {"missed": missed, "shipped": student if missed else None}
        decided_by = fingerprints(inputs)["latency"]
        before = missed_before(inputs.workdir.root).get(student, {})
        if before.get("fingerprint") == decided_by:
            missed.append({"student": student, "measured_ms": before["measured_ms"]})
            continue
        try:
            return _run(inputs, started, machine)
        except BudgetMissed as fault:
            say(fault.message)
            keep_missed(inputs.workdir.root, student, fault.measured_ms, decided_by)
            missed.append({"student": student, "measured_ms": fault.measured_ms})
    each = ", ".join(f"{one['student']} {one['measured_ms']:.3g} ms" for one in missed)
    raise BudgetMissed(
        f"No student meets --budget-ms {recipe.budget_ms:g} after its training: {each}. Give a larger budget; or, if other programs slowed "
        f"them down, remove {work_of(out) / SEARCH / MISSED} and run again.",
        missed[-1]["measured_ms"],
    )


def _found(recipe: Recipe, machine: MachineFacts) -> tuple[list[str], dict[str, Any]]:
    """The students for --student auto, see `found_students`; the teacher is the one that the run will use."""
    inputs = prepare(replace(recipe, student=own_shape(recipe.teacher, recipe.revision)))
    same_bits(inputs.recipe.threads)
    if inputs.gives_answers_alone:
        raise BadInput(
            f"--student auto needs a teacher that can be opened, and {recipe.teacher} can only be asked. Name a student."
        )
    stage_fingerprints = fingerprints(inputs)

    def teacher() -> tuple[Path, str]:
        return _make_teacher(inputs, stage_fingerprints, full_plan(inputs)), stage_fingerprints["teacher"]

    with inputs.workdir.locked():
        return found_students(inputs, teacher, machine)


def _run(inputs: RunInputs, started: float, machine: MachineFacts) -> dict[str, Any]:
    """The bundle of a named student; see `run`."""
    same_bits(inputs.recipe.threads)
    stage_fingerprints = fingerprints(inputs)
    out = Path(os.path.abspath(inputs.recipe.out))
    check_same_inputs(inputs.recipe, contents_of(inputs))
    distributed.join(inputs.recipe.device)
    if distributed.broadcast((out / MANIFEST).is_file()):
        distributed.only_main()
        return _already_there(out, stage_fingerprints["bundle"])
    _say_understood(inputs)
    with inputs.workdir.locked(stage_fingerprints["student"]):
        plan = _planned(inputs, stage_fingerprints)
        if inputs.answering:
            inputs = _asked(inputs, stage_fingerprints)
        folders = _train(inputs, stage_fingerprints, plan)
        inputs.workdir.alone()
        scores, model_report = _evaluate(inputs, stage_fingerprints, folders, machine)
        folders["latency"] = _stage(
            inputs,
            "latency",
            stage_fingerprints,
            lambda f: export_and_scores.make_latency(f, inputs, folders, model_report.scores["test"], machine),
            "timing teacher and student, in turns" if "teacher" in folders else "timing the student",
        )
        latency = cast(ProfileDocument, export_and_scores.read_json(folders["latency"] / "latency.json"))
        report = export_and_scores.report_of(inputs, folders, scores, model_report, machine, latency)
        written = write_report(inputs.workdir.root / export_and_scores.REPORT, report)
        try:
            check_met(inputs, latency, written)
        except BudgetMissed:
            shutil.rmtree(folders["latency"])  # so that the same command times it again
            raise
        clear_leftovers(out)
        export_and_scores.write_bundle(out, inputs, folders, report, model_report, _minutes(inputs, started))
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
    told, plan = _say_understood(inputs), timed_plan(inputs)
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
    told = understood(inputs, steps)
    for line in understood_lines(told):
        say(line)
    for line in inputs.answered.lines if inputs.answered else ():
        say(line)
    for warning in inputs.warnings:
        say(f"warning: {warning}")
    return told


def _asked(inputs: RunInputs, stage_fingerprints: dict[str, str]) -> RunInputs:
    """`inputs` with the answers of the teacher that can only be asked."""
    assert inputs.answering
    folder = _stage(
        inputs,
        ANSWERS,
        stage_fingerprints,
        lambda f: make_answers(f, inputs),
        f"{inputs.answering.public_name} answers all texts",
    )
    try:
        found = with_teachers_answers(inputs, folder)
    except BadInput:
        inputs.workdir.alone()  # ends the other processes, which wait for the next stage
        raise
    assert found.answered
    for line in found.answered.lines:
        say(f"  {line}")
    return found


def _train(inputs: RunInputs, stage_fingerprints: dict[str, str], plan: Plan) -> dict[str, Path]:
    """Runs every stage that ends in a checkpoint; their folders by name."""
    folders: dict[str, Path] = {}
    teacher = None
    if not inputs.gives_answers_alone:
        folders["teacher"] = teacher = _make_teacher(inputs, stage_fingerprints, plan)
    plan = _planned_students(inputs, stage_fingerprints, plan)
    folders["start"] = _stage(
        inputs,
        "start",
        stage_fingerprints,
        lambda f: _make_start(f, inputs, teacher),
        f"student {inputs.shape} from {'the teacher' if teacher else inputs.opened.public_name}",
    )
    start = folders["start"]
    student_inputs = inputs.read_by(start)
    if cut := student_inputs.train.truncated - inputs.train.truncated:
        length = f"longer than {inputs.max_length} tokens with the trimmed vocabulary"
        warning = f"{cut:,} more texts of train are {length}; the rest of them is not read."
        say(f"warning: {warning}")
        inputs.warnings.append(warning)
    labels_only = inputs.chain.method == "labels"
    if inputs.recipe.undistilled or labels_only:
        folders["undistilled"] = _stage(
            inputs,
            "undistilled",
            stage_fingerprints,
            _with_vocabulary_of(
                start, lambda f: task_stages.make_undistilled(f, student_inputs, start, plan.student_steps)
            ),
            f"the student on labels alone: {plan.student_steps} steps",
        )
    if not labels_only:
        _distil(inputs, stage_fingerprints, folders, plan)
    folders["student"] = _stage(
        inputs,
        "student",
        stage_fingerprints,
        lambda f: task_stages.make_choice(f, inputs, teacher, folders.get("distilled"), folders.get("undistilled")),
        "the student that ships, by validation",
    )
    say(f"  {read_lineage(folders['student'])['choice']['why']}")
    if inputs.recipe.keep_words_of and not inputs.recipe.vocabulary_size:
        chosen = folders["student"]
        folders["student"] = _stage(
            inputs,
            "trimmed",
            stage_fingerprints,
            lambda f: export_and_scores.make_trimmed(f, inputs, chosen),
            "the vocabulary of the student that ships",
        )
    return folders


def _make_teacher(inputs: RunInputs, stage_fingerprints: dict[str, str], plan: Plan) -> Path:
    steps = f"{plan.teacher_steps} steps at most" if plan.teacher_steps else "it has a head for this task"
    return _stage(
        inputs,
        "teacher",
        stage_fingerprints,
        lambda f: task_stages.make_teacher(f, inputs, plan.teacher_steps),
        f"teacher: {steps}",
    )


def _make_start(folder: Path, inputs: RunInputs, teacher: Path | None) -> None:
    task_stages.make_start(folder, inputs, teacher)
    if inputs.recipe.vocabulary_size:
        export_and_scores.trim(folder, inputs)


def _with_vocabulary_of(start: Path, make: Callable[[Path], None]) -> Callable[[Path], None]:
    """`make`, which also keeps what was trimmed of the vocabulary of `start`, if it was trimmed before training."""

    def make_and_keep(folder: Path) -> None:
        make(folder)
        if (start / TRIMMED).is_file():
            shutil.copyfile(start / TRIMMED, folder / TRIMMED)

    return make_and_keep


def _distil(inputs: RunInputs, stage_fingerprints: dict[str, str], folders: dict[str, Path], plan: Plan) -> None:
    """The student that learns from the teacher, in `folders["distilled"]`; none where labels alone beat that teacher."""
    undistilled = folders.get("undistilled")
    theirs = task_stages.teacher_score(inputs, folders.get("teacher"))
    if undistilled and theirs is not None and task_stages.best_on_validation(undistilled) > theirs:
        return
    given = None
    begin = folders["start"]
    if not inputs.begins_on_labels:
        given = task_stages.method_inputs(inputs, folders["teacher"])
        steps = (
            f"{plan.distill_tokens:,.0f} tokens of plain text" if plan.distill_tokens else f"{plan.student_steps} steps"
        )
        say(f"{inputs.chain.method}: {steps}")
        cut = plan.distill_tokens / inputs.distill_tokens if inputs.distill_tokens else 1.0
        a_step = TaskText(inputs.train, inputs.recipe.batch, inputs.recipe.seed).tokens_per_step
        links = inputs.chain.links(inputs.distill_tokens, plan.student_steps * a_step, cut=cut)
        if any(asks_words(link.stages) for link in links):
            fit = partial(fit_head, given=given, tokens=plan.distill_tokens)
            head = inputs.workdir.stage(f"{export_and_scores.DISTIL}teacher-head", stage_fingerprints["method"], fit)
            given = dataclasses.replace(given, words=head)
        *before, last = run_method(
            inputs.workdir, stage_fingerprints["method"], links, given, prefix=export_and_scores.DISTIL
        )
        folders |= {folder.name: folder for folder in (*before, last)}
        begin = last
    if inputs.chain.ends_on_task and given:
        folders["distilled"] = begin
        return
    soft = _soft_labels(inputs, stage_fingerprints, folders, plan, begin, given) if inputs.asks_soft_labels else None
    ending = "soft labels and labels" if soft else "labels"
    folders["distilled"] = _stage(
        inputs,
        "distilled",
        stage_fingerprints,
        _with_vocabulary_of(
            folders["start"],
            lambda f: task_stages.make_distilled(
                f, inputs.read_by(folders["start"]), begin, soft, plan.student_steps, given
            ),
        ),
        f"student on {ending}: {plan.student_steps} steps",
    )


def _soft_labels(
    inputs: RunInputs,
    stage_fingerprints: dict[str, str],
    folders: dict[str, Path],
    plan: Plan,
    begin: Path,
    given: MethodInputs | None,
) -> task_stages.SoftLabels:
    """The teacher's soft labels with their share of the loss: the given one, or the best of short trainings from `begin`."""
    asked = folders.get("teacher")
    fold_teachers = [
        _stage(
            inputs,
            f"teacher-fold-{fold + 1}",
            stage_fingerprints,
            partial(task_stages.make_fold_teacher, inputs=inputs, steps=plan.teacher_steps, fold=fold),
            f"teacher without fold {fold + 1} of {inputs.recipe.folds}: {plan.teacher_steps} steps at most",
        )
        for fold in range(inputs.recipe.folds)
    ]
    folders["soft-labels"] = folder = _stage(
        inputs,
        "soft-labels",
        stage_fingerprints,
        lambda f: make_soft_labels(f, inputs, asked, fold_teachers) if asked else save_answers(f, inputs),
        "the teacher labels all texts" if asked else "the teacher's answers to all texts",
    )
    if inputs.recipe.soft_weight is not None:
        return task_stages.SoftLabels(folder, inputs.recipe.soft_weight)
    steps = plan.student_steps
    trials = {}
    for weight in task_stages.SOFT_WEIGHTS:
        soft = task_stages.SoftLabels(folder, weight)
        trials[weight] = _stage(
            inputs,
            f"share-{weight:g}",
            stage_fingerprints,
            partial(
                task_stages.make_trial,
                inputs=inputs.read_by(folders["start"]),
                start=begin,
                soft=soft,
                steps=steps,
                given=given,
            ),
            f"a share of {weight:g} for the soft labels: {task_stages.trial_steps(steps)} steps",
        )
    return task_stages.chosen_share(folder, trials)


def _evaluate(
    inputs: RunInputs, stage_fingerprints: dict[str, str], folders: dict[str, Path], machine: MachineFacts
) -> tuple[dict[str, Any], ModelReport]:
    """Export, parity and scores. GateMissed where a gate is missed."""
    folders["export"] = _stage(
        inputs,
        "export",
        stage_fingerprints,
        lambda f: export_and_scores.make_export(f, inputs, folders["student"], folders.get("teacher")),
        "export: fp32 and int8, checked against torch",
    )
    folders["scores"] = _stage(
        inputs,
        "scores",
        stage_fingerprints,
        lambda f: export_and_scores.make_scores(f, inputs, folders),
        "scores: gates on validation, then test, once",
    )
    scores = export_and_scores.read_json(folders["scores"] / "scores.json")
    model_report = export_and_scores.model_report_of(inputs, folders, scores, stage_fingerprints["bundle"])
    if model_report.missed:
        report = write_report(
            inputs.workdir.root / export_and_scores.REPORT,
            export_and_scores.report_of(inputs, folders, scores, model_report, machine),
        )
        raise model_report.refusal(
            report,
            " More --student-epochs, more --unlabelled text or a larger --student usually help; lower the gate only if a lower score "
            "is enough.",
        )
    return scores, model_report


def _planned(inputs: RunInputs, stage_fingerprints: dict[str, str]) -> Plan:
    """The steps of every training; with `max_minutes` from a few timed steps."""
    if not inputs.recipe.max_minutes:
        return full_plan(inputs)
    what = f"timing a few steps to fit {inputs.recipe.max_minutes:g} minutes"
    # Raises BadInput, if the budget is too small, before anything is removed.
    plan = _kept_plan(inputs, stage_fingerprints, "plan", what, lambda: timed_plan(inputs), but=("plan", ANSWERS))
    for warning in plan.warnings:
        say(f"warning: {warning}")
    if not plan.teacher_steps:
        inputs.warnings.extend(plan.warnings)  # for the report
    return plan


def _planned_students(inputs: RunInputs, stage_fingerprints: dict[str, str], plan: Plan) -> Plan:
    """`plan`, with `max_minutes` fitted again once the teacher is trained."""
    if not (inputs.recipe.max_minutes and plan.teacher_steps):
        return plan
    spent_s = sum(inputs.workdir.seconds.values())
    before = plan.warnings
    plan = _kept_plan(
        inputs,
        stage_fingerprints,
        STUDENTS_PLAN,
        "timing a few steps to fit the students to the minutes that are left",
        lambda: students_plan(plan, inputs, spent_s),
        but=("plan", ANSWERS, "teacher", STUDENTS_PLAN),
    )
    for warning in plan.warnings:
        if warning not in before:
            say(f"warning: {warning}")
    inputs.warnings.extend(plan.warnings)  # for the report
    return plan


def _kept_plan(
    inputs: RunInputs,
    stage_fingerprints: dict[str, str],
    name: str,
    what: str,
    timed: Callable[[], Plan],
    *,
    but: tuple[str, ...],
) -> Plan:
    """The plan that the stage `name` keeps. One that is made removes all stages `but` these."""

    def make(folder: Path) -> None:
        made = timed()
        # A new timing may give other numbers of steps, and a training for other steps must not be resumed.
        inputs.workdir.clear(but=but)
        (folder / "plan.json").write_bytes(canonical_json(dataclasses.asdict(made)))

    folder = _stage(inputs, name, stage_fingerprints, make, what)
    return Plan(**export_and_scores.read_json(folder / "plan.json"))


def _stage(inputs: RunInputs, name: str, stage_fingerprints: dict[str, str], make: Any, what: str) -> Path:
    if inputs.workdir.finished(name, stage_fingerprints[name]):
        say(f"{what}: finished earlier")
    else:
        say(what)
    return inputs.workdir.stage(name, stage_fingerprints[name], make)


def _minutes(inputs: RunInputs, started: float) -> float:
    """Minutes of work on the bundle, earlier calls included."""
    searched_s = sum(row["seconds"] for row in inputs.found["trials"]) if inputs.found else 0.0
    return round(max(sum(inputs.workdir.seconds.values()) + searched_s, time.monotonic() - started) / 60, 2)


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
    report = export_and_scores.read_json(out / "report.json")
    metrics = open_bundle(out).manifest.metrics
    speed = export_and_scores.speedup(report["latency"])
    values = {row["name"]: row["metric"] for row in report["summary"]}
    with_texts = page_or(work_of(out) / export_and_scores.REPORT, "report.json")
    return {
        "bundle": str(out),
        "metric": metrics["metric"],
        "method": report["choice"]["method"],
        **{name: values.get(name) for name in export_and_scores.MODELS},
        "speedup": speed["ratio"],
        "speedup_interval": [speed["low"], speed["high"]],
        "speedup_tokens": speed["tokens"],
        "speedup_over": speed["a"].partition(" ")[0],
        "minutes": report["minutes"],
        "understood": report["understood"],
        "report": str(page_or(out / export_and_scores.REPORT, "report.json")),
        "report_with_texts": str(with_texts) if with_texts.is_file() else None,
        **{key: report[key] for key in DOCUMENTED},
    }
