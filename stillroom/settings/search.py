"""The settings of `stillroom search`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from compress.settings import FineTunedTeacher, Output, Seed, TaskData, TaskSettings
from serve.options import again, setting

Sampler = Literal["tpe", "controller"]
MOST_TRIALS, TRIAL_STEPS, MOST_MINUTES, SOFT_WEIGHT = 24, 200, 60.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Searching(FineTunedTeacher, Seed, TaskData):
    """Settings of `stillroom search`."""

    out: str = again(Output, "out", help="Folder for search.json and search.html; trainings are kept in OUT.work.")
    budget_ms: float = setting(help="Milliseconds that one call of the int8 student may take on this machine.", above=0)
    percentile: Literal[50, 99] = setting(
        50,
        help="Percentile of the latency that --budget-ms bounds; 99 needs a machine without other work.",
        metavar="N",
    )
    tokens: int = setting(
        0,
        help="Tokens of the text of that call.",
        at_least=0,
        at_most=512,
        shown="the length that 95 of 100 texts of validation stay within",
    )
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
    most_minutes: float = setting(MOST_MINUTES, help="No training begins after so many minutes of them.", above=0)
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
