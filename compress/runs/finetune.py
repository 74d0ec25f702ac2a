"""Fine-tunes a model with a head for a task, on labels, or on labels and a teacher's soft labels."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from compress import distributed
from compress.data.examples import GENERATION
from compress.data.label_checks import some
from compress.input_errors import Faults
from compress.models.initialise import check_same_tokens, shape_in
from compress.models.pretrained import open_model
from compress.progress import Notify, message, silent
from compress.runs import task_stages
from compress.runs.finetune_generator import fine_tune_generator, refuse_generation_settings
from compress.runs.hardware import same_bits
from compress.runs.input_summary import log_inputs
from compress.runs.lineage import read_lineage
from compress.runs.open_task import open_task
from compress.runs.resumable_stages import Workdir, free_target
from compress.runs.soft_labels import make_soft_labels, read_soft_labels
from compress.runs.stages import (
    Of,
    RunStage,
    check_same_inputs,
    make_checkpoint,
    texts_fingerprint,
    trained_with,
)
from compress.runs.task_inputs import TaskInputs, steps_of
from compress.settings import LEAST_TUNING_STEPS, WHERE_DATA_IS, FineTuning, TaskSettings, filled_in
from serve.errors import BadInput
from serve.files import path_beside
from serve.options import make, rule_faults


def finetune(model: str, task: str, data: str, out: Path | str, *, progress: Notify = silent, **settings: Any) -> Path:
    """Fine-tune a model on a task, on labels and optionally a teacher's soft labels, and write it as a checkpoint with a head.

    Settings are the fields of `FineTuning`: teacher, unlabelled, epochs, and so on. The weights that scored best on validation
    are kept. After a kill, the same call resumes from the last checkpoint. `progress` is called with each `Event`. Returns `out`.
    Raises BadInput: the model, the teacher or the data cannot be used, or model and teacher have different tokenizers.
    """
    places = {"model": model, "task": task, "data": data, "out": out}
    return fine_tune(make(FineTuning, places | settings), progress)


def fine_tune(settings: FineTuning, notify: Notify = silent) -> Path:
    """See `finetune`."""
    notify = notify if distributed.main() else silent  # only the main process reports
    if settings.task == GENERATION:
        return fine_tune_generator(settings, notify)
    refuse_generation_settings(settings)
    target = free_target(Path(settings.out))
    faults = Faults()
    faults.messages += rule_faults(settings)
    faults.raise_if_any()
    settings = filled_in(settings)
    inputs, teacher = _opened(target, settings, notify)
    steps = steps_of(settings.epochs, 5, LEAST_TUNING_STEPS, inputs.steps_per_epoch)
    log_inputs(inputs, {"fine-tuning": steps}, partial(message, notify))
    here = inputs.settings
    same_bits(here.threads)
    check_same_inputs(
        dataclasses.replace(settings, precision=here.precision, device=here.device),
        inputs.contents | ({"--teacher": teacher.teacher_fingerprint} if teacher else {}),
    )
    distributed.join(here.device)
    workdir = Workdir(path_beside(target, ".finetune-work"), notify)
    folders: dict[str, Path] = {}
    return make_checkpoint(workdir, _stages(inputs, teacher, settings, steps, folders), folders, target)


def _stages(
    inputs: TaskInputs, teacher: TaskInputs | None, settings: FineTuning, steps: int, folders: Mapping[str, Path]
) -> list[RunStage]:
    """The teacher with its head and its soft labels, if there is one to ask, and the model. Finished ones are in `folders`."""
    made_of = (
        "finetune", inputs.teacher_fingerprint, teacher.teacher_fingerprint if teacher else "",
        inputs.answers.fingerprint if inputs.answers else "", inputs.splits.fingerprint,
        list(inputs.labels), texts_fingerprint(inputs.unlabelled), inputs.settings.threads, inputs.settings.precision,
        trained_with(inputs.settings.device),
        *([example.language for example in inputs.splits.train] if settings.language_temperature != 1 else []),
        # The contents of these are fingerprinted above; trackers do not change the training.
        dataclasses.asdict(settings)
        | dict.fromkeys(
            ("model", "data", "out", "teacher", "teacher_labels", "unlabelled", "trackers", "device", "revision", *WHERE_DATA_IS), ""
        ),
    )  # fmt: skip

    def train(folder: Path) -> None:
        soft = inputs.answered.soft if inputs.answered else None
        if teacher:
            soft = read_soft_labels(folders["soft-labels"], teacher)
        model = task_stages.model_with_head(inputs)
        progress = task_stages.on_task(
            model, folder, inputs, steps, inputs.settings.student_learning_rate, "fine-tuning",
            patience=settings.patience or None, soft=soft, soft_weight=inputs.settings.soft_weight or 0.0,
        )  # fmt: skip
        opened = inputs.opened
        details = {"role": "fine-tuned", "model": opened.public_name, "model_revision": opened.revision}
        task_stages.save(model, folder, inputs, progress, details | _teacher_facts(inputs, teacher))

    model = RunStage("model", made_of, train)
    if not teacher:
        return [model]
    asked = teacher
    return [
        RunStage(
            "teacher",
            (Of("model"), "teacher"),
            lambda folder: task_stages.make_teacher(folder, asked, steps=0),
        ),
        RunStage(
            "soft-labels",
            (Of("model"), "soft labels"),
            lambda folder: make_soft_labels(folder, asked, folders["teacher"]),
        ),
        model,
    ]


def finetune_result(checkpoint: Path) -> dict[str, Any]:
    """The result of `finetune`: `{checkpoint, metric, value, examples, step, steps, model, method}`.

    `value` is the score of the kept weights, those of step `step`, on the `examples` texts of validation.
    """
    lineage = read_lineage(checkpoint)
    validated = dict(lineage["validation"])
    return {
        "checkpoint": str(checkpoint),
        "metric": lineage["metric"],
        "value": validated[lineage["best_step"]],
        "examples": lineage["validation_texts"],
        "step": lineage["best_step"],
        "steps": max(validated),
        **{name: lineage[name] for name in ("model", "method")},
    }


def result_line(result: dict[str, Any]) -> str:
    """The result of `finetune_result` as one line of text."""
    return (
        f"validation: {result['metric']} {result['value']:.4f} on {result['examples']} texts, best after {result['step']} of "
        f"{result['steps']} steps"
    )


def _opened(target: Path, settings: FineTuning, notify: Notify) -> tuple[TaskInputs, TaskInputs | None]:
    """The inputs of the model's training, and those of the teacher's labelling if there is a teacher to ask."""
    opened = open_model(settings.model, role="--model", revision=settings.revision)
    # The model takes the place of the teacher, and is its own student.
    common = {each.name for each in dataclasses.fields(TaskSettings)} & {
        each.name for each in dataclasses.fields(settings)
    }
    given = TaskSettings(
        **{name: getattr(settings, name) for name in common}
        | {
            "teacher": settings.model,
            "student": str(shape_in(opened)),
            "student_learning_rate": settings.learning_rate,
        }
    )
    inputs = open_task(given, target, role="--model", notify=notify)
    if not settings.teacher:
        return inputs, None
    from_teacher = dataclasses.replace(
        given, teacher=settings.teacher, max_length=inputs.max_length, revision="", new_head=False
    )
    teacher = open_task(from_teacher, target, notify=notify)
    if not teacher.teacher_has_head:
        raise BadInput(
            f"--teacher {settings.teacher} has no head for {settings.task}; a teacher fine-tuned on the task is needed. "
            f"Fine-tune it first: stillroom finetune --model {settings.teacher} ..."
        )
    if teacher.labels != inputs.labels:
        # Soft labels follow the teacher's order of labels, so the model's own head must have the same order.
        if inputs.teacher_has_head:
            raise BadInput(
                f"--model {settings.model} has a head for {some(inputs.labels)}; --teacher {settings.teacher} has other labels or another "
                "order of them. Give --new-head to make a new head for the teacher's labels."
            )
        inputs = dataclasses.replace(inputs, labels=teacher.labels)
    check_same_tokens(teacher.opened, inputs.opened)
    return inputs, teacher


def _teacher_facts(inputs: TaskInputs, teacher: TaskInputs | None) -> dict[str, Any]:
    """The method and the teacher as the lineage names them."""
    if teacher:
        opened = teacher.opened
        return {"method": "soft labels", "teacher": opened.public_name, "teacher_revision": opened.revision}
    answers, answered = inputs.answers, inputs.answered
    if not (answers and answered):
        return {"method": "labels"}
    return {
        "method": "soft labels",
        "teacher": answers.public_name,
        "teacher_answers": {"sha256": answers.fingerprint, "texts": len(answers)},
        "teacher_on_validation": dataclasses.asdict(answered.on_validation) if answered.on_validation else None,
    }
