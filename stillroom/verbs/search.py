"""Find the student that learns best within a latency budget.

Predicts the time of every shape on this machine, from students with random weights that it times once. Then it trains some that
meet the budget for a few steps each, chosen by optuna, and times the best. Give the same command again to resume a stopped search.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from compress.settings import (
    FineTunedTeacher,
    Output,
    Seed,
    TaskData,
    TaskSettings,
)
from serve.options import again, make, setting
from stillroom.console import result, say, table
from stillroom.settings import MOST_TRIALS, SOFT_WEIGHT, TRIAL_STEPS, LatencyBudget, Sampler, SeveralTrainings
from stillroom.verb import Document, Verb


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
    from stillroom.commands.search import search_for

    return search_for(make(Searching, settings, verb="search"))


def show_search(document: Document) -> None:
    """Prints a row per trained student, what was found, and the next command."""
    from stillroom.report.formats import written
    from stillroom.report.search_page import sentences, tried

    made = tried(document)
    table("short trainings, best first", made.header, [[written(cell) for cell in row] for row in made.rows])
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
