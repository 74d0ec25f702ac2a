"""The settings of `stillroom transfer`."""

from dataclasses import dataclass

from compress.models.shapes import STUDENTS
from compress.settings import (
    ALL_CORES,
    DATA,
    DEVICE,
    LEAST_TUNING_STEPS,
    MACHINE,
    PRECISION,
    REVISION,
    SHAPES,
    STUDENT,
    TEACHER,
    THREADS,
    WHAT,
    TrainingDevice,
    TrainingPrecision,
)  # fmt: skip
from serve.options import check, setting

FORM = "[NAME=]TASK:DATA"


@dataclass(frozen=True, kw_only=True)
class Transferring:
    """Settings of `stillroom transfer`."""

    teacher: str = setting(help="Transformers folder or Hub name of a BERT-like encoder.", panel=WHAT)
    revision: str = setting("", help=REVISION, shown="its main branch", panel=WHAT)
    sources: tuple[str, ...] = setting(
        help="A task to distil a student on first: TASK is text-classification or token-classification, DATA a folder with train, "
        "validation and test files or a `datasets` name, NAME what tables call it (otherwise the last part of DATA).",
        flag="--source", metavar=FORM, panel=WHAT,
    )  # fmt: skip
    targets: tuple[str, ...] = setting(
        help="A task to train the student on after that, named the same way.",
        flag="--target", metavar=FORM, panel=WHAT,
    )  # fmt: skip
    out: str = setting(
        metavar="FOLDER", help="Folder for transfer.json and transfer.html; trainings are kept in OUT.work.", panel=WHAT
    )
    student: str = setting("3x384", help=SHAPES, suggested=tuple(STUDENTS), metavar="SHAPE", panel=WHAT)
    seeds: int = setting(
        3, help="Trainings of each cell of the table and each point of a curve.", at_least=1, at_most=1000, panel=WHAT
    )
    labels: tuple[int, ...] = setting(
        (10, 50, 100, 500), help="Labelled texts of the target that a point of its curve learns from; all of them are one more point.",
        at_least=1, panel=DATA,
    )  # fmt: skip
    max_length: int = setting(
        0, help="Longest text in tokens.", at_least=0, shown="what the teacher takes, at most 512", panel=DATA
    )
    teacher_epochs: int | None = setting(
        None, help="Epochs of fine-tuning the teacher on a source, at most.", at_least=1, at_most=1_000_000,
        shown=f"5, and at least {LEAST_TUNING_STEPS:,} steps", panel=TEACHER,
    )  # fmt: skip
    teacher_learning_rate: float = setting(
        1e-4, help="Peak learning rate of fine-tuning the teacher.", above=0, panel=TEACHER
    )
    source_steps: int = setting(
        1_000, help="Steps of distilling a student on a source, all stages together.", at_least=10, panel=STUDENT
    )
    target_steps: int = setting(
        300, help="Steps of training the student on a target, however many labels it has.", at_least=1, panel=STUDENT
    )
    target_learning_rate: float = setting(4e-4, help="Peak learning rate on a target.", above=0, panel=STUDENT)
    most_minutes: float = setting(
        240.0, help="No training begins after so many minutes of them.", above=0, panel=MACHINE
    )
    batch: int = setting(32, help="Texts a step.", at_least=1, at_most=1_000_000, panel=MACHINE)
    device: TrainingDevice = setting("auto", help=DEVICE, panel=MACHINE)
    threads: int = setting(0, help=THREADS, at_least=0, at_most=4096, shown=ALL_CORES, panel=MACHINE)
    precision: TrainingPrecision = setting("auto", help=PRECISION, panel=MACHINE)

    def __post_init__(self) -> None:
        check(self)
