"""From teacher to bundle: fine-tune, distil, export, check, time.

RECIPE is a TOML file of settings, named as the flags; flags override it. Give the same command again to resume a stopped run.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from stillroom.console import result, say, table
from stillroom.inputs.recipe import Recipe, read_recipe, resolve
from stillroom.verb import Argument, Document, Verb, ourselves


def run(**settings: Any) -> dict[str, Any]:
    """From a teacher to a bundle. Settings are the fields of `stillroom.inputs.recipe.Recipe`.

    Returns the document that `stillroom run --json` prints.

    Raises:
        BadInput: anything wrong with what was given, before any training.
        GateMissed: the student fell short of a gate.
    """
    from stillroom.verbs.run.pipeline import run as make_bundle

    return make_bundle(resolve({}, {name: str(v) if isinstance(v, Path) else v for name, v in settings.items()}))


def _run(recipe: Path | None, dry_run: bool, **settings: Any) -> Document:
    from stillroom.verbs.run import pipeline

    resolved = resolve(read_recipe(recipe) if recipe else {}, settings)
    if dry_run:
        plan = pipeline.plan_of(resolved)
        return asdict(plan) | {"minutes": round(plan.minutes, 1)}
    return pipeline.run(resolved)


def show_run(document: Document) -> None:
    """Prints the result of a run and the next command, or the plan of a dry run."""
    if "teacher_steps" in document:
        _show_plan(document)
        return
    out = Path(document["bundle"])
    _show_tables(json.loads((out / "report.json").read_text(encoding="utf-8")))
    low, high = document["speedup_interval"]
    other = "the torch teacher" if document["speedup_over"] == "teacher" else "itself in torch"
    result(
        f"The int8 student is {document['speedup']:.1f} times [{low:.1f}, {high:.1f}] as fast as {other} "
        f"(one text of {document['speedup_tokens']} tokens). The run took {document['minutes']:.1f} minutes."
    )
    result(f"Bundle  {out}\nReport  {document['report']}")
    if document["report_with_texts"]:
        result(f"        {document['report_with_texts']} shows texts of the data, and is not part of the bundle")
    say(f"Next    {ourselves()} serve {out}")


def _show_tables(report: dict[str, Any]) -> None:
    """Prints scores, sizes and latency of the bundle with this `report`."""
    from stillroom.report.timings import PAIRED, doubts

    rows = []
    first = report["summary"][0]
    teacher = first["metric"] if first["name"] == "teacher" else 0
    for row in report["summary"]:
        share = f"{row['metric'] / teacher:.3f}" if teacher else ""
        size = f"{row['size_bytes'] / 1e6:.1f}" if row["size_bytes"] is not None else ""
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
    baseline = latency["candidates"][0]["name"].partition(" ")[0]  # teacher, or without a model as teacher the student
    table(
        f"latency on {machine['cpu']}, {machine['cores']} cores",
        [
            "model",
            "texts x tokens",
            "p50 ms",
            "p90 ms",
            "p99 ms",
            "texts/s",
            f"against torch {baseline}",
        ],
        lines,
    )
    result(PAIRED)
    if found := doubts(latency):
        result(found.sentence)
    for claim in report["claims"]:
        result(claim)


def _show_plan(plan: dict[str, Any]) -> None:
    """Prints the stages with their steps and minutes; `plan` is a `time_budget.Plan` as a dictionary."""
    steps = {
        "teacher": plan["teacher_steps"],
        "undistilled": plan["student_steps"],
        "student": plan["student_steps"],
    }
    rows = [
        [name, str(steps.get(name, "")), f"{seconds / 60:.1f}"] for name, seconds in plan["seconds"].items() if seconds
    ]
    table("plan, from a few timed steps; nothing was trained", ["stage", "steps", "minutes"], rows)
    result(f"About {plan['minutes']:.0f} minutes and {plan['memory_bytes'] / 2**30:.1f} GiB of memory.")


VERB = Verb(
    "run",
    _run,
    Recipe,
    help=__doc__,
    arguments=(
        Argument(
            "recipe", "A TOML file of settings; flags override it.", required=False, type=click.Path(path_type=Path)
        ),
        click.Option(["--dry-run"], is_flag=True, help="Print the plan with minutes and memory; train nothing."),
    ),
    show=show_run,
    examples=(
        "stillroom run --teacher bert-base-uncased --task token-classification \\\n"
        "      --data my-data --student 3x384 --out ner.bundle",
        "stillroom run recipe.toml --student 6x384 --out larger.bundle",
        "stillroom run recipe.toml --dry-run",
    ),
)
