"""A model with a head for a task, trained on labels, or on a teacher's soft labels and them."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compress import distributed
from compress.data.examples import check_task
from compress.engine import task_stages
from compress.engine.fingerprints import fingerprint, texts_fingerprint, trained_with
from compress.engine.hardware import same_bits
from compress.engine.resumable_stages import Workdir, check_writable, free_target
from compress.engine.task_inputs import TaskInputs, open_task
from compress.engine.task_settings import WHERE_DATA_IS, TaskSettings, typed
from compress.input_errors import refuse_unknown
from compress.methods.presets import preset_of
from compress.models.initialise import check_same_tokens, shape_in
from compress.models.pretrained import load, open_model
from compress.progress import Notify, message, silent
from compress.training.trackers import check_trackers
from serve.errors import BadInput


@dataclass(frozen=True)
class FineTuning:
    """Settings of `finetune`."""

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
    text_column: str = ""  # what the column of the text is called; `text` unless given
    text_pair_column: str = ""  # of the second text; `text_pair` unless given
    label_column: str = ""  # of the label; `label` unless given
    entities_column: str = ""  # of the entities; `entities` unless given
    tokens_column: str = ""  # of the words that have a tag each; `tokens` unless given
    tags_column: str = ""  # of their tags; `tags` or `ner_tags` unless given
    data_revision: str = ""  # branch, tag or commit of a data set on the Hub; its main branch unless given


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


def finetune(model: str, task: str, data: str, out: Path | str, *, progress: Notify = silent, **settings: Any) -> Path:
    """Fine-tune a model on a task, on labels or on a teacher's soft labels too, and write it as a checkpoint with a head.

    Settings are the fields of `FineTuning`: teacher, unlabelled, epochs, and so on. The weights that did best on validation
    are kept. A killed call goes on from its last checkpoint when it is made again. `progress` hears each `Event`. Returns `out`.

    Raises:
        BadInput: the model, the teacher or the data cannot be used, or the two read text in different ways.
    """
    refuse_unknown("finetune", settings, FineTuning)
    return fine_tune(model, Path(out), FineTuning(task, data, **settings), progress)


def fine_tune(model: str, out: Path, settings: FineTuning, notify: Notify = silent) -> Path:
    """See `finetune`."""
    notify = notify if distributed.main() else silent  # of several processes one speaks for all
    target = free_target(out)
    settings = _resolved(settings)
    inputs, teacher = _opened(model, target, settings, notify)
    for warning in inputs.warnings:
        message(notify, f"warning: {warning}")
    same_bits(inputs.settings.threads)
    run_fingerprint = fingerprint(
        "finetune", inputs.teacher_fingerprint, teacher.teacher_fingerprint if teacher else "", inputs.data_fingerprint,
        list(inputs.labels), texts_fingerprint(inputs.unlabelled), inputs.settings.threads, inputs.settings.precision, trained_with(),
        dataclasses.asdict(settings) | {"teacher": "", "data": "", "unlabelled": "", "trackers": ()} | dict.fromkeys(WHERE_DATA_IS, ""),
    )  # fmt: skip
    workdir = Workdir(target.with_name(target.name + ".finetune-work"))
    with workdir.locked():
        soft = None
        if teacher:
            make = partial(task_stages.make_teacher, inputs=teacher, steps=0)
            labeller = workdir.stage("teacher", fingerprint(run_fingerprint, "teacher"), make)
            label = partial(task_stages.make_soft_labels, inputs=teacher, teacher=labeller)
            soft = workdir.stage("soft-labels", fingerprint(run_fingerprint, "soft labels"), label)
        train = partial(_train, inputs=inputs, teacher=teacher, soft_labels=soft, settings=settings)
        folder = workdir.stage("model", run_fingerprint, train)
        workdir.publish(folder, target)
    return target


def _opened(model: str, target: Path, settings: FineTuning, notify: Notify) -> tuple[TaskInputs, TaskInputs | None]:
    """What the model is trained on, and, where there is a teacher, what that labels with."""
    opened = open_model(model, role="--model")
    given = dataclasses.replace(_task_settings(model, settings), student=str(shape_in(opened)))
    inputs = open_task(
        dataclasses.replace(given, new_head=settings.new_head),
        target,
        role="--model",
        more_checks=[lambda: check_writable(target)],
        notify=notify,
    )
    if not settings.teacher:
        return inputs, None
    from_teacher = dataclasses.replace(given, teacher=settings.teacher, max_length=inputs.max_length)
    teacher = open_task(from_teacher, target, notify=notify)
    if not teacher.teacher_has_head:
        raise BadInput(
            f"--teacher {settings.teacher} has no head for {settings.task}; it is to be fine-tuned on the task already. "
            f"Do that first: stillroom finetune --model {settings.teacher} ..."
        )
    if teacher.labels != inputs.labels:
        # The order of labels is the teacher's; a head of the model's own in another order would be read wrongly.
        if inputs.teacher_has_head:
            raise BadInput(
                f"--model {model} has a head for {', '.join(inputs.labels[:5])} ..., in another order or of other labels than "
                f"--teacher {settings.teacher}. Give --new-head."
            )
        inputs = dataclasses.replace(inputs, labels=teacher.labels)
    check_same_tokens(teacher.opened, inputs.opened)
    return inputs, teacher


def _task_settings(model: str, settings: FineTuning) -> TaskSettings:
    """The settings of training on a task whose teacher is the model itself.

    Raises:
        BadInput: a setting that must be given is not, has the wrong type, or is out of its range.
    """
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
        *WHERE_DATA_IS,
    )
    same = {name: getattr(settings, name) for name in names}
    others = {
        "teacher": model,
        "unlabelled": settings.unlabelled,
        "student_learning_rate": settings.learning_rate,
        "trackers": tuple(settings.trackers),
    }
    found, faults = typed(TaskSettings, same | others)
    faults += [f"--{name} is needed" for name in ("task", "data") if not getattr(found, name)]
    faults += [] if model else ["--model is needed"]
    faults += found.faults()
    if faults:
        raise BadInput("; ".join(faults) + ". `stillroom finetune --help` says what each setting is for.")
    return found


def _train(
    folder: Path, inputs: TaskInputs, teacher: TaskInputs | None, soft_labels: Path | None, settings: FineTuning
) -> None:
    task = check_task(settings.task)
    torch.manual_seed(settings.seed)
    labels = None if inputs.teacher_has_head else inputs.labels
    model = load(inputs.opened, task, labels, multi_label=inputs.splits.multi_label)
    soft = task_stages.read_soft_labels(soft_labels, teacher) if soft_labels and teacher else None
    batch, rate = inputs.settings.batch, inputs.settings.student_learning_rate
    steps = max(1, round(-(-len(inputs.train) // batch) * (settings.epochs or 0)))  # epochs are known by now
    patience = settings.patience or None
    progress = task_stages.on_task(model, folder, inputs, steps, rate, "fine-tuning", patience=patience, soft=soft)
    details = {"role": "fine-tuned", "model": inputs.opened.public_name, "method": "labels"}
    if teacher:
        details |= {"method": "soft labels", "teacher": teacher.opened.public_name}
    task_stages.save(model, folder, inputs, progress, details)
