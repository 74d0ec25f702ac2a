"""The training loop.

A step is a pure function of the weights, the optimiser's moments, the seed and the step's number: random numbers are
seeded anew for each step, and the batch of a step is computed, not remembered. So a run that is killed and resumed from
its last checkpoint ends with the same bits as one that was not.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.checkpoint import (
    Progress,
    load_checkpoint,
    own_tensors,
    put_tensors,
    save_checkpoint,
    write_safetensors,
)
from compress.losses import total

CHECKPOINT = "checkpoint.safetensors"
BEST = "best.safetensors"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Schedule:
    """How a model is trained: `steps` in all, with linear warm-up over the share `warmup`, then linear decay to 0."""

    steps: int
    learning_rate: float
    warmup: float = 0.06
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)

    def rate(self, step: int) -> float:
        """The learning rate of step `step` (from 0)."""
        warm = max(1, math.ceil(self.steps * self.warmup))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        return self.learning_rate * max(0.0, (self.steps - step) / max(1, self.steps - warm))


@dataclass(frozen=True)
class Watch:
    """When and how to look at validation: every `every` steps; give up after `patience` looks without a new best."""

    every: int
    evaluate: Callable[[], float]
    patience: int | None = None


class Report(Protocol):
    """Told of each step: steps done, steps in all, the loss, and tokens a second where they are counted."""

    def __call__(self, done: int, steps: int, loss: float, tokens_per_s: float | None) -> None: ...  # noqa: D102 - the class says it


@dataclass(frozen=True)
class Order:
    """Which texts each step sees: `batch` of about equal length, every text once an epoch, shuffled by `seed`."""

    lengths: np.ndarray
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every text is seen once."""
        return -(-len(self.lengths) // self.batch)

    def tokens_at(self, step: int) -> int:
        """Real tokens of step `step`."""
        return int(self.lengths[self.at(step)].sum())

    def at(self, step: int) -> np.ndarray:
        """Indices of the texts of step `step`."""
        epoch, within = divmod(step, self.steps_per_epoch)
        ordered, turns = self._epoch(epoch)
        start = turns[within] * self.batch
        chosen: np.ndarray = ordered[start : start + self.batch]
        return chosen

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """All texts, those of a batch side by side, and which batch comes when; 8 bytes a text."""
        cached: tuple[int, tuple[np.ndarray, np.ndarray]] | None = self.__dict__.get("cached")
        if cached is None or cached[0] != epoch:
            object.__setattr__(self, "cached", None)  # before the next one is made: a corpus has many texts
            generator = np.random.default_rng([self.seed, epoch])
            order = generator.permutation(len(self.lengths))
            # Sorting within pools of some batches keeps padding low and still mixes what stands together.
            pool = 64 * self.batch
            for i in range(0, len(order), pool):
                part = order[i : i + pool]
                order[i : i + pool] = part[np.argsort(self.lengths[part], kind="stable")]
            cached = (epoch, (order, generator.permutation(self.steps_per_epoch)))
            object.__setattr__(self, "cached", cached)
        return cached[1]


def train(
    model: Any,
    loss_at: Callable[[int], dict[str, Tensor]],
    schedule: Schedule,
    *,
    folder: Path,
    seed: int,
    watch: Watch | None = None,
    precision: str = "fp32",
    checkpoint_every_s: float = 30.0,
    tokens_at: Callable[[int], int] | None = None,
    report: Report | None = None,
) -> Progress:
    """Train `model` in place, from the checkpoint in `folder` if there is one; with `watch`, end with its best weights.

    `folder/metrics.jsonl` gets a line for each of about 200 steps: the loss, its terms apart, rate and speed.

    Args:
        model: what is trained; parameters that need no gradient stay as they are.
        loss_at: the weighted loss terms of a step, given its number from 0.
        schedule: steps and learning rate.
        folder: holds the checkpoint and the best weights; made if absent.
        seed: together with the step's number it fixes dropout.
        watch: validation, best weights and early stopping.
        precision: `fp32`, or `bf16` for matrix products in bfloat16 with float32 weights.
        checkpoint_every_s: seconds between checkpoints: the work that a kill loses at most.
        tokens_at: the real tokens of a step, for the speed that is told.
        report: told of each step.
    """
    from accelerate import Accelerator

    folder.mkdir(parents=True, exist_ok=True)
    accelerator = (
        Accelerator()
    )  # precision is not its matter: its state is one for the process, a run's precision is not
    model.to(accelerator.device)
    optimizer = _optimizer(model, schedule)
    trained = [p for p in model.parameters() if p.requires_grad]
    progress = Progress()
    if (folder / CHECKPOINT).is_file():
        progress = load_checkpoint(folder / CHECKPOINT, model, optimizer)
    metrics = Metrics(folder / METRICS, progress.step)
    # No `prepare`: one process needs no wrapper, and unwrapped models keep their names in checkpoints.
    saved_at = started = time.monotonic()
    seen = 0
    model.train()
    while progress.step < schedule.steps and not progress.stopped:
        torch.manual_seed(_seed_of(seed, progress.step))
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(progress.step)
        with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=precision == "bf16"):
            terms = loss_at(progress.step)
        loss = total(terms)
        accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, schedule.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # new pages for every gradient cost more than clearing old ones
        progress.step += 1
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the loss became {value} at step {progress.step} "
                f"({', '.join(f'{name} {term.item():.4g}' for name, term in terms.items())}); a lower learning rate may help"
            )
        tokens_per_s = None
        if tokens_at:
            seen += tokens_at(progress.step - 1)
            tokens_per_s = seen / (time.monotonic() - started)
        if progress.step % max(1, schedule.steps // 200) == 0 or progress.step == schedule.steps:
            progress.loss.append((progress.step, value))
            metrics.write(progress.step, value, terms, schedule.rate(progress.step - 1), tokens_per_s)
        if watch and (progress.step % watch.every == 0 or progress.step == schedule.steps):
            _look(model, watch, progress, folder)
        if time.monotonic() - saved_at > checkpoint_every_s or progress.step == schedule.steps or progress.stopped:
            save_checkpoint(folder / CHECKPOINT, model, optimizer, progress)
            saved_at = time.monotonic()
        if report:
            report(progress.step, schedule.steps, value, tokens_per_s)
    if watch:
        put_tensors(model, load_file(folder / BEST))
    model.eval()
    return progress


class Metrics:
    """A file of JSON lines, one a step that is told of; what stands in it beyond step `step` is dropped."""

    def __init__(self, file: Path, step: int) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
        # A kill may have left half a line, and lines of steps that are now trained again.
        kept = [line for line in lines if line.endswith("}\n") and json.loads(line)["step"] <= step]
        beside = file.with_name(file.name + ".partial")
        beside.write_text("".join(kept), encoding="utf-8")
        beside.replace(file)

    def write(
        self, step: int, loss: float, terms: dict[str, Tensor], learning_rate: float, tokens_per_s: float | None
    ) -> None:
        """Add the line of one step."""
        apart = {name: term.item() for name, term in terms.items()}
        line = {
            "step": step,
            "loss": loss,
            "terms": apart,
            "learning_rate": learning_rate,
            "tokens_per_s": tokens_per_s,
        }
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _look(model: Any, watch: Watch, progress: Progress, folder: Path) -> None:
    """Validate; keep the weights of a new best; stop after `patience` looks without one."""
    model.eval()
    value = watch.evaluate()
    model.train()
    progress.validation.append((progress.step, value))
    if value > progress.best_value:
        progress.best_value, progress.best_step = value, progress.step
        write_safetensors(folder / BEST, own_tensors(model))
    since = sum(step > progress.best_step for step, _ in progress.validation)
    progress.stopped = watch.patience is not None and since >= watch.patience


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


def _seed_of(seed: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])
