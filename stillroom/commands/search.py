"""`stillroom search`: the student that learns best within a latency budget on this machine."""

import shlex
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from compress.runs.hardware import same_bits
from compress.runs.open_task import open_task
from compress.runs.resumable_stages import Workdir
from compress.runs.task_inputs import TaskInputs
from compress.settings import WHERE_DATA_IS, TaskSettings
from latency.measure.machine import machine_facts
from serve.bundle.manifest import canonical_json
from serve.options import options_of
from stillroom.console import say, show
from stillroom.inputs.out_folder import check_out_folder
from stillroom.inputs.preflight import check_outside
from stillroom.inputs.timed_tokens import timed_tokens
from stillroom.report.pages import page_or, write_page, write_text
from stillroom.report.search_page import page
from stillroom.student_search.search import Limits, make_teacher, search_students
from stillroom.student_search.space import own_shape
from stillroom.verbs.search import Searching

DOCUMENT, PAGE = "search.json", "search.html"
# Settings that `run` has too. Those about the teacher are for making it, and `run` is given it made.
OF_TEACHER = ("teacher", "revision", "new_head", "teacher_epochs", "teacher_learning_rate")
SHARED = (
    "task", "data", "max_length", "student_learning_rate", "batch", "device", "threads", "precision", "seed", *WHERE_DATA_IS,
)  # fmt: skip
BUDGET = ("budget_ms", "percentile", "tokens")


def search_for(given: Searching) -> dict[str, Any]:
    """See `stillroom.search`."""
    machine = machine_facts()
    out = Path(given.out)
    work = Workdir(out.with_name(f"{out.name}.work"))
    inputs = _opened(given, out, work)
    for warning in inputs.warnings:
        say(f"warning: {warning}")
    same_bits(inputs.settings.threads)
    limits = Limits(
        given.budget_ms, given.percentile, timed_tokens(inputs, given.tokens), given.trials, given.trial_steps,
        given.most_minutes, given.soft_weight, given.sampler,
    )  # fmt: skip
    with work.locked():
        document = search_students(inputs, partial(make_teacher, inputs, work), work, limits, machine)
    document["machine"] = machine
    if document["chosen"]:
        document["command"] = _command(given, document["chosen"], work.root / "teacher", out)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / DOCUMENT, canonical_json(document).decode())
    write_page(out / PAGE, partial(page, document))
    return document | {"report": str(page_or(out / PAGE, DOCUMENT))}


def _opened(given: Searching, out: Path, work: Workdir) -> TaskInputs:
    """The teacher and the data, checked."""
    settings = {name: getattr(given, name) for name in (*OF_TEACHER, *SHARED)}
    checks = (
        partial(check_out_folder, out, (DOCUMENT, PAGE)),
        work.refuse_foreign,
        partial(check_outside, "--teacher", given.teacher, work.root),
    )
    student = own_shape(given.teacher, given.revision)
    return open_task(TaskSettings(**settings, student=student), out, more_checks=checks, notify=show)


def _command(given: Searching, student: str, teacher: Path, out: Path) -> str:
    """The command that trains the chosen student to a bundle, with the settings of the search that are not the usual ones."""
    usual = {each.name: each.default for each in fields(Searching)}
    flags = {option.name: option.flag for option in options_of(Searching)}
    asked = {"teacher": teacher, "task": given.task, "data": given.data, "student": student, "out": f"{out}.bundle"}
    more = {
        flags[name].removeprefix("--"): getattr(given, name)
        for name in (*SHARED, *BUDGET)
        if name not in asked and getattr(given, name) != usual[name]
    }
    return " ".join(
        ["stillroom run", *(f"--{name} {shlex.quote(str(value))}" for name, value in (asked | more).items())]
    )
