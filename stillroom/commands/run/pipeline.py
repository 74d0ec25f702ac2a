"""The stages of `stillroom run`: from a teacher to a bundle, stage by stage.

Each stage is named here with the inputs that decide its outcome, so that a rerun skips what is finished and a changed
input redoes exactly what depends on it.
"""

import dataclasses
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compress.engine import task_stages
from compress.engine.fingerprints import fingerprint, texts_fingerprint, trained_with
from compress.engine.hardware import same_bits
from export.packing.writer import clear_leftovers
from serve.bundle.manifest import MANIFEST, canonical_json, open_bundle
from serve.errors import BadInput, BundleError, GateMissed
from stillroom.commands.run import evaluate
from stillroom.commands.run.time_budget import Plan, full_plan, timed_plan
from stillroom.console import say
from stillroom.inputs.preflight import RunInputs, prepare, work_of
from stillroom.inputs.recipe import Recipe
from stillroom.report.run_page import write_report


def run(recipe: Recipe) -> dict[str, Any]:
    """Make the bundle that `recipe` describes, or find it made; the document that `--json` prints.

    Raises:
        BadInput: anything wrong with what was given, all of it in one message, before any training.
        GateMissed: the student fell short of a gate; the report is written, the bundle is not.
    """
    started = time.monotonic()
    inputs = prepare(recipe)
    same_bits(inputs.recipe.threads)
    fingerprints_of = fingerprints(inputs)
    out = Path(os.path.abspath(recipe.out))
    if (out / MANIFEST).is_file():
        return _already_there(out, fingerprints_of["bundle"])
    for warning in inputs.warnings:
        say(f"warning: {warning}")
    with inputs.workdir.locked():
        folders = _train(inputs, fingerprints_of)
        inputs.workdir.alone()
        scores = _evaluate(inputs, fingerprints_of, folders)
        folders["latency"] = _stage(
            inputs,
            "latency",
            fingerprints_of,
            lambda f: evaluate.make_latency(f, inputs, folders, scores),
            "timing teacher and student, taking turns",
        )
        clear_leftovers(out)
        latency = evaluate.read_json(folders["latency"] / "latency.json")
        minutes = _minutes(inputs, started)
        evaluate.write_bundle(out, inputs, folders, scores, latency, fingerprints_of["bundle"], minutes)  # type: ignore[arg-type]
    return _result(out)


def plan_of(recipe: Recipe) -> Plan:
    """What `run` would do and how long it would take, from a few timed steps; nothing is trained or kept.

    Raises:
        BadInput: as `run`.
    """
    inputs = prepare(recipe)
    same_bits(inputs.recipe.threads)
    for warning in inputs.warnings:
        say(f"warning: {warning}")
    return timed_plan(inputs)


def fingerprints(inputs: RunInputs) -> dict[str, str]:
    """Of each stage: everything that decides its outcome, as one name."""
    r = inputs.recipe
    common = [
        r.task, inputs.data_fingerprint, r.seed, r.threads, r.precision, r.batch, r.accumulate, inputs.max_length, list(inputs.labels),
    ]  # fmt: skip
    if r.out_of_scope:
        common.append(r.out_of_scope)
    runtimes = [version(name) for name in ("onnx", "onnxscript", "onnxruntime")]
    unlabelled = texts_fingerprint(inputs.unlabelled)
    in_domain = [unlabelled, r.augment]
    relations: list[str | float] = []
    if r.relation_epochs:
        relations = [
            r.relation_epochs,
            inputs.relation_heads,
            inputs.relation_layer,
            r.relation_tokens,
            r.relation_learning_rate,
        ]
        relations += [unlabelled, texts_fingerprint(inputs.corpus)]
    teacher = [
        inputs.teacher_fingerprint,
        inputs.teacher_has_head,
        r.teacher_epochs,
        r.teacher_patience,
        r.teacher_learning_rate,
    ]
    student = [str(inputs.shape), r.student_epochs, r.student_learning_rate]
    # With a budget, how long one training may take depends on all the others.
    budget = (
        [r.max_minutes, r.latency_seconds, r.undistilled, *in_domain, *teacher, *student, *relations]
        if r.max_minutes
        else []
    )
    fingerprints_of: dict[str, str] = {}
    fingerprints_of["plan"] = fingerprint("plan", trained_with(), *common, *budget)
    fingerprints_of["teacher"] = fingerprint("teacher", fingerprints_of["plan"], *teacher)
    fingerprints_of["start"] = fingerprint("start", fingerprints_of["teacher"], str(inputs.shape))
    fingerprints_of["relations"] = fingerprint("relations", fingerprints_of["start"], *relations)
    start = fingerprints_of["relations"] if r.relation_epochs else fingerprints_of["start"]
    fingerprints_of["soft-labels"] = fingerprint("soft-labels", fingerprints_of["teacher"], *in_domain)
    # The comparison takes as many steps as relations and task distillation together.
    fingerprints_of["undistilled"] = fingerprint("undistilled", fingerprints_of["start"], *student, *relations)
    fingerprints_of["student"] = fingerprint(
        "student", start, fingerprints_of["soft-labels"], *student, r.temperature, r.soft_weight
    )
    fingerprints_of["export"] = fingerprint("export", fingerprints_of["student"], runtimes, r.gate, r.keep_right)
    compared = fingerprints_of["undistilled"] if r.undistilled else ""
    fingerprints_of["scores"] = fingerprint("scores", fingerprints_of["export"], compared, r.gate, r.teacher_gate)
    fingerprints_of["latency"] = fingerprint("latency", fingerprints_of["scores"], r.latency_seconds)
    fingerprints_of["bundle"] = fingerprint("bundle", fingerprints_of["latency"], r.model_name)
    return fingerprints_of


def _train(inputs: RunInputs, fingerprints_of: dict[str, str]) -> dict[str, Path]:
    """Every stage that ends in a checkpoint; the folders by name."""
    plan = _planned(inputs, fingerprints_of)
    folders: dict[str, Path] = {}
    steps = f"{plan.teacher_steps} steps at most" if plan.teacher_steps else "it has a head for this task"
    folders["teacher"] = _stage(
        inputs,
        "teacher",
        fingerprints_of,
        lambda f: task_stages.make_teacher(f, inputs, plan.teacher_steps),
        f"teacher: {steps}",
    )
    folders["soft-labels"] = _stage(
        inputs,
        "soft-labels",
        fingerprints_of,
        lambda f: task_stages.make_soft_labels(f, inputs, folders["teacher"]),
        "the teacher labels all texts",
    )
    folders["start"] = _stage(
        inputs,
        "start",
        fingerprints_of,
        lambda f: task_stages.make_start(f, inputs, folders["teacher"]),
        f"student {inputs.shape} from the teacher",
    )
    begin = folders["start"]
    if plan.relation_steps:
        begin = folders["relations"] = _stage(
            inputs,
            "relations",
            fingerprints_of,
            lambda f: task_stages.make_relations(f, inputs, folders["teacher"], folders["start"], plan.relation_steps),
            f"relations (MiniLMv2): {plan.relation_steps} steps",
        )
    if inputs.recipe.undistilled:
        folders["undistilled"] = _stage(
            inputs,
            "undistilled",
            fingerprints_of,
            lambda f: task_stages.make_undistilled(
                f, inputs, folders["start"], plan.student_steps + plan.relation_steps
            ),
            f"the same student on labels only: {plan.student_steps + plan.relation_steps} steps",
        )
    folders["student"] = _stage(
        inputs,
        "student",
        fingerprints_of,
        lambda f: task_stages.make_student(f, inputs, begin, folders["soft-labels"], plan.student_steps),
        f"student on soft labels and labels: {plan.student_steps} steps",
    )
    return folders


def _evaluate(inputs: RunInputs, fingerprints_of: dict[str, str], folders: dict[str, Path]) -> dict[str, Any]:
    """Export, parity and scores; the scores when every gate held."""
    folders["export"] = _stage(
        inputs,
        "export",
        fingerprints_of,
        lambda f: evaluate.make_export(f, inputs, folders["student"], folders["teacher"]),
        "export: fp32 and int8, checked against torch",
    )
    folders["scores"] = _stage(
        inputs,
        "scores",
        fingerprints_of,
        lambda f: evaluate.make_scores(f, inputs, folders),
        "scores: gates on validation, then test, once",
    )
    scores = evaluate.read_json(folders["scores"] / "scores.json")
    missed = [f"{g['name']} is {g['value']:.4f}, needed {g['needed']:g}" for g in scores["gates"] if not g["passed"]]
    missed += evaluate.read_json(folders["export"] / "export.json")["faults"]
    if missed:
        report = inputs.workdir.root / evaluate.REPORT
        write_report(report, evaluate.report_of(inputs, folders, scores, None))
        raise GateMissed(
            f"No bundle was written: {'; '.join(missed)}. The report is {report}. "
            "More --student-epochs, --unlabelled text or a larger --student usually help; lower the gate only if you can live with it."
        )
    return scores


def _planned(inputs: RunInputs, fingerprints_of: dict[str, str]) -> Plan:
    if not inputs.recipe.max_minutes:
        return full_plan(inputs)

    def make(folder: Path) -> None:
        plan = timed_plan(inputs)  # refuses what cannot fit, before anything is removed
        # Timed anew the steps may differ, and what was trained for other steps must not be gone on with.
        inputs.workdir.clear(but="plan")
        (folder / "plan.json").write_bytes(canonical_json(dataclasses.asdict(plan)))

    folder = _stage(
        inputs, "plan", fingerprints_of, make, f"timing a few steps to fit {inputs.recipe.max_minutes:g} minutes"
    )
    return Plan(**evaluate.read_json(folder / "plan.json"))


def _stage(inputs: RunInputs, name: str, fingerprints_of: dict[str, str], make: Any, what: str) -> Path:
    if inputs.workdir.finished(name, fingerprints_of[name]):
        say(f"{what}: done before")
    else:
        say(what)
    return inputs.workdir.stage(name, fingerprints_of[name], make)


def _minutes(inputs: RunInputs, started: float) -> float:
    """Minutes of work that made the bundle, those of earlier calls included."""
    return round(max(sum(inputs.workdir.seconds.values()), time.monotonic() - started) / 60, 2)


def _already_there(out: Path, run_fingerprint: str) -> dict[str, Any]:
    """The result of an earlier run.

    Raises:
        BadInput: `out` is a bundle of another recipe.
    """
    try:
        bundle = open_bundle(out)
    except BundleError as fault:
        raise BadInput(
            f"--out {out} holds a damaged bundle: {fault.message} To have this command make it anew, remove it first."
        ) from None
    if bundle.manifest.lineage.get("run") != run_fingerprint:
        raise BadInput(f"--out {out} holds a bundle of other inputs or settings. Remove it, or give another folder.")
    say(f"{out} is already what this command makes; every file of it was verified.")
    return _result(out)


def _result(out: Path) -> dict[str, Any]:
    """The `--json` document, from what the bundle says of itself."""
    report = evaluate.read_json(out / "report.json")
    metrics = open_bundle(out).manifest.metrics
    speed = evaluate.speedup(report["latency"])
    values = {row["name"]: row["metric"] for row in report["summary"]}
    with_texts = work_of(out) / evaluate.REPORT
    return {
        "bundle": str(out),
        "metric": metrics["metric"],
        **{name: values.get(name) for name in evaluate.MODELS},
        "speedup": speed["ratio"],
        "speedup_interval": [speed["low"], speed["high"]],
        "speedup_tokens": speed["tokens"],
        "minutes": report["minutes"],
        "report": str(out / evaluate.REPORT),
        "report_with_texts": str(with_texts) if with_texts.is_file() else None,
        "claims": report["claims"],
    }
