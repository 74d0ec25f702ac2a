"""The settings of `stillroom transfer`."""

from dataclasses import dataclass
from typing import ClassVar

from compress.settings import FineTunedTeacher, Output, TaskSettings
from serve.options import again, setting
from stillroom.settings.compare import Comparison
from stillroom.settings.search import Searching

FORM = "[NAME=]TASK:DATA"


@dataclass(frozen=True, kw_only=True)
class Transferring(FineTunedTeacher):
    """Settings of `stillroom transfer`."""

    sources: tuple[str, ...] = setting(
        help="A task to distil a student on first: TASK is text-classification or token-classification, DATA a folder with train, "
        "validation and test files or a `datasets` name, NAME what tables call it (otherwise the last part of DATA).",
        flag="--source", metavar=FORM,
    )  # fmt: skip
    targets: tuple[str, ...] = setting(
        help="A task to train the student on after that, named the same way.",
        flag="--target", metavar=FORM,
    )  # fmt: skip
    out: str = again(Output, "out", help="Folder for transfer.json and transfer.html; trainings are kept in OUT.work.")
    student: str = again(TaskSettings, "student", "3x384", shown=None)
    seeds: int = again(Comparison, "seeds", help="Trainings of each cell of the table and each point of a curve.")
    labels: tuple[int, ...] = setting(
        (10, 50, 100, 500), help="Labelled texts of the target that a point of its curve learns from; all of them are one more point.",
        at_least=1,
    )  # fmt: skip
    teacher_epochs: int | None = again(
        FineTunedTeacher, "teacher_epochs", help="Epochs of fine-tuning the teacher on a source, at most."
    )
    source_steps: int = setting(
        1_000, help="Steps of distilling a student on a source, all stages together.", at_least=10
    )
    target_steps: int = setting(
        300, help="Steps of training the student on a target, however many labels it has.", at_least=1
    )
    target_learning_rate: float = setting(4e-4, help="Peak learning rate on a target.", above=0)
    most_minutes: float = again(Searching, "most_minutes", 240.0)
    layout: ClassVar = {
        "What to make": "teacher revision sources targets out student seeds",
        "Data": "labels max_length",
        "Teacher": "teacher_epochs teacher_learning_rate",
        "Student": "source_steps target_steps target_learning_rate",
        "Machine": "most_minutes batch device threads precision",
    }
