"""Running one stage of a method: a student is trained to agree with its teacher on the stage's objective."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from compress.data.batches import Batch, inputs_for, part_of, to_device
from compress.data.sampler import Sampler
from compress.distributed import Share
from compress.methods.catalogue import Stage
from compress.methods.objectives import Objective, OutputTerm, Projections, check_objective, layer_losses, output_losses
from compress.methods.presets import Schedule
from compress.models.activations import Activations, Part, assembled, read
from compress.models.embedding_rows import rows_in_use
from compress.models.families import FAMILIES, Family, encoder_of
from compress.models.precision import matrices_in
from compress.training.checkpoint import Progress
from compress.training.loop import Report, Validation, device_of_process, train
from compress.training.prefetch import Prefetcher


class Text(Protocol):
    """What a stage is trained on: the batch of each step, and all ids that occur."""

    @property
    def pad_id(self) -> int: ...  # noqa: D102 - the class says it

    @property
    def sampler(self) -> Sampler: ...  # noqa: D102

    @property
    def ids(self) -> list[np.ndarray]: ...  # noqa: D102 - the class says it

    def at(self, step: int) -> Batch: ...  # noqa: D102


@dataclass(frozen=True)
class StageSettings:
    """What a stage does not decide itself."""

    steps: int
    seed: int = 0
    precision: str = "fp32"
    checkpoint_every_s: float = 30.0
    # In place of the stage's own rate; 0 keeps that.
    learning_rate: float = 0.0
    device: str = "auto"  # cpu, cuda, or auto: a GPU where there is one
    # Parts that each batch is cut into, one after the other: less memory, the same gradients.
    accumulate: int = 1
    # Where else metrics go: names of `compress.training.trackers`.
    trackers: tuple[str, ...] = ()
    # In place of `steps` and of all that the stage says of rates (see `compress.methods.presets`).
    schedule: Schedule | None = None


def train_stage(
    stage: Stage,
    teacher: Any,
    student: Any,
    family: Family,
    text: Text,
    settings: StageSettings,
    *,
    folder: Path,
    projections: Projections | None = None,
    validation: Callable[[np.ndarray | None], Validation] | None = None,
    report: Report | None = None,
) -> Progress:
    """Train `student` in place on the objective of `stage`.

    Of both models only what the objective reads is computed: a student whose last values are compared keeps that layer's
    output projection and feed-forward as they start.

    Args:
        stage: the objective, what of the student moves, rate and schedule.
        teacher: not changed; None when the objective asks for labels alone. For answers it needs the same kind of head.
        student: of the same vocabulary; its family is what its configuration says.
        family: where the teacher keeps its parts.
        text: what they read.
        settings: steps, seed and precision.
        folder: for checkpoints.
        projections: the learned maps of the objective; new ones if not given.
        validation: makes the `Validation`, where the best weights are wanted and not the last; called with `remap`, by which a
            narrowed student's embeddings are found, or None.
        report: told of each step.

    Raises:
        BadInput: heads, layers or widths that the objective cannot compare.
    """
    objective = stage.objective
    if teacher is not None:
        check_objective(objective, teacher.config, student.config)
    rate = settings.learning_rate or stage.learning_rate
    schedule = settings.schedule or Schedule(settings.steps, rate, stage.warmup, betas=stage.betas)
    torch.manual_seed(settings.seed)
    maps = projections or Projections(objective, (student if teacher is None else teacher).config, student.config)
    with ExitStack() as stack:
        if teacher is not None:
            teacher.eval().to(device_of_process(settings.device))
            stack.enter_context(matrices_in(teacher, settings.precision))
        stack.enter_context(moving(student, stage.trains))
        remap = stack.enter_context(rows_narrowed(student, text, objective))
        batches = stack.enter_context(closing(Prefetcher(text.at, schedule.steps)))

        def loss_at(step: int, share: Share) -> dict[str, Tensor]:
            return step_losses(objective, teacher, student, family, part_of(batches.at(step), share), maps, remap)

        return train(
            _Trained(student, maps),
            loss_at,
            schedule,
            folder=folder,
            seed=settings.seed,
            validation=None if validation is None else validation(remap),
            precision=settings.precision,
            device=settings.device,
            accumulate=settings.accumulate,
            trackers=settings.trackers,
            checkpoint_every_s=settings.checkpoint_every_s,
            batches=batches,
            report=report,
        )


def step_losses(
    objective: Objective,
    teacher: Any,
    student: Any,
    family: Family,
    batch: Batch,
    projections: Projections,
    remap: np.ndarray | None,
) -> dict[str, Tensor]:
    """The weighted loss terms of one batch, or of a part of one: those of all its parts add up to its own.

    `remap` gives each token id its row in a narrowed student's embeddings.
    """
    device = next(student.parameters()).device
    batch = to_device(batch, device)
    theirs = Activations({})
    if objective.layers or objective.asks_teacher:
        with torch.no_grad():
            teacher.to(device)
            theirs = _theirs(teacher, family, objective, batch)
    seen = batch
    if remap is not None:
        ids = torch.from_numpy(remap)[batch.inputs["input_ids"].cpu()].to(device)
        seen = replace(batch, inputs=batch.inputs | {"input_ids": ids})
    own = FAMILIES[student.config.model_type]
    ours = _read(student, own, objective, seen, teacher=False)
    heads = student.config.num_attention_heads
    inside = layer_losses(objective.layers, theirs, ours, batch.inputs["attention_mask"], heads, projections)
    terms = {name: batch.weights.texts * loss for name, loss in inside.items()}
    if objective.outputs:
        said = None if theirs.output is None else _answers(theirs, batch, objective)
        answered = output_losses(objective.outputs, _answers(ours, batch, objective), said, batch.targets)
        weights = {term.name: _weight(term, batch) for term in objective.outputs}
        terms |= {name: weights[name] * loss for name, loss in answered.items()}
    return terms


class _Trained(nn.Module):
    """The student and the maps that are thrown away, as one thing to train."""

    def __init__(self, student: nn.Module, projections: nn.Module) -> None:
        super().__init__()
        self.student, self.projections = student, projections


@contextmanager
def moving(student: Any, what: str) -> Iterator[None]:
    """Within it only that part of the student is trained: `all`, the `encoder`, or the `head`.

    A pooler belongs to the head, wherever a family keeps it: nothing else reads it.
    """
    inside = {id(p) for name, p in encoder_of(student).named_parameters() if not name.startswith("pooler.")}
    before = [(parameter, parameter.requires_grad) for parameter in student.parameters()]
    for parameter, _ in before:
        parameter.requires_grad = what == "all" or (id(parameter) in inside) == (what == "encoder")
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad = required


@contextmanager
def rows_narrowed(student: Any, text: Text, objective: Objective) -> Iterator[np.ndarray | None]:
    """Within it the student holds the embeddings in use alone, unless the objective speaks of the whole vocabulary."""
    if objective.masks_tokens or not next(iter(student.get_input_embeddings().parameters())).requires_grad:
        yield None
    else:
        with rows_in_use(student, text.ids, text.pad_id) as remap:
            yield remap


def _read(model: Any, family: Family, objective: Objective, batch: Batch, *, teacher: bool) -> Activations:
    wanted = objective.teacher_parts() if teacher else objective.student_parts()
    output = objective.asks_teacher if teacher else bool(objective.outputs)
    rows = _rows(batch, objective) if objective.masks_tokens and output else None
    return read(model, family, inputs_for(model, batch.inputs), wanted, output=output, rows=rows)


def _theirs(teacher: Any, family: Family, objective: Objective, batch: Batch) -> Activations:
    """What the objective reads of the teacher, kept or computed."""
    if batch.teacher_activations is None:
        return _read(teacher, family, objective, batch, teacher=True)
    kept = {Part(*part): value for part, value in batch.teacher_activations.items()}
    return assembled(teacher, family, kept, objective.teacher_parts())


def _weight(term: OutputTerm, batch: Batch) -> float:
    """What the mean over the rows of `term` counts for, where `batch` is a part of one."""
    if term.loss == "labels":
        return batch.weights.labelled
    return batch.weights.tokens if term.everywhere else batch.weights.rows


def _rows(batch: Batch, objective: Objective) -> Tensor:
    """The tokens whose words are to be guessed: those that were hidden, or every real one."""
    if any(term.everywhere for term in objective.outputs):
        return batch.inputs["attention_mask"].flatten().nonzero().flatten()
    return batch.row_index


def _answers(found: Activations, batch: Batch, objective: Objective) -> Tensor:
    """Logits of the rows that are compared, (rows, labels)."""
    logits: Tensor = found.output.logits
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if objective.masks_tokens else flat[batch.row_index]
