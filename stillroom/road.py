"""The road that `stillroom run` walks: from a teacher to a bundle, stage by stage.

Each stage is named here with the inputs that decide its outcome, so that a rerun skips what is finished and a changed
input redoes exactly what depends on it.
"""

import dataclasses
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from export.pack import clear_leftovers
from latency.grid import PAIRED, doubts
from latency.report import write_report
from serve.bundle import MANIFEST, canonical_json, open_bundle
from serve.errors import BadInput, BundleError, GateMissed
from stillroom import judging, training
from stillroom.ground import Ground, prepare, same_bits, texts_mark, trained_with, work_of
from stillroom.plan import Plan, full_plan, timed_plan
from stillroom.recipe import Recipe
from stillroom.show import say, table
from stillroom.stages import fingerprint


def run(recipe: Recipe) -> dict[str, Any]:
    """Make the bundle that `recipe` describes, or find it made; the document that `--json` prints.

    Raises:
        BadInput: anything wrong with what was given, all of it in one message, before any training.
        GateMissed: the student fell short of a gate; the report is written, the bundle is not.
    """
    started = time.monotonic()
    ground = prepare(recipe)
    same_bits(ground.recipe.threads)
    marks = fingerprints(ground)
    out = Path(os.path.abspath(recipe.out))
    if (out / MANIFEST).is_file():
        return _already_there(out, marks["bundle"])
    for warning in ground.warnings:
        say(f"warning: {warning}")
    with ground.work.locked():
        folders = _train(ground, marks)
        ground.work.alone()
        scores = _judge(ground, marks, folders)
        folders["latency"] = _stage(
            ground,
            "latency",
            marks,
            lambda f: judging.make_latency(f, ground, folders, scores),
            "timing teacher and student, taking turns",
        )
        clear_leftovers(out)
        latency = judging.read_json(folders["latency"] / "latency.json")
        minutes = _minutes(ground, started)
        judging.write_bundle(out, ground, folders, scores, latency, marks["bundle"], minutes)  # type: ignore[arg-type]
    return _result(out)


def plan_of(recipe: Recipe) -> Plan:
    """What `run` would do and how long it would take, from a few timed steps; nothing is trained or kept.

    Raises:
        BadInput: as `run`.
    """
    ground = prepare(recipe)
    same_bits(ground.recipe.threads)
    for warning in ground.warnings:
        say(f"warning: {warning}")
    return timed_plan(ground)


def fingerprints(ground: Ground) -> dict[str, str]:
    """Of each stage: everything that decides its outcome, as one name."""
    r = ground.recipe
    common = [
        r.task, ground.data_mark, r.seed, r.threads, r.precision, r.batch, r.accumulate, ground.max_length, list(ground.labels),
    ]  # fmt: skip
    if r.out_of_scope:
        common.append(r.out_of_scope)
    runtimes = [version(name) for name in ("onnx", "onnxscript", "onnxruntime")]
    unlabelled = texts_mark(ground.unlabelled)
    in_domain = [unlabelled, r.augment]
    relations: list[str | float] = []
    if r.relation_epochs:
        relations = [
            r.relation_epochs,
            ground.relation_heads,
            ground.relation_layer,
            r.relation_tokens,
            r.relation_learning_rate,
        ]
        relations += [unlabelled, texts_mark(ground.corpus)]
    teacher = [
        ground.teacher_mark,
        ground.teacher_has_head,
        r.teacher_epochs,
        r.teacher_patience,
        r.teacher_learning_rate,
    ]
    student = [str(ground.shape), r.student_epochs, r.student_learning_rate]
    # With a budget, how long one training may take depends on all the others.
    budget = (
        [r.max_minutes, r.latency_seconds, r.undistilled, *in_domain, *teacher, *student, *relations]
        if r.max_minutes
        else []
    )
    marks: dict[str, str] = {}
    marks["plan"] = fingerprint("plan", trained_with(), *common, *budget)
    marks["teacher"] = fingerprint("teacher", marks["plan"], *teacher)
    marks["start"] = fingerprint("start", marks["teacher"], str(ground.shape))
    marks["relations"] = fingerprint("relations", marks["start"], *relations)
    start = marks["relations"] if r.relation_epochs else marks["start"]
    marks["soft-labels"] = fingerprint("soft-labels", marks["teacher"], *in_domain)
    # The comparison takes as many steps as relations and task distillation together.
    marks["undistilled"] = fingerprint("undistilled", marks["start"], *student, *relations)
    marks["student"] = fingerprint("student", start, marks["soft-labels"], *student, r.temperature, r.soft_weight)
    marks["export"] = fingerprint("export", marks["student"], runtimes, r.gate, r.keep_right)
    compared = marks["undistilled"] if r.undistilled else ""
    marks["scores"] = fingerprint("scores", marks["export"], compared, r.gate, r.teacher_gate)
    marks["latency"] = fingerprint("latency", marks["scores"], r.latency_seconds)
    marks["bundle"] = fingerprint("bundle", marks["latency"], r.model_name)
    return marks


def _train(ground: Ground, marks: dict[str, str]) -> dict[str, Path]:
    """Every stage that ends in a checkpoint; the folders by name."""
    plan = _planned(ground, marks)
    folders: dict[str, Path] = {}
    steps = f"{plan.teacher_steps} steps at most" if plan.teacher_steps else "it has a head for this task"
    folders["teacher"] = _stage(
        ground, "teacher", marks, lambda f: training.make_teacher(f, ground, plan.teacher_steps), f"teacher: {steps}"
    )
    folders["soft-labels"] = _stage(
        ground,
        "soft-labels",
        marks,
        lambda f: training.make_soft_labels(f, ground, folders["teacher"]),
        "the teacher labels all texts",
    )
    folders["start"] = _stage(
        ground,
        "start",
        marks,
        lambda f: training.make_start(f, ground, folders["teacher"]),
        f"student {ground.shape} from the teacher",
    )
    begin = folders["start"]
    if plan.relation_steps:
        begin = folders["relations"] = _stage(
            ground,
            "relations",
            marks,
            lambda f: training.make_relations(f, ground, folders["teacher"], folders["start"], plan.relation_steps),
            f"relations (MiniLMv2): {plan.relation_steps} steps",
        )
    if ground.recipe.undistilled:
        folders["undistilled"] = _stage(
            ground,
            "undistilled",
            marks,
            lambda f: training.make_undistilled(f, ground, folders["start"], plan.student_steps + plan.relation_steps),
            f"the same student on labels only: {plan.student_steps + plan.relation_steps} steps",
        )
    folders["student"] = _stage(
        ground,
        "student",
        marks,
        lambda f: training.make_student(f, ground, begin, folders["soft-labels"], plan.student_steps),
        f"student on soft labels and labels: {plan.student_steps} steps",
    )
    return folders


def _judge(ground: Ground, marks: dict[str, str], folders: dict[str, Path]) -> dict[str, Any]:
    """Export, parity and scores; the scores when every gate held."""
    folders["export"] = _stage(
        ground,
        "export",
        marks,
        lambda f: judging.make_export(f, ground, folders["student"], folders["teacher"]),
        "export: fp32 and int8, checked against torch",
    )
    folders["scores"] = _stage(
        ground,
        "scores",
        marks,
        lambda f: judging.make_scores(f, ground, folders),
        "scores: gates on validation, then test, once",
    )
    scores = judging.read_json(folders["scores"] / "scores.json")
    missed = [f"{g['name']} is {g['value']:.4f}, needed {g['needed']:g}" for g in scores["gates"] if not g["passed"]]
    missed += judging.read_json(folders["export"] / "export.json")["faults"]
    if missed:
        report = ground.work.root / judging.REPORT
        write_report(report, judging.report_of(ground, folders, scores, None))
        raise GateMissed(
            f"No bundle was written: {'; '.join(missed)}. The report is {report}. "
            "More --student-epochs, --unlabelled text or a larger --student usually help; lower the gate only if you can live with it."
        )
    return scores


def _planned(ground: Ground, marks: dict[str, str]) -> Plan:
    if not ground.recipe.max_minutes:
        return full_plan(ground)

    def make(folder: Path) -> None:
        plan = timed_plan(ground)  # refuses what cannot fit, before anything is removed
        # Timed anew the steps may differ, and what was trained for other steps must not be gone on with.
        ground.work.clear(but="plan")
        (folder / "plan.json").write_bytes(canonical_json(dataclasses.asdict(plan)))

    folder = _stage(ground, "plan", marks, make, f"timing a few steps to fit {ground.recipe.max_minutes:g} minutes")
    return Plan(**judging.read_json(folder / "plan.json"))


def _stage(ground: Ground, name: str, marks: dict[str, str], make: Any, what: str) -> Path:
    if ground.work.finished(name, marks[name]):
        say(f"{what}: done before")
    else:
        say(what)
    return ground.work.stage(name, marks[name], make)


def _minutes(ground: Ground, started: float) -> float:
    """Minutes of work that made the bundle, those of earlier calls included."""
    return round(max(sum(ground.work.seconds.values()), time.monotonic() - started) / 60, 2)


def _already_there(out: Path, mark: str) -> dict[str, Any]:
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
    if bundle.manifest.lineage.get("run") != mark:
        raise BadInput(f"--out {out} holds a bundle of other inputs or settings. Remove it, or give another folder.")
    say(f"{out} is already what this command makes; every file of it was verified.")
    return _result(out)


def _result(out: Path) -> dict[str, Any]:
    """The `--json` document, from what the bundle says of itself."""
    report = judging.read_json(out / "report.json")
    metrics = open_bundle(out).manifest.metrics
    speed = judging.speedup(report["latency"])
    values = {row["name"]: row["metric"] for row in report["summary"]}
    with_texts = work_of(out) / judging.REPORT
    return {
        "bundle": str(out),
        "metric": metrics["metric"],
        **{name: values.get(name) for name in judging.MODELS},
        "speedup": speed["ratio"],
        "speedup_interval": [speed["low"], speed["high"]],
        "speedup_tokens": speed["tokens"],
        "minutes": report["minutes"],
        "report": str(out / judging.REPORT),
        "report_with_texts": str(with_texts) if with_texts.is_file() else None,
        "claims": report["claims"],
    }


def show_result(out: Path) -> None:
    """The tables that end a run."""
    report = judging.read_json(out / "report.json")
    rows = []
    teacher = report["summary"][0]["metric"]
    for row in report["summary"]:
        share = f"{row['metric'] / teacher:.3f}" if teacher else ""
        size = f"{row['size_bytes'] / 1e6:.1f}"
        rows.append([row["name"], f"{row['metric']:.4f}", f"{row['low']:.4f} .. {row['high']:.4f}", share, size])
    table(report["metric_name"], ["model", "value", "95 % interval", "of teacher", "MB"], rows)
    latency = report["latency"]
    ratios = {(r["b"], r["batch"], r["tokens"]): r for r in latency["ratios"]}
    lines = []
    for row in latency["candidates"]:
        found = ratios.get((row["name"], row["batch"], row["tokens"]))
        times = f"{found['ratio']:.1f}x [{found['low']:.1f}, {found['high']:.1f}]" if found else "1"
        cells = [
            row["name"],
            f"{row['batch']} x {row['tokens']}",
            *(f"{row[k]:.2f}" for k in ("p50_ms", "p90_ms", "p99_ms")),
        ]
        lines.append([*cells, f"{row['texts_per_s']:.0f}", times])
    machine = latency["machine"]
    table(
        f"latency on {machine['cpu']}, {machine['cores']} cores",
        ["model", "texts x tokens", "p50 ms", "p90 ms", "p99 ms", "texts/s", "against torch teacher"],
        lines,
    )
    say(PAIRED)
    short, _ = doubts(latency)
    if short:
        say(short)
    for claim in report["claims"]:
        say(claim)
