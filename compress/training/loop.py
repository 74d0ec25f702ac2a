"""The training loop.

A step is a pure function of the weights, the optimiser's moments, the seed and the step's number: the generator is
seeded anew for each step, and the batch follows from the step's number. A run that is killed and resumed from its last
checkpoint therefore ends with the same bits as one that was not.

The batch of a step does not depend on how many processes train. Each process takes some shares of it. A mean over a share is
weighted by the part of the batch that the share holds, so the gradients of all shares add up to that of the whole batch.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress import distributed
from compress.distributed import ProcessShare
from compress.losses.outputs import total
from compress.methods.presets import Schedule
from compress.models.precision import check_precision, computing
from compress.training.checkpoint import (
    Progress,
    load_checkpoint,
    own_tensors,
    put_tensors,
    save_checkpoint,
    share_checkpoint,
    write_safetensors,
)
from compress.training.metrics import Metrics, Prefetcher
from serve.errors import BadInput

CHECKPOINT = "checkpoint.safetensors"
BEST = "best.safetensors"


# The share of the steps after which validations without a new best count. Before it the rate is high and scores waver, so that patience
# would end a training that still gains as the rate falls (docs/measurements/accuracy.md#patience).
COUNTS_FROM = 2 / 3


@dataclass(frozen=True)
class Validation:
    """When and how to validate: every `every` steps; give up after `patience` validations without a new best (see `COUNTS_FROM`)."""

    every: int
    evaluate: Callable[[], float]
    patience: int | None = None


@dataclass(frozen=True)
class StageSettings:
    """Settings of one training that its stage leaves open."""

    steps: int = 0
    seed: int = 0
    # Of matrix products: fp32, bf16, or on GPUs fp16. Weights stay in float32.
    precision: str = "fp32"
    # Seconds between checkpoints: the most work that a kill loses.
    checkpoint_every_s: float = 30.0
    # Replaces the stage's own rate; 0 keeps that.
    learning_rate: float = 0.0
    device: str = "auto"  # cpu, cuda, or auto: a GPU if there is one
    # Parts that each batch is computed in, one after the other, to need less memory.
    accumulate: int = 1
    # Names of trackers (`compress.training.metrics`) that get the metrics too.
    trackers: tuple[str, ...] = ()
    # Replaces `steps` and the stage's rate, warm-up and betas (see `compress.methods.presets`).
    schedule: Schedule | None = None
    # Cut the teacher's layers over all processes.
    teacher_shard: bool = False


class Diverged(BadInput):
    """The loss is not finite."""


# Called with steps done, steps in all, the loss, and tokens per second where they are counted: after each step, or on a GPU once the next
# step has begun, whose tokens are then counted too.
Report = Callable[[int, int, float, float | None], None]


def train(
    model: Any,
    loss_at: Callable[[int, ProcessShare], dict[str, Tensor]],
    schedule: Schedule,
    settings: StageSettings,
    *,
    folder: Path,
    validation: Validation | None = None,
    batches: Prefetcher | None = None,
    report: Report | None = None,
) -> Progress:
    """Train `model` in place, from the checkpoint in `folder` if there is one; with `validation`, end with the best weights.

    `folder/metrics.jsonl` gets a line for each of about 200 steps: the loss, each of its terms, learning rate and speed. With
    several processes (`compress.distributed`) each takes its shares of every batch, and the main process writes.

    Args:
        model: the model to train; parameters that need no gradient stay as they are.
        loss_at: gives the weighted loss terms of a step (its number, from 0) on a share of its batch; the terms of all
            shares add up to those of the batch.
        schedule: steps and learning rate, in place of those of `settings`.
        settings: the seed, which fixes dropout together with the numbers of step and share; precision, device and the rest.
        folder: holds the checkpoint and the best weights; made if absent. Of several processes only the main one reads and writes there.
        validation: when to validate; the best weights are then kept, and training may stop early.
        batches: the source of `loss_at`'s batches, from which speed, padding and waiting are reported.
        report: called after each step.

    Raises:
        Diverged: the loss is not finite.
        BadInput: float16 without a GPU, a tracker that is not installed, or a full disk.
    """
    place = device_of_process(settings.device)
    check_precision(settings.precision, place)
    model.to(place)
    optimizer = _optimizer(model, schedule)
    scaler = torch.amp.GradScaler(place.type, enabled=settings.precision == "fp16")
    progress = Progress()
    if distributed.main() and (folder / CHECKPOINT).is_file():
        progress = load_checkpoint(folder / CHECKPOINT, model, optimizer, scaler)
    progress = share_checkpoint(progress, model, optimizer, scaler)
    progress.planned = schedule.steps
    facts = {
        "steps": schedule.steps,
        "learning_rate": schedule.learning_rate,
        "seed": settings.seed,
        "precision": settings.precision,
    }
    # No `Accelerator.prepare`: gradients are summed here, and unwrapped models keep their names in checkpoints.
    with closing(Metrics(folder, progress.step, settings.trackers, facts, batches)) as metrics:

        def look(step: int, terms: dict[str, Tensor]) -> tuple[int, float, float | None]:
            value, speed = total(terms).item(), metrics.speed()
            if not math.isfinite(value):
                apart = ", ".join(f"{name} {term.item():.4g}" for name, term in terms.items())
                raise Diverged(
                    f"The loss became {value} at step {step} ({apart}); training cannot continue. Give a lower learning rate."
                )
            if step == schedule.steps or step % max(1, schedule.steps // 200) == 0:
                progress.loss.append((step, value))
                metrics.write(step, value, terms, schedule.rate(step - 1), speed)
            return step, value, speed.get("tokens_per_s")

        saved_at = time.monotonic()
        unseen: list[tuple[int, _Terms]] = []
        train_mode(model)
        while progress.step < schedule.steps and not progress.stopped:
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(progress.step)
            terms = _step(model, loss_at, progress.step, settings, scaler, optimizer, schedule.clip_norm)
            progress.step += 1
            unseen.append((progress.step, terms))
            last = progress.step == schedule.steps
            validates = validation is not None and (last or progress.step % validation.every == 0)
            due = last or time.monotonic() - saved_at > settings.checkpoint_every_s
            # A GPU starts the next step before the loss of this one is looked at; otherwise it would stand still meanwhile.
            at_once = place.type == "cpu" or validates or due
            ready, unseen = (unseen, []) if at_once else (unseen[:-1], unseen[-1:])
            seen = [look(number, arriving.read()) for number, arriving in ready]
            if validation and validates:
                _validate(model, validation, progress, folder)
                due = due or time.monotonic() - saved_at > settings.checkpoint_every_s
            if due or progress.stopped:
                if distributed.main():
                    save_checkpoint(folder / CHECKPOINT, model, optimizer, progress, scaler)
                saved_at = time.monotonic()
            if report:
                for number, value, speed in seen:
                    report(number, schedule.steps, value, speed)
    if validation:
        if distributed.main():
            put_tensors(model, load_file(folder / BEST))
        distributed.broadcast_tensors(list(own_tensors(model).values()))
    model.eval()
    return progress


def train_mode(model: Any) -> None:
    """Let `model` train; parts whose weights are all frozen compute as in use, without dropout."""
    model.train()
    for module in model.modules():
        weights = list(module.parameters())
        if weights and not any(weight.requires_grad for weight in weights):
            module.eval()


def device_of_process(device: str = "auto") -> torch.device:
    """The device that this process trains on: the CPU if `device` is `cpu`, otherwise its own GPU if there are any."""
    from accelerate import Accelerator

    distributed.join(device)
    if device == "cpu":
        return torch.device("cpu")
    found: torch.device = Accelerator().device
    return found


class _Terms:
    """The loss terms of a step, on their way from a GPU."""

    def __init__(self, names: Sequence[str], values: Tensor) -> None:
        self.names, self.values = names, values.to("cpu", non_blocking=True)
        self.arrived = torch.cuda.Event() if values.is_cuda else None  # type: ignore[no-untyped-call]
        if self.arrived:
            self.arrived.record()

    def read(self) -> dict[str, Tensor]:
        """Each term, a scalar, once the GPU has computed it."""
        if self.arrived:
            self.arrived.synchronize()
        return dict(zip(self.names, self.values, strict=True))


def _step(
    model: Any,
    loss_at: Callable[[int, ProcessShare], dict[str, Tensor]],
    step: int,
    settings: StageSettings,
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    clip_norm: float,
) -> _Terms:
    """Take one optimiser step. Its loss terms, and its gradients, are of the whole batch."""
    found: dict[str, Tensor] = {}
    for share in distributed.shares(settings.accumulate):
        # Share 0 has the seed of the whole batch: `SeedSequence` ignores trailing zeros.
        torch.manual_seed(int(np.random.SeedSequence([settings.seed, step, share.number]).generate_state(1)[0]))
        with computing(next(model.parameters()).device, settings.precision):
            terms = loss_at(step, share)
        scaler.scale(total(terms)).backward()  # type: ignore[no-untyped-call]
        found = {name: found[name] + term.detach() if found else term.detach() for name, term in terms.items()}
    values = torch.stack(list(found.values()))
    # Every process computed the same terms, so the same parameters have gradients.
    distributed.all_reduce([values, *(p.grad for p in model.parameters() if p.grad is not None)])
    arriving = _Terms(list(found), values)
    # If float16 overflowed, the scaler skips the step and lowers the scale.
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)  # clearing is faster than allocating new ones
    return arriving


def _validate(model: Any, validation: Validation, progress: Progress, folder: Path) -> None:
    """Validate in the main process; keep the weights of a new best; stop after `patience` validations late in training without one."""
    value = 0.0
    if distributed.main():
        model.eval()
        value = validation.evaluate()
        train_mode(model)
        if value > progress.best_value:
            write_safetensors(folder / BEST, own_tensors(model))
    value = distributed.broadcast(value)
    progress.validation.append((progress.step, value))
    if value > progress.best_value:
        progress.best_value, progress.best_step = value, progress.step
    counted = max(progress.best_step, COUNTS_FROM * progress.planned)
    since = sum(step > counted for step, _ in progress.validation)
    progress.stopped = validation.patience is not None and since >= validation.patience


def _optimizer(model: Any, schedule: Schedule) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only, not on biases, LayerNorm or embeddings."""
    from torch import nn

    undecayed = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.LayerNorm)
        for parameter in module.parameters(recurse=False)
    }
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (rest if id(parameter) in undecayed or parameter.ndim < 2 else matrices).append(parameter)
    groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=schedule.betas, fused=True)
