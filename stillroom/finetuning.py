"""`stillroom finetune`: a model with a head for a task, trained on labels, or on a teacher's soft labels and them."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compress.examples import check_task
from compress.initialise import check_same_tokens, shape_in
from compress.schedules import preset_of
from compress.teacher import load, open_model
from compress.trackers import check_trackers
from serve.errors import BadInput
from stillroom import training
from stillroom.ground import Ground, prepare, same_bits, texts_mark, trained_with
from stillroom.recipe import Recipe, resolve
from stillroom.show import say
from stillroom.stages import Work, fingerprint, free_target


@dataclass(frozen=True)
class FineTuning:
    """Settings of `stillroom finetune`."""

    task: str
    data: str
    teacher: str = ""  # fine-tuned on the task; none trains on labels alone
    unlabelled: tuple[str, ...] = ()  # files of in-domain text that the teacher labels
    schedule: str = ""  # of a paper, by name: what is not given below is as it says
    epochs: float | None = None  # over the labelled text, at most; 5 unless given
    patience: int = 2  # epochs without a new best on validation before it stops; 0 never stops early
    learning_rate: float | None = None  # 1e-4 unless given
    batch: int | None = None  # 32 unless given
    max_length: int = 0  # tokens; 0 is the longest that the model takes
    temperature: float | None = None  # of the soft labels; 2 unless given
    soft_weight: float | None = None  # of the soft labels; 0.9 unless given, and the labels have the rest
    new_head: bool = False  # a new head even where the model has one for other labels
    seed: int = 0
    threads: int = 0  # 0 is all that this process may use
    precision: str = "auto"
    accumulate: int = 1  # parts that a step's batch is cut into, for memory; what is learned is the same
    trackers: tuple[str, ...] = ()  # where metrics go beside metrics.jsonl: tensorboard, wandb, mlflow


def _resolved(settings: FineTuning) -> FineTuning:
    """`settings` with what they leave open as the schedule says, or as usual.

    Raises:
        BadInput: a schedule that is not known, a number out of its range, or settings of a teacher without one.
    """
    for flag, value, meaning in (
        ("--unlabelled", settings.unlabelled, "is text that a teacher labels"),
        ("--temperature", settings.temperature, "is of a teacher's soft labels"),
        ("--soft-weight", settings.soft_weight, "is of a teacher's soft labels"),
    ):
        if value not in (None, ()) and not settings.teacher:
            raise BadInput(f"{flag} {meaning}, and no --teacher was given. Give one, or leave it out.")
    usual = {"epochs": 5.0, "learning_rate": 1e-4, "batch": 32, "temperature": 2.0, "soft_weight": 0.9}
    if settings.schedule:
        preset = preset_of(settings.schedule, "fine-tuning")
        usual |= {"epochs": preset.epochs, "learning_rate": preset.learning_rates[0], "batch": preset.batch}
        settings = dataclasses.replace(settings, max_length=settings.max_length or preset.tokens)
    left_open: dict[str, Any] = {name: value for name, value in usual.items() if getattr(settings, name) is None}
    settings = dataclasses.replace(settings, **left_open)
    counts = (settings.batch or 0, settings.accumulate, settings.patience + 1)
    if not (settings.epochs or 0) > 0 or not (settings.learning_rate or 0) > 0 or min(counts) < 1:
        raise BadInput(
            "--epochs and --learning-rate are above 0, --batch and --accumulate whole numbers from 1, "
            "--patience from 0 (which never stops early)."
        )
    check_trackers(settings.trackers)
    return settings


def fine_tune(model: str, out: Path, settings: FineTuning) -> Path:
    """See `stillroom.verbs.finetune`."""
    target = free_target(out)
    settings = _resolved(settings)
    ground, teacher = _grounds(model, target, settings)
    for warning in ground.warnings:
        say(f"warning: {warning}")
    same_bits(ground.recipe.threads)
    mark = fingerprint(
        "finetune", ground.teacher_mark, teacher.teacher_mark if teacher else "", ground.data_mark, list(ground.labels),
        texts_mark(ground.unlabelled), ground.recipe.threads, ground.recipe.precision, trained_with(),
        dataclasses.asdict(settings) | {"teacher": "", "data": "", "unlabelled": "", "trackers": ()},
    )  # fmt: skip
    work = Work(target.with_name(target.name + ".finetune-work"))
    with work.locked():
        soft = None
        if teacher:
            make = partial(training.make_teacher, ground=teacher, steps=0)
            labeller = work.stage("teacher", fingerprint(mark, "teacher"), make)
            label = partial(training.make_soft_labels, ground=teacher, teacher=labeller)
            soft = work.stage("soft-labels", fingerprint(mark, "soft labels"), label)
        train = partial(_train, ground=ground, teacher=teacher, soft_labels=soft, settings=settings)
        folder = work.stage("model", mark, train)
        work.hand_over(folder, target)
    return target


def _grounds(model: str, out: Path, settings: FineTuning) -> tuple[Ground, Ground | None]:
    """What the model stands on, and what its teacher does."""
    opened = open_model(model, role="--model")
    recipe = dataclasses.replace(_recipe(model, out, settings), student=str(shape_in(opened)))
    ground = prepare(dataclasses.replace(recipe, new_head=settings.new_head), role="--model")
    if not settings.teacher:
        return ground, None
    length = ground.max_length
    teacher = prepare(dataclasses.replace(recipe, teacher=settings.teacher, max_length=length))
    if not teacher.teacher_has_head:
        raise BadInput(
            f"--teacher {settings.teacher} has no head for {settings.task}; it is to be fine-tuned on the task already. "
            f"Do that first: stillroom finetune --model {settings.teacher} ..."
        )
    if teacher.labels != ground.labels:
        # The order of labels is the teacher's; a head of the model's own in another order would be read wrongly.
        if ground.teacher_has_head:
            raise BadInput(
                f"--model {model} has a head for {', '.join(ground.labels[:5])} ..., in another order or of other labels than "
                f"--teacher {settings.teacher}. Give --new-head."
            )
        ground = dataclasses.replace(ground, labels=teacher.labels)
    check_same_tokens(teacher.opened, ground.opened)
    return ground, teacher


def _recipe(model: str, out: Path, settings: FineTuning) -> Recipe:
    """The recipe of a run whose teacher is the model: it reads, checks and trains as `stillroom run` does."""
    names = (
        "task",
        "data",
        "batch",
        "max_length",
        "seed",
        "threads",
        "precision",
        "accumulate",
        "temperature",
        "soft_weight",
    )
    same = {name: getattr(settings, name) for name in names}
    files = {"teacher": model, "out": str(out), "unlabelled": settings.unlabelled}
    others = {"student_learning_rate": settings.learning_rate, "trackers": tuple(settings.trackers)}
    return resolve({}, same | files | others)


def _train(
    folder: Path, ground: Ground, teacher: Ground | None, soft_labels: Path | None, settings: FineTuning
) -> None:
    task = check_task(settings.task)
    torch.manual_seed(settings.seed)
    labels = None if ground.teacher_has_head else ground.labels
    model = load(ground.opened, task, labels, multi_label=ground.splits.multi_label)
    soft = training.read_soft_labels(soft_labels, teacher) if soft_labels and teacher else None
    recipe = ground.recipe
    steps = max(1, round(-(-len(ground.train) // recipe.batch) * (settings.epochs or 0)))  # epochs are known by now
    patience = settings.patience or None
    rate = recipe.student_learning_rate
    progress = training.on_task(model, folder, ground, steps, rate, "fine-tuning", patience=patience, soft=soft)
    details = {"role": "fine-tuned", "model": ground.opened.public_name, "method": "labels"}
    if teacher:
        details |= {"method": "soft labels", "teacher": teacher.opened.public_name}
    training.save(model, folder, ground, progress, details)
