"""One training: a student learns the objective of a stage, from a teacher, from labels, or from both."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from compress.data.batches import Batch, TaskText, inputs_for, moved, part_of, text_shares, to_device
from compress.data.encoded import Encoded
from compress.data.examples import Example
from compress.data.sampler import Sampler
from compress.distributed import ProcessShare
from compress.evaluation.predictions import row_logits
from compress.losses.tiled_relations import expect
from compress.methods.catalogue import Stage
from compress.methods.objectives import (
    Objective,
    OutputTerm,
    Projections,
    check_objective,
    layer_losses,
    output_losses,
    vocabulary_losses,
)
from compress.methods.presets import Schedule
from compress.models.activations import Activations, Part, assembled, check_equal_shares, is_sharded, read, shard_layers
from compress.models.families import encoder_of, family_in, kept_apart, layers_of
from compress.models.precision import weights_in
from compress.models.task_heads import standardised
from compress.models.unilm import asked_words
from compress.training.checkpoint import Progress
from compress.training.loop import Report, StageSettings, Validation, device_of_process, train
from compress.training.metrics import Prefetcher

MOST_VALIDATIONS = 10  # of one training


class Text(Protocol):
    """The text that a stage trains on: the batch of each step, and all token ids that occur."""

    @property
    def pad_id(self) -> int: ...  # noqa: D102 - see the class

    @property
    def sampler(self) -> Sampler: ...  # noqa: D102

    @property
    def ids(self) -> list[np.ndarray]: ...  # noqa: D102

    def at(self, step: int) -> Batch: ...  # noqa: D102


def train_stage(
    stage: Stage,
    teacher: Any,
    student: Any,
    text: Text,
    settings: StageSettings,
    *,
    folder: Path,
    labelled: Encoded | None = None,
    projections: Projections | None = None,
    validation: Callable[[np.ndarray | None], Validation] | None = None,
    report: Report | None = None,
) -> Progress:
    """Train `student` in place on the objective of `stage`.

    Only the parts of both models that the objective reads are computed. If it compares the values of the student's last layer,
    that layer's output projection and feed-forward keep their first weights. Numbers are learned in deviations from their mean
    (`compress.models.task_heads`).

    Args:
        stage: the objective, the part of the student that trains, rate and schedule.
        teacher: not changed, unless `settings.teacher_shard` cuts it; None if the objective needs labels alone, or logits that come with
            `text`. An objective on outputs needs the same kind of head.
        student: of the same vocabulary.
        text: the text that both read: of a task a `TaskText`.
        settings: steps, seed and precision.
        folder: for checkpoints.
        labelled: of a task, the texts with labels, of which those of a head are `labelled.labels`, by index.
        projections: the learned maps of the objective; new ones if not given.
        validation: makes the `Validation` by which the best weights are kept; without it the last are. It is called with
            `remap`, which maps token ids to rows of narrowed embeddings, or None.
        report: called after each step.

    Raises:
        BadInput: heads, layers or widths that the objective cannot compare; a cut teacher and processes with unequal parts of a batch.
    """
    objective = stage.objective
    if teacher is not None:
        check_objective(objective, teacher.config, student.config)
    rate = settings.learning_rate or stage.learning_rate
    schedule = settings.schedule or Schedule(settings.steps, rate, stage.warmup, betas=stage.betas)
    torch.manual_seed(settings.seed)
    maps = projections or Projections(objective, (student if teacher is None else teacher).config, student.config)
    with ExitStack() as stack:
        if labelled is not None and (unit := labelled.task.unit_of(labelled)):
            assert isinstance(text, TaskText)
            text = replace(text, texts=unit.texts(text.texts), soft=None if text.soft is None else unit.soft(text.soft))
            stack.enter_context(standardised(unit, *(model for model in (student, teacher) if model is not None)))
        if teacher is not None and settings.teacher_shard:
            check_equal_shares(settings.accumulate)
            shard_layers(teacher.eval(), device_of_process(settings.device), settings.precision)
        elif teacher is not None:
            teacher.eval().to(device_of_process(settings.device))
            # A generator's teacher keeps float32: its logits over the vocabulary are what is learned.
            stack.enter_context(weights_in(teacher, settings.precision if stage.text != "pairs" else "fp32"))
        stack.enter_context(moving(student, stage.trains))
        remap = stack.enter_context(rows_narrowed(student, text, objective))
        batches = stack.enter_context(closing(Prefetcher(text.at, schedule.steps)))

        def loss_at(step: int, share: ProcessShare) -> dict[str, Tensor]:
            return step_losses(objective, teacher, student, part_of(batches.at(step), share), maps, remap)

        return train(
            _Trained(student, maps) if maps.maps else student,
            loss_at,
            schedule,
            settings,
            folder=folder,
            validation=None if validation is None else validation(remap),
            batches=batches,
            report=report,
        )


def validation_interval(steps: int, steps_per_epoch: int) -> int:
    """Steps between two validations of a training of `steps`: an epoch, or more, so that there are at most `MOST_VALIDATIONS`."""
    return min(steps, max(steps_per_epoch, -(-steps // MOST_VALIDATIONS)))


def validating(
    model: Any, validation: Encoded, gold: Sequence[Example], every: int, patience: int | None = None
) -> Callable[[np.ndarray | None], Validation]:
    """Validation every `every` steps by the task metric of the examples `gold`, from the answers that serving would give.

    Training ends after `patience` validations without a new best. The result takes the `remap` of `train_stage`.
    """
    task = validation.task
    right = [task.gold_of(example) for example in gold]

    def evaluate(remap: np.ndarray | None) -> float:
        said = task.predictions(validation, row_logits(model, validation, remap=remap))
        return task.metric.value(task.metric.counts(right, said))

    return lambda remap: Validation(every, partial(evaluate, remap), patience)


def step_losses(
    objective: Objective,
    teacher: Any,
    student: Any,
    batch: Batch,
    projections: Projections,
    remap: np.ndarray | None,
) -> dict[str, Tensor]:
    """The weighted loss terms of a batch, or of a part of one; the terms of all parts add up to those of the batch, but for
    those that compare its texts with each other.

    `batch` is on the CPU. If the models are on a GPU, this does not wait for it, except for rows that are padded and not packed, for
    outputs of every token, and for losses that `compress.losses.triton_kl` cannot compute.
    `remap` maps token ids to rows of the student's narrowed embeddings.
    """
    device = next(student.parameters()).device
    on_cpu, batch = batch, to_device(batch, device)
    theirs = Activations({})
    if objective.layers or (objective.asks_teacher and batch.soft is None):
        if objective.layers:
            expect(batch.inputs["attention_mask"], on_cpu.inputs["attention_mask"])
        with torch.no_grad():
            if not is_sharded(layers_of(teacher)[0]):
                teacher.to(device)
            if batch.teacher_activations is None:
                theirs = _read(teacher, objective, batch, teacher=True)
            else:
                kept = {Part(*part): value for part, value in batch.teacher_activations.items()}
                theirs = assembled(teacher, kept, objective.teacher_parts())
    seen = batch
    if remap is not None:
        rows = torch.from_numpy(remap[on_cpu.inputs["input_ids"].numpy()])
        seen = replace(batch, inputs=batch.inputs | {"input_ids": moved(rows, device)})
    ours = _read(student, objective, seen, teacher=False)
    heads = student.config.num_attention_heads
    inside = layer_losses(objective.layers, theirs, ours, batch.inputs["attention_mask"], heads, projections)
    terms = {name: batch.weights.texts * loss for name, loss in inside.items()}
    if objective.outputs:
        if ours.words is not None:
            shares = None if batch.generates else text_shares(batch.inputs["attention_mask"], _rows(batch, objective))
            answered = vocabulary_losses(objective.outputs, ours.words, theirs.words, batch.targets, weights=shares)
        else:
            expected = batch.soft if theirs.output is None else _answers(theirs, batch)
            answered = output_losses(objective.outputs, _answers(ours, batch), expected, batch.targets)
        weights = {term.name: _weight(term, batch) for term in objective.outputs}
        terms |= {name: weights[name] * loss for name, loss in answered.items()}
    return terms


class _Trained(nn.Module):
    """The student and the learned maps (discarded after training) as one module."""

    def __init__(self, student: nn.Module, projections: nn.Module) -> None:
        super().__init__()
        self.student, self.projections = student, projections


@contextmanager
def moving(student: Any, what: str) -> Iterator[None]:
    """Context in which only one part of the student trains: `all`, the `encoder` or the `head`.

    A pooler counts as part of the head, because only the head reads it.
    """
    inside = {id(p) for name, p in encoder_of(student).named_parameters() if not name.startswith("pooler.")}
    before = [(parameter, parameter.requires_grad) for parameter in student.parameters()]
    for parameter, _ in before if what != "all" else ():
        parameter.requires_grad = (id(parameter) in inside) == (what == "encoder")
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad = required


@contextmanager
def rows_narrowed(student: Any, text: Text, objective: Objective) -> Iterator[np.ndarray | None]:
    """Context in which the student holds only the embeddings in use, unless the objective needs the whole vocabulary."""
    if objective.masks_tokens or not next(iter(student.get_input_embeddings().parameters())).requires_grad:
        yield None
    else:
        with rows_in_use(student, text.ids, text.pad_id) as remap:
            yield remap


@contextmanager
def rows_in_use(model: Any, ids: Iterable[np.ndarray], pad_id: int) -> Iterator[np.ndarray]:
    """Context in which `model` holds only the embedding rows of `ids`; afterwards it has the whole table with the trained rows.

    A row whose token never occurs has no gradient, so Adam's moments for it stay 0 and the row never changes (embeddings have no weight
    decay here). Leaving it out changes no result and saves the optimiser's pass over it. Embeddings are two thirds of the parameters of a
    3x384 student.

    Yields:
        `remap`, so that `remap[token id]` is the row of that token. The pad token, that of the tokenizer and that of the model, and all
        ids below it keep their rows, because some families count positions from the pad id.
    """
    whole: nn.Embedding = model.get_input_embeddings()
    seen = np.zeros(whole.num_embeddings, dtype=bool)
    seen[: max(pad_id, getattr(model.config, "pad_token_id", None) or 0) + 1] = True
    for some in ids:
        seen[some] = True
    used = np.flatnonzero(seen)
    remap = np.zeros(whole.num_embeddings, dtype=np.int64)
    remap[used] = np.arange(len(used))
    rows = torch.from_numpy(used).to(whole.weight.device)
    narrow = nn.Embedding(len(used), whole.embedding_dim, padding_idx=whole.padding_idx)
    narrow.weight.data = whole.weight.data[rows].clone()
    model.set_input_embeddings(narrow)
    try:
        yield remap
    finally:
        whole.to(narrow.weight.device)  # training may have moved the model
        whole.weight.data[rows.to(whole.weight.device)] = narrow.weight.data
        model.set_input_embeddings(whole)


def _read(model: Any, objective: Objective, batch: Batch, *, teacher: bool) -> Activations:
    wanted = objective.teacher_parts() if teacher else objective.student_parts()
    output = objective.asks_teacher if teacher else bool(objective.outputs)
    if batch.generates:
        return Activations({}, words=asked_words(model, batch.inputs, batch.row_index))
    rows = _rows(batch, objective) if objective.masks_tokens and output else None
    inputs = kept_apart(model, inputs_for(model, batch.inputs))
    if batch.full and family_in(model).packs:
        # transformers would wait for the GPU to see that there is nothing to mask.
        inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
    return read(model, inputs, wanted, output=output, rows=rows)


def _weight(term: OutputTerm, batch: Batch) -> float:
    """The weight of a mean of `term` in the whole batch, of which `batch` may be a part."""
    if term.of == "vocabulary" and not batch.generates:
        return batch.weights.texts if term.everywhere else batch.weights.asked
    if term.loss == "labels" and not term.shared:
        return batch.weights.labelled
    return batch.weights.rows


def _rows(batch: Batch, objective: Objective) -> Tensor:
    """The tokens whose ids are predicted: the masked ones, or every real one."""
    if any(term.everywhere for term in objective.outputs):
        return batch.inputs["attention_mask"].flatten().nonzero().flatten()
    return batch.row_index


def _answers(found: Activations, batch: Batch) -> Tensor:
    """The task head's logits of the labelled rows, (rows, labels)."""
    logits: Tensor = found.output.logits
    return logits.reshape(-1, logits.shape[-1])[batch.row_index]
