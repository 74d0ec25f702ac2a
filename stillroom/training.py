"""The stages that train: teacher, the student's start, relations, soft labels, the undistilled student, the student."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from compress.checkpoint import Progress, write_safetensors
from compress.corpus import CorpusText, Piece, chunks
from compress.distill import Settings, distil
from compress.examples import check_task
from compress.finetune import TaskTraining, train_on_task
from compress.guards import doubts
from compress.initialise import student_of
from compress.methods import Sizes, Stage, minilmv2
from compress.scores import chance, gold_of, score
from compress.tasks import Encoded, constant_predictions, predictions, row_logits
from compress.teacher import load, open_model
from serve.errors import BadInput
from stillroom.ground import Ground, device_here
from stillroom.lineage import read_lineage, save_with_lineage
from stillroom.show import bar, say
from stillroom.stages import TRAINING

# Texts that are labelled between two savings: the work that a kill in the middle of labelling loses.
SHARD_TEXTS = 4_096
# Below these, a teacher that seems no better than chance may only have been trained or looked at too little.
FEW_STEPS, FEW_TEXTS = 200, 100


def load_stage(folder: Path, ground: Ground) -> Any:
    """The model that a stage left in `folder`."""
    return load(open_model(str(folder)), check_task(ground.recipe.task))


def make_teacher(folder: Path, ground: Ground, steps: int) -> None:
    """The teacher with a head for the task: its own, or one fine-tuned until validation stops improving."""
    recipe = ground.recipe
    torch.manual_seed(recipe.seed)
    task = check_task(recipe.task)
    if ground.teacher_has_head:
        model = load(ground.opened, task)
        progress = Progress()
    else:
        model = load(ground.opened, task, ground.labels, multi_label=ground.splits.multi_label)
        progress = on_task(
            model, folder, ground, steps, recipe.teacher_learning_rate, "teacher", patience=recipe.teacher_patience
        )
    save(model, folder, ground, progress, {"role": "teacher", "fine_tuned": not ground.teacher_has_head})


def make_start(folder: Path, ground: Ground, teacher: Path) -> None:
    """The student before training: parts of the teacher where shapes allow."""
    model = load_stage(teacher, ground)
    student, origin = student_of(model, ground.opened.family, ground.shape, seed=ground.recipe.seed)
    save(student, folder, ground, Progress(), {"role": "start", "student": str(ground.shape), "origin": origin})


def make_relations(folder: Path, ground: Ground, teacher: Path, start: Path, steps: int) -> None:
    """The student after MiniLMv2 relation distillation on the task's own text, the in-domain text and the corpus."""
    recipe = ground.recipe
    settings = Settings(
        steps, recipe.seed, recipe.precision, recipe.checkpoint_seconds, recipe.relation_learning_rate,
        accumulate=recipe.accumulate, trackers=recipe.trackers,
    )  # fmt: skip
    student = load_stage(start, ground)
    with bar("relations") as shown:
        progress = distil(
            relation_stage(ground),
            load_stage(teacher, ground),
            student,
            ground.opened.family,
            CorpusText(relation_pieces(ground), ground.train.pad_id, recipe.batch, recipe.seed),
            settings,
            folder=folder / TRAINING,
            report=shown.step,
        )
    details = {"role": "relations", "method": "minilmv2", "relation_heads": ground.relation_heads}
    save(student, folder, ground, progress, details | {"teacher_layer": ground.relation_layer})


def relation_stage(ground: Ground) -> Stage:
    """What the relation stage trains on."""
    config, shape = ground.opened.config, ground.shape
    widths = (config.num_hidden_layers, shape.layers, config.hidden_size, shape.hidden)
    return minilmv2(Sizes(*widths, relation_heads=ground.relation_heads, teacher_layer=ground.relation_layer))[0]


def relation_pieces(ground: Ground) -> list[Piece]:
    """All text at hand, cut to the recipe's length."""
    texts = [example.text_read for example in ground.splits.train] + ground.unlabelled + ground.corpus
    return chunks(texts, ground.tokenizer, min(ground.recipe.relation_tokens, ground.max_length))


def make_soft_labels(folder: Path, ground: Ground, teacher: Path) -> None:
    """The teacher's logits on train and the in-domain text; and whether it is better than chance.

    Raises:
        BadInput: a teacher whose validation score is no better than chance.
    """
    model = load_stage(teacher, ground).to(device_here())
    check_teacher(model, ground, teacher)
    texts = ground.soft_labelled
    generated = len(texts) - len(ground.train) - len(ground.unlabelled)
    say(f"  {len(ground.train)} labelled texts, {len(ground.unlabelled)} unlabelled and {generated} generated ones")
    with bar("soft labels") as shown:
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


def check_teacher(model: Any, ground: Ground, teacher: Path) -> None:
    """Nothing, when the model of the stage `teacher` is better than chance on validation.

    Raises:
        BadInput: it is not shown to be.
    """
    task = check_task(ground.recipe.task)
    gold = [gold_of(example, task) for example in ground.splits.validation]
    said = predictions(ground.validation, row_logits(model, ground.validation))
    reached, blind = score(gold, said), chance(gold, said, constant_predictions(ground.validation))
    say(f"  teacher on validation: {ground.metric} {reached}; without looking at the text it would be {blind:.4f}")
    if reached.low <= blind:
        raise BadInput(
            f"The teacher is not shown to be better than chance on this task: {ground.metric} {reached} on {len(gold)} validation "
            f"texts, where {blind:.4f} needs no look at the text. {_what_would_help(ground, steps_of(teacher))}"
        )


def steps_of(teacher: Path) -> int:
    """Steps after which the teacher was best; 0 when it came with its head."""
    return int(read_lineage(teacher)["best_step"])


def _what_would_help(ground: Ground, steps: int) -> str:
    """What to do about a teacher that cannot be told from chance."""
    if steps and steps < FEW_STEPS:
        return (
            f"It was best after {steps} steps of fine-tuning: give more --teacher-epochs, a smaller --batch or more labelled text. "
            "If that does not help, check labels and texts."
        )
    if len(ground.splits.validation) < FEW_TEXTS:
        return (
            "So few texts show little: give a larger validation split. If that does not help, check labels and texts."
        )
    return "A student would learn nothing from it. Check labels and texts, or give a better teacher."


def _shard(file: Path, texts: Encoded, model: Any, advance: Callable[[int], None]) -> np.ndarray:
    """The logits of all rows of `texts`, from `file` if an earlier process finished it."""
    if file.is_file():
        advance(len(texts))
        done: np.ndarray = load_file(file)["logits"].numpy()
        return done
    logits = np.concatenate(row_logits(model, texts, advance=advance))
    file.parent.mkdir(exist_ok=True)
    write_safetensors(file, {"logits": torch.from_numpy(logits)})
    return logits


def read_soft_labels(folder: Path, ground: Ground) -> list[np.ndarray]:
    """The teacher's logits of each text's rows, as `make_soft_labels` left them."""
    texts = ground.soft_labelled
    logits = np.load(folder / "logits.npy", mmap_mode="r", allow_pickle=False)
    ends = np.cumsum([len(rows) for rows in texts.rows])
    if len(logits) != ends[-1]:
        raise ValueError(f"{folder} holds soft labels of {len(logits)} rows, and the texts have {ends[-1]}")
    return np.split(logits, ends[:-1])


def make_undistilled(folder: Path, ground: Ground, start: Path, steps: int) -> None:
    """The same student from the same start for the same steps, on labels only: what distillation has to beat."""
    model = load_stage(start, ground)
    rate = ground.recipe.student_learning_rate
    progress = on_task(model, folder, ground, steps, rate, "student without distillation")
    save(model, folder, ground, progress, {"role": "undistilled", "method": "none"})


def make_student(folder: Path, ground: Ground, start: Path, soft_labels: Path, steps: int) -> None:
    """The student, trained on the teacher's soft labels and the labels."""
    model = load_stage(start, ground)
    soft = read_soft_labels(soft_labels, ground)
    progress = on_task(model, folder, ground, steps, ground.recipe.student_learning_rate, "student", soft=soft)
    method = "minilmv2 + soft labels" if ground.recipe.relation_epochs else "soft labels"
    save(model, folder, ground, progress, {"role": "student", "method": method})


def on_task(
    model: Any,
    folder: Path,
    ground: Ground,
    steps: int,
    learning_rate: float,
    what: str,
    *,
    patience: int | None = None,
    soft: list[np.ndarray] | None = None,
) -> Progress:
    """Train `model` on the task of `ground`, on labels, or with the teacher's logits `soft` of `ground.soft_labelled` on both."""
    recipe = ground.recipe
    settings = TaskTraining(
        steps,
        learning_rate,
        batch=recipe.batch,
        patience=patience,
        temperature=recipe.temperature,
        soft_weight=recipe.soft_weight,
        seed=recipe.seed,
        precision=recipe.precision,
        accumulate=recipe.accumulate,
        trackers=recipe.trackers,
        checkpoint_every_s=recipe.checkpoint_seconds,
    )
    with bar(what) as shown:
        return train_on_task(
            model,
            ground.train,
            ground.validation,
            ground.splits.validation,
            settings,
            folder=folder / TRAINING,
            unlabelled=ground.in_domain,
            soft=soft,
            report=shown.step,
        )


def save(model: Any, folder: Path, ground: Ground, progress: Progress, details: dict[str, Any]) -> None:
    """A checkpoint with its lineage; what is doubtful about the training is told."""
    doubted = doubts(progress.loss, details["role"])
    for doubt in doubted:
        say(f"warning: {doubt}")
    lineage = details | {
        "data": ground.data_mark,
        "seed": ground.recipe.seed,
        "loss": progress.loss,
        "doubts": doubted,
        "validation": progress.validation,
        "best_step": progress.best_step,
    }
    save_with_lineage(model, ground.opened, folder, lineage)
