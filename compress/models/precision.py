"""The precision of matrix products. Trained weights, sums and losses stay in float32."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from compress.models.dropout_attention import TiledAttention
from serve.errors import BadInput

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str, device: torch.device) -> None:
    """Check that `device` can train in `precision`. Raises BadInput: float16 on a CPU."""
    if precision == "fp16" and device.type != "cuda":
        raise BadInput(
            f"--precision is fp16, which needs a CUDA GPU, and the device is {device.type}, which has no fast float16 products. "
            "Give bf16, which has the range of float32 and needs no scaling of gradients, or fp32."
        )


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Context in which matrix products are in `precision`, whatever the type of the weights."""
    return torch.autocast(device.type, HALVES.get(precision, torch.bfloat16), enabled=precision in HALVES)


@contextmanager
def computing(device: torch.device, precision: str) -> Iterator[None]:
    """Context of a training's forward pass: products in `precision`, and on a CPU attention in tiles."""
    with autocast(device, precision), TiledAttention() if device.type == "cpu" else nullcontext():
        yield


@contextmanager
def weights_in(model: nn.Module, precision: str) -> Iterator[None]:
    """Context in which weights of `model`, which does not train, are held in `precision`; `autocast` would convert them each step.

    On a CPU, and in float16, these are the matrices, except embeddings and what is shared with one; results are the same to the bit.
    On a GPU in bfloat16 they are all weights: the sums between layers are then rounded to bfloat16 too, and read and written in
    half the time. That rounding makes the error of queries, keys and values 1.5 to 1.8 times as large as `autocast` does.
    """
    kept = hold_in(list(model.modules()), precision, next(model.parameters()).device)
    try:
        yield
    finally:
        for module, name, weight in kept:
            setattr(module, name, weight)


def hold_in(modules: Sequence[nn.Module], precision: str, device: torch.device) -> list[tuple[nn.Module, str, Tensor]]:
    """Hold the own weights of `modules` in `precision` as `weights_in` does for a model on `device`.

    Returns each module, the name of its weight, and what that weight was.
    """
    half = HALVES.get(precision)
    if half is None:
        return []
    every = half is torch.bfloat16 and device.type == "cuda"
    tables = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    kept: list[tuple[nn.Module, str, Tensor]] = [
        (module, name, weight)
        for module in modules
        for name, weight in module.named_parameters(recurse=False)
        if every or (isinstance(module, nn.Linear) and name == "weight" and id(weight) not in tables)
    ]
    held = {id(weight): nn.Parameter(weight.detach().to(half), requires_grad=False) for _, _, weight in kept}
    for module, name, weight in kept:
        setattr(module, name, held[id(weight)])
    return kept


@contextmanager
def own_precision(model: nn.Module) -> Iterator[None]:
    """Context without `autocast` if `model` is held in half precision as a whole; it would sum and normalise in float32."""
    first = next(model.parameters())
    if first.dtype in HALVES.values():
        with torch.autocast(first.device.type, enabled=False):
            yield
    else:
        yield
