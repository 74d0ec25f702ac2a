"""In how many bits matrices are multiplied. Weights that are trained stay in float32, and so does what is summed and compared."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from compress.models.dropout_attention import TiledAttention
from serve.errors import BadInput

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str, device: torch.device) -> None:
    """Nothing, when `device` can be trained on in `precision`.

    Raises:
        BadInput: float16 on a CPU.
    """
    if precision == "fp16" and device.type != "cuda":
        raise BadInput(
            f"fp16 trains on CUDA GPUs, and this would run on {device.type}, which has no fast products in float16. "
            "Take bf16, which has the range of float32 and needs no scaling of gradients, or fp32."
        )


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Within it matrix products are in `precision`, whatever the weights are in."""
    return torch.autocast(device.type, HALVES.get(precision, torch.bfloat16), enabled=precision in HALVES)


@contextmanager
def computing(device: torch.device, precision: str) -> Iterator[None]:
    """Within it a model in training goes forward as the loop has it: products in `precision`, on a CPU attention in tiles."""
    with autocast(device, precision), TiledAttention() if device.type == "cpu" else nullcontext():
        yield


@contextmanager
def matrices_in(model: nn.Module, precision: str) -> Iterator[None]:
    """Within it the matrices of `model`, which is not trained, are held as `autocast` would otherwise make them in every step.

    What it computes is the same to the bit. Embeddings stay as they are, and so does a matrix that is an embedding too.
    """
    half = HALVES.get(precision)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kept = [(m, m.weight) for m in model.modules() if isinstance(m, nn.Linear) and id(m.weight) not in tables]
    try:
        if half is not None:
            for module, weight in kept:
                module.weight = nn.Parameter(weight.detach().to(half), requires_grad=False)
        yield
    finally:
        for module, weight in kept:
            module.weight = weight
