"""The stages of training on a task: teacher, the student's start, relations, soft labels, undistilled student, student."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from compress.data.corpus import CorpusText, Piece, chunks
from compress.data.encoded import Encoded
from compress.data.examples import check_task
from compress.engine.hardware import device_here
from compress.engine.lineage import read_lineage, save_with_lineage
from compress.engine.resumable_stages import TRAINING
from compress.engine.task_inputs import TaskInputs
from compress.evaluation.metrics import chance, gold_of, score
from compress.evaluation.predictions import constant_predictions, predictions, row_logits
from compress.methods.catalogue import Sizes, Stage, minilmv2
from compress.models.initialise import student_of
from compress.models.pretrained import load, open_model
from compress.progress import advancing, message
from compress.training.checkpoint import Progress, write_safetensors
from compress.training.loss_checks import doubts
from compress.training.stage import StageSettings, train_stage
from compress.training.task_training import TaskTraining, train_on_task
from serve.errors import BadInput

# Texts whose soft labels are saved at once: the most work that a kill during labelling loses.
SHARD_TEXTS = 4_096
# With fewer steps or validation texts, the error about a teacher no better than chance suggests more of these.
FEW_STEPS, FEW_TEXTS = 200, 100


def load_stage(folder: Path, inputs: TaskInputs) -> Any:
    """The model that a stage left in `folder`."""
    return load(open_model(str(folder)), check_task(inputs.settings.task))


def make_teacher(folder: Path, inputs: TaskInputs, steps: int) -> None:
    """Save the teacher with a head for the task: its own, or one fine-tuned until validation stops improving."""
    settings = inputs.settings
    torch.manual_seed(settings.seed)
    task = check_task(settings.task)
    if inputs.teacher_has_head:
        model = load(inputs.opened, task)
        progress = Progress()
    else:
        model = load(inputs.opened, task, inputs.labels, multi_label=inputs.splits.multi_label)
        progress = on_task(
            model, folder, inputs, steps, settings.teacher_learning_rate, "teacher", patience=settings.teacher_patience
        )
    save(model, folder, inputs, progress, {"role": "teacher", "fine_tuned": not inputs.teacher_has_head})


def make_start(folder: Path, inputs: TaskInputs, teacher: Path) -> None:
    """Save the student before training, made from parts of the teacher where shapes allow."""
    model = load_stage(teacher, inputs)
    student, origin = student_of(model, inputs.opened.family, inputs.shape, seed=inputs.settings.seed)
    save(student, folder, inputs, Progress(), {"role": "start", "student": str(inputs.shape), "origin": origin})


def make_relations(folder: Path, inputs: TaskInputs, teacher: Path, start: Path, steps: int) -> None:
    """Train the student by MiniLMv2 relation distillation on the task's text, the unlabelled text and the corpus."""
    given = inputs.settings
    settings = StageSettings(
        steps, given.seed, given.precision, given.checkpoint_seconds, given.relation_learning_rate,
        device=given.device, accumulate=given.accumulate, trackers=given.trackers,
    )  # fmt: skip
    student = load_stage(start, inputs)
    with advancing(inputs.notify, "relations") as shown:
        progress = train_stage(
            relation_stage(inputs),
            load_stage(teacher, inputs),
            student,
            inputs.opened.family,
            CorpusText(relation_pieces(inputs), inputs.train.pad_id, given.batch, given.seed),
            settings,
            folder=folder / TRAINING,
            report=shown.step,
        )
    details = {"role": "relations", "method": "minilmv2", "relation_heads": inputs.relation_heads}
    save(student, folder, inputs, progress, details | {"teacher_layer": inputs.relation_layer})


def relation_stage(inputs: TaskInputs) -> Stage:
    """The relation stage: MiniLMv2 for the sizes of teacher and student."""
    config, shape = inputs.opened.config, inputs.shape
    widths = (config.num_hidden_layers, shape.layers, config.hidden_size, shape.hidden)
    return minilmv2(Sizes(*widths, relation_heads=inputs.relation_heads, teacher_layer=inputs.relation_layer))[0]


def relation_pieces(inputs: TaskInputs) -> list[Piece]:
    """The train, unlabelled and corpus texts, cut into pieces of at most `relation_tokens` tokens."""
    texts = [example.text_read for example in inputs.splits.train] + inputs.unlabelled + inputs.corpus
    return chunks(texts, inputs.tokenizer, min(inputs.settings.relation_tokens, inputs.max_length))


def make_soft_labels(folder: Path, inputs: TaskInputs, teacher: Path) -> None:
    """Check the teacher, then save its logits on train and the in-domain text.

    Raises:
        BadInput: the teacher's validation score is not shown to be better than chance.
    """
    model = load_stage(teacher, inputs).to(device_here(inputs.settings.device))
    check_teacher(model, inputs, teacher)
    texts = inputs.soft_labelled
    generated = len(texts) - len(inputs.train) - len(inputs.unlabelled)
    message(
        inputs.notify,
        f"  {len(inputs.train)} labelled texts, {len(inputs.unlabelled)} unlabelled and {generated} generated ones",
    )
    with advancing(inputs.notify, "soft labels") as shown:
        seen = 0

        def advance(count: int) -> None:
            nonlocal seen
            seen += count
            shown(seen, len(texts))

        shards = [
            _shard(folder / TRAINING / f"{start}.safetensors", texts[start : start + SHARD_TEXTS], model, advance)
            for start in range(0, len(texts), SHARD_TEXTS)
        ]
    np.save(folder / "logits.npy", np.concatenate(shards), allow_pickle=False)


def check_teacher(model: Any, inputs: TaskInputs, teacher: Path) -> None:
    """Check that the model of the stage `teacher` is better than chance on validation.

    Raises:
        BadInput: the lower end of its score's interval does not exceed chance.
    """
    task = check_task(inputs.settings.task)
    gold = [gold_of(example, task) for example in inputs.splits.validation]
    answers = predictions(inputs.validation, row_logits(model, inputs.validation))
    reached, blind = score(gold, answers), chance(gold, answers, constant_predictions(inputs.validation))
    message(
        inputs.notify,
        f"  teacher on validation: {inputs.metric} {reached}; chance is {blind:.4f}",
    )
    if reached.low <= blind:
        raise BadInput(
            f"The teacher is not shown to be better than chance on this task: {inputs.metric} {reached} on {len(gold)} validation "
            f"texts; {blind:.4f} is possible without reading the text. {_what_would_help(inputs, steps_of(teacher))}"
        )


def steps_of(teacher: Path) -> int:
    """The step at which the teacher was best on validation; 0 if it was given with its head."""
    return int(read_lineage(teacher)["best_step"])


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


def _shard(file: Path, texts: Encoded, model: Any, advance: Callable[[int], None]) -> np.ndarray:
    """The logits of all rows of `texts`, from `file` if it was saved before."""
    if file.is_file():
        advance(len(texts))
        done: np.ndarray = load_file(file)["logits"].numpy()
        return done
    logits = np.concatenate(row_logits(model, texts, advance=advance))
    file.parent.mkdir(exist_ok=True)
    write_safetensors(file, {"logits": torch.from_numpy(logits)})
    return logits


def read_soft_labels(folder: Path, inputs: TaskInputs) -> list[np.ndarray]:
    """The teacher's logits of each text's rows, as `make_soft_labels` saved them. ValueError if the texts have other rows."""
    texts = inputs.soft_labelled
    logits = np.load(folder / "logits.npy", mmap_mode="r", allow_pickle=False)
    ends = np.cumsum([len(rows) for rows in texts.rows])
    if len(logits) != ends[-1]:
        raise ValueError(f"{folder} holds soft labels of {len(logits)} rows, and the texts have {ends[-1]}")
    return np.split(logits, ends[:-1])


def make_undistilled(folder: Path, inputs: TaskInputs, start: Path, steps: int) -> None:
    """Train the same student from the same start for the same steps on labels only, as the baseline of distillation."""
    model = load_stage(start, inputs)
    rate = inputs.settings.student_learning_rate
    progress = on_task(model, folder, inputs, steps, rate, "student without distillation")
    save(model, folder, inputs, progress, {"role": "undistilled", "method": "none"})


def make_student(folder: Path, inputs: TaskInputs, start: Path, soft_labels: Path, steps: int) -> None:
    """Train the student on the teacher's soft labels and the labels."""
    model = load_stage(start, inputs)
    soft = read_soft_labels(soft_labels, inputs)
    progress = on_task(model, folder, inputs, steps, inputs.settings.student_learning_rate, "student", soft=soft)
    method = "minilmv2 + soft labels" if inputs.settings.relation_epochs else "soft labels"
    save(model, folder, inputs, progress, {"role": "student", "method": method})


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
) -> Progress:
    """Train `model` on the task of `inputs`: on labels, and on the teacher's logits `soft` of `inputs.soft_labelled` if given."""
    given = inputs.settings
    settings = TaskTraining(
        steps,
        learning_rate,
        batch=given.batch,
        patience=patience,
        temperature=given.temperature,
        soft_weight=given.soft_weight,
        seed=given.seed,
        precision=given.precision,
        device=given.device,
        accumulate=given.accumulate,
        trackers=given.trackers,
        checkpoint_every_s=given.checkpoint_seconds,
    )
    with advancing(inputs.notify, what) as shown:
        return train_on_task(
            model,
            inputs.train,
            inputs.validation,
            inputs.splits.validation,
            settings,
            folder=folder / TRAINING,
            unlabelled=inputs.in_domain,
            soft=soft,
            report=shown.step,
        )


def save(model: Any, folder: Path, inputs: TaskInputs, progress: Progress, details: dict[str, Any]) -> None:
    """Save a checkpoint with its lineage, and report warnings about its loss."""
    warnings = doubts(progress.loss, details["role"])
    for doubt in warnings:
        message(inputs.notify, f"warning: {doubt}")
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
    save_with_lineage(model, inputs.opened, folder, lineage)
