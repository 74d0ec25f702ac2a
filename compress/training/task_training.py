"""Training a model with a head on a task: on labels, on a teacher's soft labels, or on both."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from compress.data.batches import Batch, collate, part_of, rows_of, to_device
from compress.data.encoded import Encoded
from compress.data.examples import Example
from compress.data.sampler import Sampler
from compress.distributed import Share
from compress.evaluation.predictions import row_logits
from compress.losses.outputs import mixed_loss
from compress.methods.presets import Schedule
from compress.models.embedding_rows import rows_in_use
from compress.models.number_head import standardised
from compress.training.checkpoint import Progress
from compress.training.loop import Report, Validation, train
from compress.training.prefetch import Prefetcher

MOST_VALIDATIONS = 10  # of one training


@dataclass(frozen=True)
class TaskTraining:
    """Settings of one training on a task."""

    steps: int
    learning_rate: float
    batch: int = 32
    # Steps between validations; None is once an epoch of the labelled texts.
    validate_every: int | None = None
    patience: int | None = None
    temperature: float = 2.0
    # Weight of the soft labels; the labels have the rest.
    soft_weight: float = 0.9
    seed: int = 0
    precision: str = "fp32"
    device: str = "auto"  # cpu, cuda, or auto: a GPU if there is one
    checkpoint_every_s: float = 30.0
    # Parts that each batch is computed in, one after the other, to need less memory.
    accumulate: int = 1
    # Names of `compress.training.trackers` that get the metrics too.
    trackers: tuple[str, ...] = ()


def train_on_task(
    model: Any,
    labelled: Encoded,
    validation: Encoded,
    gold: Sequence[Example],
    settings: TaskTraining,
    *,
    folder: Path,
    unlabelled: Encoded | None = None,
    soft: Sequence[np.ndarray] | None = None,
    read: np.ndarray | None = None,
    report: Report | None = None,
) -> Progress:
    """Train `model` in place; it ends with the weights that scored best on validation.

    Numbers are learned in deviations from their mean, see `compress.models.number_head`.

    Args:
        model: has a head whose labels are `labelled.labels`, by index.
        labelled: training texts with targets.
        validation: the validation texts; the task metric is computed from the answers that serving would give.
        gold: the examples of `validation`.
        settings: steps, rates and weights.
        folder: for checkpoints.
        unlabelled: texts that only the teacher labels; they need `soft`.
        soft: the teacher's logits (rows, labels) of each labelled, then each unlabelled text; None trains on labels only.
        read: how often each labelled text is read in an epoch, (texts,), if not once.
        report: called after each step.
    """
    unit = labelled.task.unit_of(labelled)
    texts = labelled if unlabelled is None or soft is None else labelled + unlabelled
    if unit:
        texts, soft = unit.texts(texts), None if soft is None else unit.soft(soft)
    lengths = np.array([len(ids) for ids in texts.ids])
    counts = None if read is None else np.concatenate([read, np.ones(len(texts) - len(labelled))])
    order = Sampler(lengths, settings.batch, settings.seed, counts)
    with ExitStack() as stack:
        if unit:
            stack.enter_context(standardised(unit, model))
        remap = stack.enter_context(rows_in_use(model, [*texts.ids, *validation.ids], texts.pad_id))

        def batch_of(step: int) -> Batch:
            return collate(texts, order.at(step).tolist(), soft=soft, remap=remap)

        batches = stack.enter_context(closing(Prefetcher(batch_of, settings.steps)))

        def loss_at(step: int, share: Share) -> dict[str, Tensor]:
            batch = part_of(batches.at(step), share)
            batch = to_device(batch, next(model.parameters()).device)
            terms = mixed_loss(
                rows_of(model, batch),
                batch.targets,
                batch.soft,
                temperature=settings.temperature,
                soft_weight=settings.soft_weight,
            )
            weights = {"labels": batch.weights.labelled, "soft_labels": batch.weights.rows}
            return {name: weights[name] * term for name, term in terms.items()}

        every = settings.validate_every or -(-len(labelled) // settings.batch)
        return train(
            model,
            loss_at,
            Schedule(settings.steps, settings.learning_rate),
            folder=folder,
            seed=settings.seed,
            validation=validating(model, validation, gold, min(every, settings.steps), remap, settings.patience),
            precision=settings.precision,
            device=settings.device,
            accumulate=settings.accumulate,
            trackers=settings.trackers,
            checkpoint_every_s=settings.checkpoint_every_s,
            batches=batches,
            report=report,
        )


def validation_interval(steps: int, steps_per_epoch: int) -> int:
    """Steps between two validations of a training of `steps`: an epoch, or more, so that there are at most `MOST_VALIDATIONS`."""
    return min(steps, max(steps_per_epoch, -(-steps // MOST_VALIDATIONS)))


def validating(
    model: Any,
    validation: Encoded,
    gold: Sequence[Example],
    every: int,
    remap: np.ndarray | None,
    patience: int | None = None,
) -> Validation:
    """Validation every `every` steps by the task metric, from the answers that serving would give.

    `remap` maps token ids to rows of narrowed embeddings; training ends after `patience` validations without a new best.
    """
    task = validation.task
    answers = [task.gold_of(example) for example in gold]

    def evaluate() -> float:
        said = task.predictions(validation, row_logits(model, validation, remap=remap))
        return task.metric.value(task.metric.counts(answers, said))

    return Validation(every, evaluate, patience)
