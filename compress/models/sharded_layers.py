"""A model whose layers are cut over all processes: each holds a part of every weight, and gathers one layer at a time to compute it.

This is FSDP2, torch's `fully_shard`. Embeddings and the head stay whole in each process.
"""

from typing import Any

import torch
from torch import nn

from compress import distributed
from compress.models.families import layers_of
from compress.models.precision import hold_in
from serve.errors import BadInput


def shard_layers(model: Any, device: torch.device, precision: str) -> None:
    """Cut the layers of `model`, which does not train any more, over all processes, and hold it on `device` in `precision`.

    All processes call this, and from then on run the same number of forward passes: each layer is a meeting of all of them.
    `device` gets one layer at a time, so it never holds more than the parts, the embeddings, the head and one whole layer.

    Args:
        model: an encoder with any head, or none, whole on the CPU.
        device: of this process.
        precision: of the weights, as of `compress.models.precision.weights_in`, but for good.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model.requires_grad_(False)
    mesh = init_device_mesh(device.type, (distributed.count(),))
    inside: set[nn.Module] = set()
    for layer in layers_of(model):
        hold_in(list(layer.modules()), precision, device)
        inside.update(layer.modules())
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    hold_in([module for module in model.modules() if module not in inside], precision, device)
    model.to(device)


def is_sharded(layer: nn.Module) -> bool:
    """Whether `layer` was cut by `shard_layers`."""
    return hasattr(layer, "reshard")  # fully_shard adds it to the layer's class


def check_equal_shares(accumulate: int) -> None:
    """Check that every process computes as many parts of a batch as the others; otherwise some would wait for ever.

    Raises:
        BadInput: a training goes on with a number of processes that does not divide the number of parts.
    """
    parts, processes = distributed.shares(accumulate)[0].of, distributed.count()
    if parts % processes:
        raise BadInput(
            f"--teacher-shard: this training began with {parts // accumulate} processes, so its batches are cut into {parts} parts, which "
            f"{processes} processes cannot share evenly, and every process must ask the cut teacher as often as the others. Go on with "
            f"{parts // accumulate} processes, or another number that divides {parts}."
        )
