"""The settings of `stillroom compare`."""

from dataclasses import dataclass
from typing import Literal

from compress.models.shapes import STUDENTS
from compress.settings import (
    ALL_CORES,
    CORPUS,
    DATA,
    DEVICE,
    LEAST_TUNING_STEPS,
    MACHINE,
    PRECISION,
    REVISION,
    SHAPES,
    SPLITS,
    STUDENT,
    TASK_METHODS,
    TASKS,
    TEACHER,
    TEXT_METHODS,
    THREADS,
    WHAT,
    DataSet,
    TrainingDevice,
    TrainingPrecision,
)  # fmt: skip
from export.settings import GATE
from serve.options import check, setting

BUNDLE = "Bundle, for --export"
TEACHER_GATE = 0.97  # as `run`
# A checkpoint has a shape of its own, and `layer-map` belongs to methods with a map.
STARTS = ("spread", "alternate", "first", "last", "random")


@dataclass(frozen=True, kw_only=True)
class Comparison(DataSet):
    """Settings of `stillroom compare`."""

    teacher: str = setting(help="Transformers folder or Hub name.", panel=WHAT)
    revision: str = setting("", help=REVISION, shown="its main branch", panel=WHAT)
    task: str = setting(help="What the models answer.", choices=TASKS, panel=WHAT)
    data: str = setting(help=SPLITS, panel=WHAT)
    out: str = setting(
        metavar="FOLDER",
        help="Folder for compare.json, report.html and table.md; trainings live in OUT/work.",
        panel=WHAT,
    )
    export: Literal["none", "best"] = setting(
        "none",
        help="Whether the student that is best on validation becomes a bundle, OUT/bundle; on a finished comparison nothing else "
        "is done.",
        panel=WHAT,
    )
    methods: tuple[str, ...] = setting(
        help="A method (docs/reference/methods.md); minilm@12x384 trains an assistant of that shape first.",
        suggested=(*TEXT_METHODS, *TASK_METHODS),
        flag="--method",
        metavar="NAME",
        panel=WHAT,
    )
    students: tuple[str, ...] = setting(
        ("3x384",), help=SHAPES, suggested=tuple(STUDENTS), flag="--student", metavar="SHAPE", panel=WHAT
    )
    seeds: int = setting(3, help="Trainings of each row of the table.", at_least=1, at_most=1000, panel=WHAT)
    corpus: tuple[str, ...] = setting((), help=CORPUS, metavar="FILE", panel=DATA)
    source_data: str = setting(
        "", help="Data of the task from which a method transfers: a folder or name as --data.", panel=DATA
    )
    source_task: str = setting("", help="The task of --source-data.", choices=TASKS, shown="that of --task", panel=DATA)
    max_length: int = setting(
        0, help="Longest text of the task in tokens.", at_least=0, shown="what the teacher takes", panel=DATA
    )
    tokens: int = setting(128, help="Longest piece of the corpus, in tokens.", at_least=8, panel=DATA)
    starts: tuple[str, ...] = setting(
        ("spread",),
        help="Layers of the teacher that students start from where they fit; random are new ones. May be given again to compare several.",
        choices=STARTS,
        flag="--start",
        panel=STUDENT,
    )
    teacher_layers: tuple[int, ...] = setting(
        (),
        help="Teacher layer whose relations are learned, from 1, for methods that learn those of one layer. May be given again to "
        "compare several.",
        at_least=1,
        flag="--teacher-layer",
        shown="the layer that the student's last one starts from, or the papers' choice",
        panel=STUDENT,
    )
    distill_tokens: tuple[int, ...] = setting(
        (1_000_000,),
        help="Tokens of plain text, for methods that learn from it. May be given again to compare several.",
        at_least=1,
        panel=STUDENT,
    )
    label_learning_rates: tuple[float, ...] = setting(
        (),
        help="Peak learning rate of the last training on the task. May be given again: seed 0 of every row trains with each, the best on "
        "validation is taken for all seeds of the row, and every value but one costs each row a further training. One value: no choice.",
        above=0,
        flag="--label-learning-rate",
        shown="two, half and one and a half of the stage's own: 0.0002 and 0.0006 on labels",
        panel=STUDENT,
    )
    task_tokens: int = setting(
        1_000_000, help="Tokens of the task's text that every training reads.", at_least=1, panel=STUDENT
    )
    teacher_epochs: int | None = setting(
        None, help="Epochs of fine-tuning the teacher, at most.", at_least=1, at_most=1_000_000,
        shown=f"5, and at least {LEAST_TUNING_STEPS:,} steps",
        panel=TEACHER,
    )  # fmt: skip
    teacher_learning_rate: float = setting(
        1e-4, help="Peak learning rate of fine-tuning the teacher.", above=0, panel=TEACHER
    )
    gate: float = setting(
        GATE, help="Least share of the fp32 metric that int8 keeps, for --export.", at_least=0, at_most=1, panel=BUNDLE
    )
    teacher_gate: float = setting(
        TEACHER_GATE,
        help="Least share of the teacher's metric, on validation, for --export.",
        at_least=0,
        at_most=1,
        panel=BUNDLE,
    )
    latency_seconds: float = setting(
        20.0, help="Seconds for timing the bundle's variants; 0 skips it.", at_least=0, panel=BUNDLE
    )
    batch: int = setting(32, help="Texts a step.", at_least=1, at_most=1_000_000, panel=MACHINE)
    device: TrainingDevice = setting("auto", help=DEVICE, panel=MACHINE)
    threads: int = setting(
        0, help=THREADS, at_least=0, at_most=4096, shown=f"{ALL_CORES}, shared by the jobs", panel=MACHINE
    )
    jobs: int = setting(1, help="Trainings at once.", at_least=1, at_most=4096, panel=MACHINE)
    precision: TrainingPrecision = setting("auto", help=PRECISION, panel=MACHINE)

    def __post_init__(self) -> None:
        check(self)
