"""Fine-tunes a model on every task of a suite, resumable, and writes the scores beside the papers'."""

import statistics
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compress.input_errors import Faults
from compress.models.pretrained import Opened, open_model
from compress.runs.hardware import on_this_machine
from compress.runs.resumable_stages import Workdir
from compress.settings import TaskSettings
from latency.measure.machine import machine_facts
from serve.bundle.manifest import canonical_json
from serve.wording import counted
from stillroom.console import say
from stillroom.inputs.folders import check_out_folder, check_outside
from stillroom.report.benchmark_page import page
from stillroom.report.pages import page_or, write_page, write_text
from stillroom.student_search.space import teacher_shape
from stillroom.verbs.benchmark import Benchmarking
from stillroom.verbs.benchmark.grids import SEEDS, tunings
from stillroom.verbs.benchmark.suites import SuiteTask, tasks_of
from stillroom.verbs.benchmark.training import prepare, tune

DOCUMENT, PAGE = "benchmark.json", "benchmark.html"
PUBLISHED = Path(__file__).with_name("published.toml")


def benchmark_model(model: str, given: Benchmarking) -> dict[str, Any]:
    """See `stillroom.benchmark`."""
    machine = machine_facts()
    out = Path(given.out)
    work = Workdir(out.with_name(f"{out.name}.work"))
    opened, tasks = _checked(model, given, out, work)
    found: list[dict[str, Any]] = []
    with work.locked():
        prepared = [prepare(work, task, Path(given.data)) for task in tasks]
        warnings = [warning for each in prepared for warning in each.warnings]
        for warning in warnings:
            say(f"warning: {warning}")
        seeds = given.seeds or SEEDS[given.grid]
        for task, ready in zip(tasks, prepared, strict=True):
            runs = []
            for tuning in tunings(task, given.grid):
                say(f"{task.name}: rate {tuning.learning_rate:g}, {tuning.epochs:g} epochs, {counted(seeds, 'seed')}")
                made = [tune(work, task, given, opened, ready, tuning, seed) for seed in range(seeds)]
                warnings += [f"{task.name}: {each}" for one in made for each in one["warnings"]]
                runs.append(
                    {**vars(tuning), "validation": statistics.fmean(each["validation"] for each in made), "seeds": made}
                )
            rows = _rows(task, max(runs, key=lambda run: float(run["validation"])))
            found.extend({**row, "tried": len(runs)} for row in rows)
            for row in rows:
                say(f"  {row['task']}: {row['metric']} {row['mean']:.4f}")
    document = _document(opened, given, tasks, found, list(dict.fromkeys(warnings))) | {"machine": machine}
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / DOCUMENT, canonical_json(document).decode())
    write_page(out / PAGE, partial(page, document))
    return document | {"report": str(page_or(out / PAGE, DOCUMENT))}


def _checked(model: str, given: Benchmarking, out: Path, work: Workdir) -> tuple[Opened, list[SuiteTask]]:
    """The model and the tasks. BadInput names everything that is wrong, files that are missing included."""
    faults = Faults()
    faults.check(partial(check_out_folder, out, (DOCUMENT, PAGE)))
    faults.check(work.refuse_foreign)
    faults.check(partial(check_outside, "MODEL", model, work.root))
    faults.check(lambda: on_this_machine(TaskSettings(task="text-classification", data="", device=given.device)))
    opened = faults.check(lambda: open_model(model, role="MODEL", revision=given.revision))
    every = faults.check(lambda: tasks_of(given.suite, Path(given.data))) or ()
    names = [task.name for task in every]
    if unknown := [name for name in given.tasks if every and name not in names]:
        faults.messages.append(
            f"--only {', '.join(unknown)}: --suite {given.suite} has {', '.join(names)}. Give some of these."
        )
    tasks = [task for task in every if not given.tasks or task.name in given.tasks]
    missing = [file for task in tasks for file in task.files if not (Path(given.data) / file).is_file()]
    if missing:
        faults.messages.append(
            f"--data {given.data} lacks {', '.join(missing)}. Give the folder of {given.suite} as it was published, or --only the tasks "
            "whose files are there."
        )
    faults.raise_if_any()
    assert opened
    return opened, tasks


def _rows(task: SuiteTask, best: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each scored file and metric of the task, from the best fine-tuning."""
    rows = []
    for suffix in task.scored:
        for metric in task.metrics:
            values = [float(each["scores"][suffix][metric]) for each in best["seeds"]]
            rows.append({
                "task": _named(task, suffix),
                "metric": metric,
                "mean": statistics.fmean(values),
                "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
                "seeds": values,
                "learning_rate": best["learning_rate"],
                "epochs": best["epochs"],
            })  # fmt: skip
    return rows


def _named(task: SuiteTask, suffix: str) -> str:
    """As papers name it: MNLI-m, a language of XNLI or MLQA, or the task."""
    return suffix if task.name in ("XNLI", "MLQA") else f"{task.name}-{suffix}" if suffix else task.name


def _document(
    opened: Opened, given: Benchmarking, tasks: Sequence[SuiteTask], rows: list[dict[str, Any]], warnings: list[str]
) -> dict[str, Any]:
    shape = teacher_shape(opened)
    published = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["row"]
    mine = f"{shape.layers}x{shape.hidden}"
    run = {task.name for task in tasks}
    left = [task.name for task in tasks_of(given.suite, Path(given.data)) if task.name not in run]
    return {
        "model": {"name": opened.public_name, "shape": mine},
        "suite": given.suite,
        "grid": given.grid,
        "seeds": given.seeds or SEEDS[given.grid],
        "rows": rows,
        "published": [row for row in published if row["suite"] == given.suite and row["shape"] in (mine, "12x768")],
        "not_run": left,
        "warnings": warnings,
    }
