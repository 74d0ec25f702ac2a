"""The stages of training on a task: teacher, the student's start, undistilled and distilled student, and which ships."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress import distributed
from compress.data.batches import TaskText
from compress.data.examples import check_task
from compress.data.sampler import language_counts
from compress.evaluation.metrics import chance, gold_of, score
from compress.evaluation.numbers import check_unit
from compress.evaluation.predictions import constant_predictions, predictions, shared_row_logits
from compress.methods.catalogue import LABELS, labels_and_soft_labels
from compress.models import number_head
from compress.models.initialise import RANDOM, is_checkpoint, open_start, starting_layers, student_of
from compress.models.pretrained import Opened, load, open_model
from compress.progress import advancing, message
from compress.runs.choice import method_name
from compress.runs.hardware import device_here, stage_settings
from compress.runs.lineage import loss_warnings, save_with_lineage
from compress.runs.method_trainings import Labelled, MethodInputs, with_head
from compress.runs.resumable_stages import TRAINING
from compress.runs.soft_labels import fold_of, read_confidence, read_soft_labels
from compress.runs.task_inputs import TaskInputs
from compress.training.checkpoint import Progress
from compress.training.stage import train_on_task, validating
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput

# Shares of the soft labels in the loss of which one is chosen, where none is given; and the part of the student's steps that
# each is tried for.
SOFT_WEIGHTS, TRIAL_PART = (0.5, 0.9), 0.2
TRIAL = "trial.json"
# With fewer steps or validation texts, the error about a teacher no better than chance suggests more of these.
FEW_STEPS, FEW_TEXTS = 200, 100


def load_stage(folder: Path, inputs: TaskInputs) -> Any:
    """The model that a stage left in `folder`."""
    return load(open_model(str(folder)), check_task(inputs.settings.task))


def with_new_head(opened: Opened, inputs: TaskInputs) -> Any:
    """The model of `opened` with a new head for the labels of `inputs`."""
    model = load(opened, check_task(inputs.settings.task), inputs.labels, multi_label=inputs.splits.multi_label)
    number_head.start_head(model, inputs.train)
    return model


def make_teacher(folder: Path, inputs: TaskInputs, steps: int) -> None:
    """Save the teacher with a head for the task: its own, or one fine-tuned until validation stops improving.

    Raises:
        BadInput: its validation score is not shown to be better than chance.
    """
    settings = inputs.settings
    torch.manual_seed(settings.seed)
    task = check_task(settings.task)
    if inputs.teacher_has_head:
        model = load(inputs.opened, task)
        progress = Progress()
    else:
        model = with_new_head(inputs.opened, inputs)
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
    if is_checkpoint(inputs.settings.start):
        _start_from_checkpoint(folder, inputs)
        return
    model = load_stage(teacher, inputs) if teacher else _opened_model(inputs)
    start, layers = inputs.settings.start, inputs.opened.config.num_hidden_layers
    named = start not in ("spread", RANDOM)
    student, origin = student_of(
        model,
        inputs.opened.family,
        inputs.shape,
        seed=inputs.settings.seed,
        chosen=starting_layers(start, layers, inputs.shape.layers) if named else (),
        new_layers=start == RANDOM,
    )
    if origin["head"] == "new":
        number_head.start_head(student, inputs.train)
    if not teacher:
        name = inputs.opened.public_name
        origin = {
            part: of.replace("the teacher's", f"{name}'s").replace("teacher layers", f"layers of {name}:")
            for part, of in origin.items()
        } | ({} if inputs.teacher_has_head else {"head": "new"})
    save(student, folder, inputs, Progress(), {"role": "start", "student": str(inputs.shape), "origin": origin})


def _opened_model(inputs: TaskInputs) -> Any:
    """The model that was given, with a head for the labels: its own, or a new one."""
    torch.manual_seed(inputs.settings.seed)
    if inputs.teacher_has_head:
        return load(inputs.opened, check_task(inputs.settings.task))
    return with_new_head(inputs.opened, inputs)


def _start_from_checkpoint(folder: Path, inputs: TaskInputs) -> None:
    opened = open_start(inputs.settings.start, inputs.opened)
    torch.manual_seed(inputs.settings.seed)
    student = with_new_head(opened, inputs)
    origin = dict.fromkeys(("embeddings", "layers"), f"{opened.public_name}'s") | {"head": "new"}
    save(student, folder, inputs, Progress(), {"role": "start", "student": str(inputs.shape), "origin": origin})


def method_inputs(inputs: TaskInputs, teacher: Path, tokens: float) -> MethodInputs:
    """What the stages of the method read: `tokens` of the plain text, and the task with its fine-tuned `teacher`."""
    given = inputs.settings
    task = check_task(given.task)
    labelled = Labelled(task, inputs.train, inputs.validation, inputs.splits.validation, teacher, inputs.in_domain)
    return MethodInputs(
        inputs.opened,
        inputs.tokenizer,
        inputs.pieces,
        {"task": labelled},
        given.batch,
        stage_settings(given),
        tokens,
        start=given.start,
        lineage={"data": inputs.data_fingerprint, "method": inputs.chain.method},
        row_tokens=inputs.row_tokens,
        notify=inputs.notify,
    )


def check_teacher(model: Any, inputs: TaskInputs, best_step: int) -> float:
    """The validation score of the teacher `model`, which was best at `best_step`, or 0 if it was given with its head.

    Raises:
        BadInput: the lower end of its score's interval does not exceed chance.
    """
    logits = shared_row_logits(model, inputs.validation)
    return distributed.by_main(lambda: _checked_score(inputs, logits or [], best_step))


def _checked_score(inputs: TaskInputs, logits: Sequence[np.ndarray], best_step: int) -> float:
    """See `check_teacher`."""
    task = check_task(inputs.settings.task)
    gold = [gold_of(example, task) for example in inputs.splits.validation]
    answers = predictions(inputs.validation, logits)
    reached, blind = score(gold, answers), chance(gold, answers, constant_predictions(inputs.validation))
    message(
        inputs.notify,
        f"  teacher on validation: {inputs.metric} {reached}; chance is {blind:.4f}",
    )
    if task == "text-regression" and inputs.teacher_has_head:
        check_unit(inputs.opened.role + " " + inputs.opened.name, gold, answers)
    if reached.low <= blind:
        raise BadInput(
            f"The teacher is not shown to be better than chance on this task: {inputs.metric} {reached} on {len(gold)} validation "
            f"texts; {blind:.4f} is possible without reading the text. {_what_would_help(inputs, best_step)}"
        )
    return float(reached.value)


def _what_would_help(inputs: TaskInputs, steps: int) -> str:
    """What to do about a teacher that is not shown to be better than chance."""
    if steps and steps < FEW_STEPS:
        return (
            f"It was best after {steps} steps of fine-tuning: give more --teacher-epochs, a smaller --batch or more labelled text. "
            "If that does not help, check labels and texts."
        )
    if len(inputs.splits.validation) < FEW_TEXTS:
        return "These are too few texts to show it: give a larger validation split. If that does not help, check labels and texts."
    return "A student would learn nothing from it. Check labels and texts, or give a better teacher."


def make_undistilled(folder: Path, inputs: TaskInputs, start: Path, steps: int) -> None:
    """Train the same student from parts of the fine-tuned teacher on labels only, in as many steps: the control."""
    model = load_stage(start, inputs)
    rate = inputs.settings.student_learning_rate
    progress = on_task(model, folder, inputs, steps, rate, "student on labels alone")
    save(model, folder, inputs, progress, {"role": "undistilled", "method": "labels"})


@dataclass(frozen=True)
class SoftLabels:
    """The soft labels that a student learns, and their share of its loss."""

    folder: Path
    weight: float
    tried: dict[float, float] = field(default_factory=dict)  # by share: the best validation score of a short training

    @property
    def lineage(self) -> dict[str, Any]:
        """As a student's lineage and the report tell of them."""
        tried = [{"share": weight, "validation": reached} for weight, reached in self.tried.items()]
        return {"share": self.weight, "tried": tried, "teacher_confidence": read_confidence(self.folder)}


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


def chosen_share(folder: Path, trials: Mapping[float, Path]) -> SoftLabels:
    """The soft labels in `folder` with the share whose trial was best on validation; of equal ones the largest share."""
    tried = {
        weight: float(json.loads((trial / TRIAL).read_text(encoding="utf-8"))["validation"])
        for weight, trial in trials.items()
    }
    return SoftLabels(folder, max(tried, key=lambda weight: (tried[weight], weight)), tried)


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

    It ends with the weights that scored best on validation. `soft_weight` is the share of the soft labels in the loss. Of the labelled
    texts only the `chosen` are read, if these are given. The weights are scored every `validate_every` steps; 0 is as often as `inputs`
    say.
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
    every = min(steps, validate_every or inputs.validate_every(steps))
    with advancing(inputs.notify, what) as shown:
        return train_on_task(
            LABELS if soft is None else labels_and_soft_labels(soft_weight, given.temperature),
            model,
            TaskText(texts, given.batch, given.seed, inputs.validation.ids, soft, counts),
            labelled,
            stage_settings(given, steps, learning_rate=learning_rate),
            folder=folder / TRAINING,
            validation=validating(model, inputs.validation, inputs.splits.validation, every, patience),
            report=shown.step,
        )


def save(model: Any, folder: Path, inputs: TaskInputs, progress: Progress, details: dict[str, Any]) -> None:
    """Save a checkpoint with its lineage, and report warnings about its loss."""
    warnings = loss_warnings(progress.loss, details["role"], inputs.notify)
    lineage = details | {
        "data": inputs.data_fingerprint,
        "seed": inputs.settings.seed,
        "loss": progress.loss,
        "doubts": warnings,
        "metric": inputs.metric,
        "validation": progress.validation,
        "validation_texts": len(inputs.splits.validation),
        "best_step": progress.best_step,
    }
    save_with_lineage(model, inputs.opened, folder, lineage, inputs.tokens_of)
