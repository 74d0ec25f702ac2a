"""`stillroom search`: the student that learns best within a latency budget on this machine."""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

from compress.engine.hardware import same_bits
from compress.engine.resumable_stages import Workdir
from compress.engine.task_inputs import TaskInputs, open_task
from compress.settings import WHERE_DATA_IS, TaskSettings
from latency.measure.machine import machine_facts
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput
from serve.options import make
from stillroom.console import bar, say, show
from stillroom.inputs.out_folder import check_out_folder
from stillroom.report.pages import page_or, write_page, write_text
from stillroom.report.search_page import page
from stillroom.settings.search import Searching
from stillroom.student_search.search import Limits, make_teacher, search_students, usual_tokens

DOCUMENT, PAGE = "search.json", "search.html"
SHARED = (
    "teacher", "revision", "task", "data", "max_length", "new_head", "teacher_epochs", "teacher_learning_rate",
    "student_learning_rate", "batch", "device", "threads", "precision", "seed", *WHERE_DATA_IS,
)  # fmt: skip


def search(**settings: Any) -> dict[str, Any]:
    """The student that learns best within `budget_ms`; settings are the fields of `stillroom.settings.search.Searching`.

    Returns the document that `stillroom search --json` prints (docs/searching.md lists its keys).

    Raises:
        BadInput: anything wrong with what was given, before any training; or no student meets the budget.
    """
    return search_for(make(Searching, settings))


def search_for(given: Searching) -> dict[str, Any]:
    """See `search`."""
    machine = machine_facts()
    out = Path(given.out)
    work = Workdir(out.with_name(f"{out.name}.work"))
    inputs = _opened(given, out, work)
    for warning in inputs.warnings:
        say(f"warning: {warning}")
    same_bits(inputs.settings.threads)
    limits = Limits(
        given.budget_ms, given.percentile, given.tokens or usual_tokens(inputs), given.trials, given.trial_steps,
        given.most_minutes, given.soft_weight,
    )  # fmt: skip
    with work.locked(), bar("latency") as shown:
        document = search_students(inputs, partial(make_teacher, inputs, work, say), work, limits, machine, say, shown)
    document["machine"] = machine
    if document["chosen"]:
        document["command"] = _command(given, document["chosen"], work.root / "teacher")
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / DOCUMENT, canonical_json(document).decode())
    write_page(out / PAGE, partial(page, document))
    return document | {"report": str(page_or(out / PAGE, DOCUMENT))}


def _opened(given: Searching, out: Path, work: Workdir) -> TaskInputs:
    """The teacher and the data, checked."""
    settings = TaskSettings(**{name: getattr(given, name) for name in SHARED})
    checks = (partial(check_out_folder, out, (DOCUMENT, PAGE)), work.refuse_foreign)
    inputs = open_task(settings, out, more_checks=checks, notify=show)
    if given.tokens > inputs.max_length:
        raise BadInput(
            f"--tokens {given.tokens} is more than the {inputs.max_length} tokens that the teacher reads. Give fewer."
        )
    return inputs


def _command(given: Searching, student: str, teacher: Path) -> str:
    """The command that trains the chosen student to a bundle."""
    asked = {
        "teacher": str(teacher), "task": given.task, "data": given.data, "student": student, "out": f"{given.out}.bundle",
    }  # fmt: skip
    columns = {name.replace("_", "-"): getattr(given, name) for name in WHERE_DATA_IS if getattr(given, name)}
    flags = (asked | columns).items()
    return " ".join(["stillroom run", *(f"--{name} {shlex.quote(value)}" for name, value in flags)])
