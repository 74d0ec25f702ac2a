"""How many steps each training takes, and an estimate of minutes and memory from a few timed ones."""

import dataclasses
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress.data.batches import collate, rows_of, to_device
from compress.data.corpus import CorpusText
from compress.data.examples import check_task
from compress.engine.hardware import device_here
from compress.engine.task_stages import relation_pieces, relation_stage
from compress.evaluation.predictions import row_logits
from compress.losses.outputs import label_loss, total
from compress.methods.objectives import Projections
from compress.models.embedding_rows import rows_in_use
from compress.models.initialise import student_of
from compress.models.precision import computing, matrices_in
from compress.models.pretrained import load
from compress.training.stage import step_losses
from serve.errors import BadInput
from stillroom.inputs.preflight import RunInputs
from stillroom.inputs.recipe import Recipe

TIMED_STEPS = 6
# Export, parity and packing; start and warm-up of the timed models. Both hardly depend on the recipe. Measured on two cores.
FIXED_SECONDS = 45.0 + 60.0


@dataclass(frozen=True)
class Plan:
    """Steps of each training, with the expected time and memory."""

    teacher_steps: int
    relation_steps: int
    student_steps: int
    seconds: dict[str, float]
    memory_bytes: int = 0
    understood: dict[str, Any] = field(default_factory=dict)  # from `compress.engine.understood`

    @property
    def minutes(self) -> float:
        """All stages together."""
        return sum(self.seconds.values()) / 60


def full_plan(inputs: RunInputs) -> Plan:
    """The steps that the recipe asks for, not timed."""
    recipe = inputs.recipe
    per_epoch = math.ceil(len(inputs.train) / recipe.batch)
    pieces = len(relation_pieces(inputs)) if recipe.relation_epochs else 0
    return Plan(
        teacher_steps=0 if inputs.teacher_has_head else recipe.teacher_epochs * per_epoch,
        relation_steps=math.ceil(recipe.relation_epochs * pieces / recipe.batch),
        student_steps=recipe.student_epochs * per_epoch,
        seconds={},
    )


def timed_plan(inputs: RunInputs) -> Plan:
    """The recipe's steps with an estimate of seconds and memory, from a few steps of each training.

    Raises:
        BadInput: less than a tenth of the training fits into the recipe's `max_minutes`.
    """
    rates, labelling = seconds_a_step(inputs)
    fixed = FIXED_SECONDS + inputs.recipe.latency_seconds + labelling
    plan = fitted(full_plan(inputs), rates, fixed, inputs.recipe)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return dataclasses.replace(plan, memory_bytes=peak)


def fitted(plan: Plan, rates: dict[str, float], fixed: float, recipe: Recipe) -> Plan:
    """`plan` with seconds, at `rates` seconds a step of each training and `fixed` seconds for all else.

    With `max_minutes`, all trainings are shortened to the same share, so that they fit.

    Raises:
        BadInput: less than a tenth of the training fits.
    """

    def priced(share: float) -> Plan:
        whole = (plan.teacher_steps, plan.relation_steps, plan.student_steps)
        teacher, relations, student = (max(1, round(n * share)) if n else 0 for n in whole)
        seconds = {
            "teacher": teacher * rates["teacher"],
            "relations": relations * rates["relations"],
            # The comparison takes as many steps as relations and task distillation together.
            "undistilled": (relations + student) * rates["student"] if recipe.undistilled else 0.0,
            "student": student * rates["student"],
            "the rest": fixed,
        }
        return Plan(teacher, relations, student, seconds=seconds)

    whole = priced(1.0)
    if not recipe.max_minutes or whole.minutes <= recipe.max_minutes:
        return whole
    share = (60 * recipe.max_minutes - fixed) / (60 * whole.minutes - fixed)
    if share < 0.1:
        least = (fixed + 0.1 * (60 * whole.minutes - fixed)) / 60
        raise BadInput(
            f"--max-minutes is {recipe.max_minutes:g}; this recipe takes about {whole.minutes:.0f} minutes here, and {least:.1f} minutes "
            "for a tenth of its steps, the least allowed. Give more minutes, less data or a smaller student."
        )
    return priced(share)


def seconds_a_step(inputs: RunInputs) -> tuple[dict[str, float], float]:
    """Seconds per training step of teacher, relations and student; and seconds to label and score all texts."""
    recipe = inputs.recipe
    torch.manual_seed(recipe.seed)
    teacher = load(inputs.opened, check_task(recipe.task), None if inputs.teacher_has_head else inputs.labels)
    student, _ = student_of(teacher, inputs.opened.family, inputs.shape, seed=recipe.seed)
    rates = {"teacher": _task_step(teacher, inputs), "student": _task_step(student, inputs), "relations": 0.0}
    if recipe.relation_epochs:
        rates["relations"] = _relation_step(teacher, student, inputs)
    started = time.perf_counter()
    row_logits(teacher, inputs.validation)
    each = (time.perf_counter() - started) / len(inputs.validation)
    validations = recipe.teacher_epochs + 2 * recipe.student_epochs
    texts = (
        len(inputs.train)
        + len(inputs.in_domain or ())
        + 4 * len(inputs.test)
        + (5 + validations) * len(inputs.validation)
    )
    return rates, each * texts


def _task_step(model: Any, inputs: RunInputs) -> float:
    texts, batch = inputs.train, inputs.recipe.batch
    model.train()

    def loss_of(i: int, remap: Any) -> Tensor:
        chosen = [(i * batch + k) % len(texts) for k in range(batch)]
        data = to_device(collate(texts, chosen, remap=remap), device_here(inputs.recipe.device))
        return label_loss(rows_of(model, data), data.targets)

    return _timed(model, inputs, loss_of)


def _relation_step(teacher: Any, student: Any, inputs: RunInputs) -> float:
    teacher.to(device_here(inputs.recipe.device))
    objective = relation_stage(inputs).objective
    text = CorpusText(relation_pieces(inputs), inputs.train.pad_id, inputs.recipe.batch, inputs.recipe.seed)
    maps = Projections(objective, teacher.config, student.config)

    def loss_of(i: int, remap: Any) -> Tensor:
        return total(step_losses(objective, teacher, student, inputs.opened.family, text.at(i), maps, remap))

    with matrices_in(teacher, inputs.recipe.precision):
        return _timed(student, inputs, loss_of, text.ids)


def _timed(model: Any, inputs: RunInputs, loss_of: Callable[[int, Any], Tensor], ids: Any = None) -> float:
    """Median seconds of a step, without the first. The weights of `model` change: do not use it afterwards."""
    used = ids if ids is not None else [*inputs.train.ids, *inputs.validation.ids]
    model.to(device_here(inputs.recipe.device))
    with rows_in_use(model, used, inputs.train.pad_id) as remap:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        taken = []
        for i in range(TIMED_STEPS):
            started = time.perf_counter()
            with computing(device_here(inputs.recipe.device), inputs.recipe.precision):
                loss = loss_of(i, remap)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])
