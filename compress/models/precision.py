"""The precision of matrix products. Trained weights, sums and losses stay in float32."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from compress.models.dropout_attention import TiledAttention
from serve.errors import BadInput

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str, device: torch.device) -> None:
    """Check that `device` can train in `precision`.

    Raises:
        BadInput: float16 on a CPU.
    """
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
def matrices_in(model: nn.Module, precision: str) -> Iterator[None]:
    """Context in which the matrices of `model`, which does not train, are held in `precision`; `autocast` would convert them each step.

    Results are the same to the bit. Embeddings, and matrices shared with an embedding, are not converted.
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
