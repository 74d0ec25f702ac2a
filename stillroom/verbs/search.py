"""Find the student that learns best within a latency budget.

Predicts the time of every shape on this machine, from students with random weights that it times once. Then it trains some that
meet the budget for a few steps each, chosen by optuna, and times the best. Give the same command again to resume a stopped search.
"""

import shlex
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from compress.runs.resumable_stages import Workdir
from compress.settings import WHERE_DATA_IS, FineTunedTeacher, Output, Seed, TaskData, TaskSettings
from serve.files import path_beside
from serve.options import again, make, options_of, setting
from stillroom.console import result, say, show, table
from stillroom.inputs.folders import check_out_folder
from stillroom.report.pages import write_document
from stillroom.settings import MOST_TRIALS, SOFT_WEIGHT, TRIAL_STEPS, LatencyBudget, Sampler, SeveralTrainings
from stillroom.verb import Document, Verb

FILES = ("search.json", "search.html")
# Settings that `run` has too. Those about the teacher are for making it, and `run` is given it made.
OF_TEACHER = ("teacher", "revision", "new_head", "teacher_epochs", "teacher_learning_rate")
SHARED = (
    "task", "data", "max_length", "student_learning_rate", "batch", "device", "threads", "precision", "seed", *WHERE_DATA_IS,
)  # fmt: skip
BUDGET = ("budget_ms", "percentile", "tokens")


@dataclass(frozen=True, kw_only=True)
class Searching(LatencyBudget, FineTunedTeacher, Seed, TaskData):
    """Settings of `stillroom search`."""

    out: str = again(Output, "out", help="Folder for search.json and search.html; trainings are kept in OUT.work.")
    trials: int = setting(MOST_TRIALS, help="Students that are trained, at most.", at_least=1)
    sampler: Sampler = setting(
        "tpe",
        help="What suggests the students after the first half: optuna's tree of Parzen estimators, or the LSTM of the papers, which learns "
        "by REINFORCE.",
    )
    trial_steps: int = setting(
        TRIAL_STEPS,
        help="Steps of training each on the teacher's soft labels and the labels.",
        at_least=1,
    )
    most_minutes: float = again(SeveralTrainings, "most_minutes")
    soft_weight: float = again(TaskSettings, "soft_weight", SOFT_WEIGHT, shown=None)
    student_learning_rate: float = again(
        TaskSettings, "student_learning_rate", help="Peak learning rate of training the students."
    )
    new_head: bool = again(TaskSettings, "new_head")
    layout: ClassVar = {
        "What to make": "teacher revision task data out",
        "Budget": "budget_ms percentile tokens",
        "Short trainings": "trials sampler trial_steps most_minutes soft_weight student_learning_rate",
        "Data": "max_length",
        "Teacher": "new_head teacher_epochs teacher_learning_rate",
        "Machine": "batch device threads precision seed",
    }


def search(**settings: Any) -> dict[str, Any]:
    """The student that learns best within `budget_ms`; settings are the fields of `Searching`.

    Returns the document that `stillroom search --json` prints (docs/searching.md lists its keys).

    Raises:
        BadInput: anything wrong with what was given, before any training; or no student meets the budget.
    """
    from compress.runs.hardware import same_bits
    from compress.runs.open_task import open_task
    from latency.measure.machine import machine_facts
    from stillroom.inputs.folders import check_outside
    from stillroom.inputs.preflight import timed_tokens
    from stillroom.report.search_page import page
    from stillroom.student_search.search import make_teacher, search_students
    from stillroom.student_search.space import own_shape
    from stillroom.student_search.trials import Limits

    given = make(Searching, settings, verb="search")
    machine = machine_facts()
    out = Path(given.out)
    work = Workdir(path_beside(out, ".work"))
    checks = (
        partial(check_out_folder, out, FILES, beside=True),
        work.refuse_foreign,
        partial(check_outside, "--teacher", given.teacher, work.root),
    )
    shared = {name: getattr(given, name) for name in (*OF_TEACHER, *SHARED)}
    asked = TaskSettings(**shared, student=own_shape(given.teacher, given.revision))
    inputs = open_task(asked, out, more_checks=checks, notify=show)
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
    return write_document(out, FILES, document, page)


def _command(given: Searching, student: str, teacher: Path, out: Path) -> str:
    """The command that trains the chosen student to a bundle, with the settings of the search that are not the usual ones."""
    usual = {each.name: each.default for each in fields(Searching)}
    flags = {option.name: option.flag for option in options_of(Searching)}
    asked = {
        "teacher": teacher,
        "task": given.task,
        "data": given.data,
        "student": student,
        "out": path_beside(out, ".bundle"),
    }
    more = {
        flags[name].removeprefix("--"): getattr(given, name)
        for name in (*SHARED, *BUDGET)
        if name not in asked and getattr(given, name) != usual[name]
    }
    return " ".join(
        ["stillroom run", *(f"--{name} {shlex.quote(str(value))}" for name, value in (asked | more).items())]
    )


def show_search(document: Document) -> None:
    """Prints a row per trained student, what was found, and the next command."""
    from stillroom.report.search_page import sentences, tried

    made = tried(document)
    table("short trainings, best first", made.header, made.texts)
    for sentence in sentences(document):
        result(sentence)
    result(f"Report  {document['report']}")
    if "command" in document:
        say(f"Next    {document['command']}")


VERB = Verb(
    "search",
    search,
    Searching,
    help=__doc__,
    show=show_search,
    examples=(
        "stillroom search --teacher my_teacher --task text-classification \\\n"
        "      --data my-data --budget-ms 2 --out found",
        "stillroom search --teacher my_teacher --task token-classification \\\n"
        "      --data my-data --budget-ms 5 --percentile 99 --tokens 64 --out found",
    ),
)
