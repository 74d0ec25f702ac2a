"""The settings of `stillroom search`."""

from dataclasses import dataclass
from typing import Literal

from compress.settings import (
    ALL_CORES,
    DATA,
    DEVICE,
    LEAST_TUNING_STEPS,
    MACHINE,
    PRECISION,
    REVISION,
    SEED,
    SPLITS,
    TASKS,
    TEACHER,
    THREADS,
    WHAT,
    DataSet,
    TrainingDevice,
    TrainingPrecision,
)  # fmt: skip
from serve.options import check, setting

BUDGET = "Budget"
TRIALS = "Short trainings"
BUDGET_MS = "Milliseconds that one call of the int8 student may take on this machine."
PERCENTILE = "Percentile of the latency that --budget-ms bounds; 99 needs a machine without other work."
TOKENS = "Tokens of the text of that call."
USUAL_TOKENS = "the length that 95 of 100 texts of validation stay within"
Sampler = Literal["tpe", "controller"]
MOST_TRIALS, TRIAL_STEPS, MOST_MINUTES, SOFT_WEIGHT = 24, 200, 60.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Searching(DataSet):
    """Settings of `stillroom search`."""

    teacher: str = setting(help="Transformers folder or Hub name of a BERT-like encoder.", panel=WHAT)
    revision: str = setting("", help=REVISION, shown="its main branch", panel=WHAT)
    task: str = setting(help="Task of the model.", choices=TASKS, panel=WHAT)
    data: str = setting(help=SPLITS, panel=WHAT)
    out: str = setting(
        metavar="FOLDER", help="Folder for search.json and search.html; trainings are kept in OUT.work.", panel=WHAT
    )
    budget_ms: float = setting(help=BUDGET_MS, above=0, panel=BUDGET)
    percentile: Literal[50, 99] = setting(50, help=PERCENTILE, metavar="N", panel=BUDGET)
    tokens: int = setting(0, help=TOKENS, at_least=0, at_most=512, shown=USUAL_TOKENS, panel=BUDGET)
    trials: int = setting(MOST_TRIALS, help="Students that are trained, at most.", at_least=1, panel=TRIALS)
    sampler: Sampler = setting(
        "tpe",
        help="What suggests the students after the first half: optuna's tree of Parzen estimators, or the LSTM of the papers, which learns "
        "by REINFORCE.",
        panel=TRIALS,
    )
    trial_steps: int = setting(
        TRIAL_STEPS,
        help="Steps of training each on the teacher's soft labels and the labels.",
        at_least=1,
        panel=TRIALS,
    )
    most_minutes: float = setting(
        MOST_MINUTES, help="No training begins after so many minutes of them.", above=0, panel=TRIALS
    )
    soft_weight: float = setting(
        SOFT_WEIGHT,
        help="Share of the soft labels in the loss; the labels have the rest.",
        at_least=0,
        at_most=1,
        panel=TRIALS,
    )
    student_learning_rate: float = setting(
        4e-4, help="Peak learning rate of training the students.", above=0, panel=TRIALS
    )
    max_length: int = setting(
        0, help="Longest text in tokens.", at_least=0, shown="what the teacher takes, at most 512", panel=DATA
    )
    new_head: bool = setting(False, help="Fine-tune a new head even if the teacher already has one.", panel=TEACHER)
    teacher_epochs: int | None = setting(
        None, help="Epochs of fine-tuning the teacher, at most.", at_least=1, at_most=1_000_000,
        shown=f"5, and at least {LEAST_TUNING_STEPS:,} steps", panel=TEACHER,
    )  # fmt: skip
    teacher_learning_rate: float = setting(
        1e-4, help="Peak learning rate of fine-tuning the teacher.", above=0, panel=TEACHER
    )
    batch: int = setting(32, help="Texts a step.", at_least=1, at_most=1_000_000, panel=MACHINE)
    device: TrainingDevice = setting("auto", help=DEVICE, panel=MACHINE)
    threads: int = setting(0, help=THREADS, at_least=0, at_most=4096, shown=ALL_CORES, panel=MACHINE)
    precision: TrainingPrecision = setting("auto", help=PRECISION, panel=MACHINE)
    seed: int = setting(0, help=SEED, at_least=0, at_most=2**32 - 1, panel=MACHINE)

    def __post_init__(self) -> None:
        check(self)
