"""The stages of training on a task: teacher, the student's start, undistilled and distilled student, and which ships."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress import distributed
from compress.data.batches import TaskText
from compress.data.examples import clusters_of
from compress.data.label_checks import one_answer_warnings
from compress.data.sampler import language_counts
from compress.evaluation.predictions import shared_row_logits
from compress.methods.catalogue import LABELS, labels_and_soft_labels, with_class_weights
from compress.models import task_heads
from compress.models.configurations import LINEAGE
from compress.models.initialise import RANDOM, is_checkpoint, open_start, student_of
from compress.models.pretrained import Opened, load, open_model
from compress.progress import advancing, message
from compress.runs.hardware import device_here, stage_settings
from compress.runs.lineage import loss_warnings, read_lineage, save_with_lineage
from compress.runs.method_chain import layers_named
from compress.runs.method_trainings import MethodInputs, with_head
from compress.runs.resumable_stages import STATE, TRAINING
from compress.runs.soft_labels import TRIAL, SoftLabels, fold_of, read_soft_labels
from compress.runs.task_inputs import TaskInputs
from compress.training.checkpoint import Progress
from compress.training.metrics import METRICS, TENSORBOARD
from compress.training.stage import train_stage, validating
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput

# Shares of the soft labels in the loss of which one is chosen, where none is given; and the part of the student's steps that
# each is tried for. With unlabelled texts none is tried: two short trainings differ by less than their noise.
SOFT_WEIGHTS, TRIAL_PART = (0.5, 0.9), 0.2
WITH_UNLABELLED = 0.9
COMPARED = "against-teacher.json"
# With fewer steps or validation texts, the error about a teacher no better than chance suggests more of these.
FEW_STEPS, FEW_TEXTS = 200, 100


def load_stage(folder: Path, inputs: TaskInputs) -> Any:
    """The model that a stage left in `folder`."""
    return load(open_model(str(folder)), inputs.task)


def with_new_head(opened: Opened, inputs: TaskInputs) -> Any:
    """The model of `opened` with a new head for the labels of `inputs`."""
    model = load(opened, inputs.task, inputs.labels)
    task_heads.start_head(model, inputs.train)
    return model


def model_with_head(inputs: TaskInputs) -> Any:
    """The opened model with a head for the labels: its own, or a new one."""
    torch.manual_seed(inputs.settings.seed)
    return load(inputs.opened, inputs.task) if inputs.teacher_has_head else with_new_head(inputs.opened, inputs)


def make_teacher(folder: Path, inputs: TaskInputs, steps: int) -> None:
    """Save the teacher with a head for the task: its own, or one fine-tuned until validation stops improving.

    Raises BadInput: its validation score is not shown to be better than chance.
    """
    settings = inputs.settings
    model, progress = model_with_head(inputs), Progress()
    if not inputs.teacher_has_head:
        progress = on_task(
            model, folder, inputs, steps, settings.teacher_learning_rate, "teacher", patience=settings.teacher_patience
        )
    reached = check_teacher(model.to(device_here(settings.device)), inputs, progress.best_step)
    details = {"role": "teacher", "fine_tuned": not inputs.teacher_has_head, "on_validation": reached}
    save(model, folder, inputs, progress, details)


def make_fold_teacher(folder: Path, inputs: TaskInputs, steps: int, fold: int) -> None:
    """Save a teacher that was fine-tuned as `make_teacher` does, but without the labelled texts of `fold`."""
    settings = inputs.settings
    torch.manual_seed(settings.seed)
    model = with_new_head(inputs.opened, inputs)
    others = np.flatnonzero(fold_of(inputs.splits.train, settings.folds, settings.seed) != fold).tolist()
    progress = on_task(
        model, folder, inputs, steps, settings.teacher_learning_rate, f"teacher without fold {fold + 1}",
        patience=settings.teacher_patience, chosen=others,
    )  # fmt: skip
    save(model, folder, inputs, progress, {"role": "teacher", "without_fold": fold})


def make_start(folder: Path, inputs: TaskInputs, teacher: Path | None) -> None:
    """Save the student before training on the task: of parts of the fine-tuned teacher where shapes allow, or a checkpoint's.

    Without a teacher to open, its parts are those of the checkpoint that was given; its head is new if that has none for the labels.
    """
    start, opened = inputs.settings.start, inputs.opened
    if is_checkpoint(start):
        begun = open_start(start, opened)
        torch.manual_seed(inputs.settings.seed)
        student = with_new_head(begun, inputs)
        origin = dict.fromkeys(("embeddings", "layers"), f"{begun.public_name}'s") | {"head": "new"}
        save(student, folder, inputs, Progress(), {"role": "start", "student": str(inputs.shape), "origin": origin})
        return
    student, origin = student_of(
        load_stage(teacher, inputs) if teacher else model_with_head(inputs),
        inputs.shape,
        seed=inputs.settings.seed,
        chosen=layers_named(start, opened.config, inputs.shape),
        new_layers=start == RANDOM,
    )
    if origin["head"] == "new":
        task_heads.start_head(student, inputs.train)
    if not teacher:
        name = opened.public_name
        origin = {
            part: of.replace("the teacher's", f"{name}'s").replace("teacher layers", f"layers of {name}:")
            for part, of in origin.items()
        } | ({} if inputs.teacher_has_head else {"head": "new"})
    save(student, folder, inputs, Progress(), {"role": "start", "student": str(inputs.shape), "origin": origin})


def check_teacher(model: Any, inputs: TaskInputs, best_step: int) -> float:
    """The validation score of the teacher `model`, which was best at `best_step`, or 0 if it was given with its head.

    Raises BadInput: the lower end of its score's interval does not exceed chance.
    """
    logits = shared_row_logits(model, inputs.validation)

    def checked() -> float:
        task = inputs.task
        gold = [task.gold_of(example) for example in inputs.splits.validation]
        answers = task.predictions(inputs.validation, logits or [])
        reached = task.metric.score(gold, answers, clusters=clusters_of(inputs.splits.validation))
        blind = task.metric.chance(gold, answers, task.constant_predictions(inputs.validation))
        message(inputs.notify, f"  teacher on validation: {inputs.metric} {reached}; chance is {blind:.4f}")
        if inputs.teacher_has_head:
            task.check_answers(inputs.opened.role + " " + inputs.opened.name, gold, answers)
        if reached.low > blind:
            return float(reached.value)
        advice = "A student would learn nothing from it. Check labels and texts, or give a better teacher."
        if alike := one_answer_warnings(inputs.splits, task):
            advice = " ".join(alike)
        elif best_step and best_step < FEW_STEPS:
            advice = (
                f"It was best after {best_step} steps of fine-tuning: give more --teacher-epochs, a smaller --batch or more labelled text. "
                "If that does not help, check labels and texts."
            )
        elif len(gold) < FEW_TEXTS:
            advice = "These are too few texts to show it: give a larger validation split. If that does not help, check labels and texts."
        raise BadInput(
            f"The teacher is not shown to be better than chance on this task: {inputs.metric} {reached} on {len(gold)} validation "
            f"texts; {blind:.4f} is possible without reading the text. {advice}"
        )

    return distributed.by_main(checked)


def make_undistilled(folder: Path, inputs: TaskInputs, start: Path, steps: int) -> None:
    """Train the same student from parts of the fine-tuned teacher on labels only, in as many steps: the control."""
    model = load_stage(start, inputs)
    rate = inputs.settings.student_learning_rate
    progress = on_task(model, folder, inputs, steps, rate, "student on labels alone")
    save(model, folder, inputs, progress, {"role": "undistilled", "method": "labels"})


def compare_with_teacher(
    folder: Path, inputs: TaskInputs, teacher: Path | None, undistilled: Path, read: TaskInputs
) -> None:
    """Save by how much the student on labels alone is better than the teacher on validation, with its paired bootstrap interval.

    `read` are the inputs as that student reads them. Without a folder the teacher is the answers of `inputs`, to all texts.
    """

    def logits_of(model: Path, texts: TaskInputs) -> Any:
        return shared_row_logits(load_stage(model, texts).to(device_here(inputs.settings.device)), texts.validation)

    ours = logits_of(undistilled, read)
    if teacher:
        theirs = logits_of(teacher, inputs)
    else:
        assert inputs.answers
        theirs = inputs.answers.logits(inputs.validation, inputs.splits.validation)
    if ours is None or theirs is None:
        return
    task = inputs.task
    gold = [task.gold_of(example) for example in inputs.splits.validation]
    said = task.predictions(read.validation, ours), task.predictions(inputs.validation, theirs)
    found = task.metric.difference(gold, *said, clusters=clusters_of(inputs.splits.validation))
    message(inputs.notify, f"  labels alone minus the teacher on validation: {inputs.metric} {found}")
    (folder / COMPARED).write_bytes(canonical_json({"value": found.value, "low": found.low, "high": found.high}))


def shown_better(folder: Path) -> bool:
    """Whether `compare_with_teacher` shows that labels alone are better than the teacher."""
    return float(json.loads((folder / COMPARED).read_text(encoding="utf-8"))["low"]) > 0


def trial_steps(steps: int) -> int:
    """Steps of the short training that tries one share of the soft labels for a training of `steps`."""
    return max(1, round(TRIAL_PART * steps))


def make_trial(
    folder: Path, inputs: TaskInputs, start: Path, soft: SoftLabels, steps: int, given: MethodInputs | None = None
) -> None:
    """Save the best validation score of a short training with this share of the soft labels; see `make_distilled`."""
    what = f"share of soft labels {soft.weight:g}"
    _, progress = _distilled(folder, inputs, start, soft, trial_steps(steps), given, what)
    reached = max(value for _, value in progress.validation)
    message(inputs.notify, f"  share {soft.weight:g}: {inputs.metric} {reached:.4f} on validation")
    (folder / TRIAL).write_bytes(canonical_json({"validation": reached}))


def make_distilled(
    folder: Path,
    inputs: TaskInputs,
    start: Path,
    soft: SoftLabels | None,
    steps: int,
    given: MethodInputs | None = None,
) -> None:
    """Train the student on labels, and on the teacher's soft labels if these are given.

    `given` is what the stages before it read: `start` is then a student without a head for the task.
    """
    model, progress = _distilled(folder, inputs, start, soft, steps, given, "student")
    details = {"role": "distilled", "method": method_name(inputs)} | ({"soft_labels": soft.lineage} if soft else {})
    save(model, folder, inputs, progress, details)


def _distilled(
    folder: Path,
    inputs: TaskInputs,
    start: Path,
    soft: SoftLabels | None,
    steps: int,
    given: MethodInputs | None,
    what: str,
) -> tuple[Any, Progress]:
    """The trained student and how its training went."""
    model = with_head(start, given.labelled["task"], given, keeps=False) if given else load_stage(start, inputs)
    rate = inputs.settings.student_learning_rate
    if not soft:
        return model, on_task(model, folder, inputs, steps, rate, what)
    logits = read_soft_labels(soft.folder, inputs)
    return model, on_task(model, folder, inputs, steps, rate, what, soft=logits, soft_weight=soft.weight)


def on_task(
    model: Any,
    folder: Path,
    inputs: TaskInputs,
    steps: int,
    learning_rate: float,
    what: str,
    *,
    patience: int | None = None,
    soft: list[np.ndarray] | None = None,
    soft_weight: float = 0.0,
    chosen: Sequence[int] | None = None,
    validate_every: int = 0,
) -> Progress:
    """Train `model` on the task of `inputs`: on labels, and on the teacher's logits `soft` of `inputs.soft_labelled` if given.

    It ends with the weights that scored best on validation. `soft_weight` is the share of the soft labels in the loss of a labelled text;
    the other texts have soft labels alone, and all count alike. Of the labelled texts only the `chosen` are read, if these are given. The
    weights are scored every `validate_every` steps; 0 is as often as `inputs` say.
    """
    given = inputs.settings
    labelled, examples = inputs.train, inputs.splits.train
    if chosen is not None:
        labelled, examples = labelled.take(chosen), [examples[i] for i in chosen]
    if labelled.owners is not None:  # a row for each window
        examples = [examples[owner] for owner in labelled.owners]
    texts = labelled if soft is None or inputs.in_domain is None else labelled + inputs.in_domain
    counts = None
    languages = [example.language for example in examples]
    if given.language_temperature != 1 and len(set(languages)) > 1:
        often = language_counts(languages, given.language_temperature)
        counts = np.concatenate([often, np.ones(len(texts) - len(labelled))])
    stage = LABELS if soft is None else labels_and_soft_labels(soft_weight, given.temperature)
    if given.class_weights:
        stage = with_class_weights(stage, np.concatenate(labelled.targets))
    every = min(steps, validate_every or inputs.validate_every(steps))
    with advancing(inputs.notify, what) as shown:
        return train_stage(
            stage,
            None,
            model,
            TaskText(texts, given.batch, given.seed, inputs.validation.ids, soft, counts, len(labelled)),
            stage_settings(given, steps, learning_rate=learning_rate),
            folder=folder / TRAINING,
            labelled=labelled,
            validation=validating(model, inputs.validation, inputs.splits.validation, every, patience),
            report=shown.step,
        )


def save(model: Any, folder: Path, inputs: TaskInputs, progress: Progress, details: dict[str, Any]) -> None:
    """Save a checkpoint with its lineage, and report warnings about its loss."""
    warnings = loss_warnings(progress.loss, details["role"], inputs.notify)
    lineage = details | {
        "data": inputs.splits.fingerprint,
        "pairs": inputs.splits.pairs,
        "single_texts": inputs.splits.single_texts,
        "seed": inputs.settings.seed,
        "loss": progress.loss,
        "doubts": warnings,
        "metric": inputs.metric,
        "validation": progress.validation,
        "validation_texts": len(inputs.splits.validation),
        "best_step": progress.best_step,
        **({"ended": progress.ended} if progress.step else {}),
    }
    save_with_lineage(model, inputs.opened, folder, lineage, inputs.tokens_of, inputs.max_length)


def method_name(inputs: TaskInputs) -> str:
    """The method as reports name it: with what follows it on the task."""
    chain = inputs.chain
    return chain.method if chain.ends_on_task else f"{chain.method}, then {inputs.settings.then}"


def best_on_validation(folder: Path) -> float:
    """The best validation score of the training in `folder`."""
    return max(float(value) for _, value in read_lineage(folder)["validation"])


def teacher_score(inputs: TaskInputs, folder: Path | None) -> float | None:
    """The validation score of the teacher in `folder`, or without one of the answers of `inputs`, if they are to all of its texts."""
    if folder:
        return float(read_lineage(folder)["on_validation"])
    answered = inputs.answered
    return (
        float(answered.on_validation.value)
        if answered and answered.whole_validation and answered.on_validation
        else None
    )


def make_choice(
    folder: Path, inputs: TaskInputs, teacher: Path | None, distilled: Path | None, undistilled: Path | None
) -> None:
    """Copy the student that ships: of those that were trained, the best on validation.

    Labels alone ship only where they are better: a student that learned as much from its teacher may carry more of it. `teacher` is
    None where the teacher is a file of answers. The lineage gets why that student ships, and the best validation scores that decided it,
    None for what was not trained.
    """
    learned = best_on_validation(distilled) if distilled else None
    control = best_on_validation(undistilled) if undistilled else None
    labels = control is not None and (learned is None or control > learned)
    source = undistilled if labels else distilled
    assert source
    method, metric, theirs = method_name(inputs), inputs.metric, teacher_score(inputs, teacher)
    if control is None:
        why = f"No student was trained on labels alone (--no-undistilled), so nothing shows what {method} is worth."
    elif learned is None and method == "labels":
        why = f"The student was trained on labels alone, as --method labels asks: {metric} {control:.4f} on validation."
    elif learned is None:
        why = (
            f"Labels alone ship: on validation they reached {metric} {control:.4f} and the teacher {theirs:.4f}, so the student was not "
            f"distilled by {method}."
        )
    else:
        ships = "labels alone ship" if labels else f"the student of {method} ships"
        why = f"On validation {method} reached {metric} {learned:.4f} and labels alone {control:.4f}: {ships}."
    shutil.copytree(
        source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(STATE, METRICS, TENSORBOARD, TRAINING)
    )
    shipped = "labels" if labels else method
    lineage = read_lineage(source) | {
        "role": "student",
        "method": shipped,
        "choice": {
            "method": shipped,
            "why": why,
            "teacher": theirs,
            "distilled": learned,
            "undistilled": control,
            "soft_labels": read_lineage(distilled).get("soft_labels")
            if distilled
            else None,  # see `SoftLabels.lineage`
        },
        "metric": metric,
        "validation_texts": len(inputs.splits.validation),
    }
    (folder / LINEAGE).write_bytes(canonical_json(lineage))
