"""Keeps the pieces of a packed row apart in a model: each attends to itself alone, and its positions begin at 0."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from compress.models.configurations import first_position
from compress.models.families import FAMILIES


def row_tokens_for(longest: int, *configs: Any) -> int:
    """The tokens of a packed row for pieces of at most `longest` tokens, or 0 if one of the models cannot read packed rows.

    A model must take a mask of pairs of tokens, which transformers passes on since its version 5, and position ids. ModernBERT
    gets one mask for all layers, so its windows would be lost.
    """
    return longest if all(map(_reads_packed_rows, configs)) else 0


def _reads_packed_rows(config: Any) -> bool:
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5 or not FAMILIES[config.model_type].packs:
        return False
    return "position_ids" in signature(transformers.MODEL_MAPPING[type(config)].forward).parameters


def kept_apart(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """`inputs` as the forward of `model` takes them; with `position_ids` (see `compress.data.batches.Batch`) they are packed.

    The mask of packed inputs becomes (batch, 1, tokens, tokens), numbers that are added to scores. Padding attends to padding,
    because a query without any key would give NaN.
    """
    if "position_ids" not in inputs:
        return inputs
    numbers = inputs["attention_mask"]
    others = (numbers[:, :, None] != numbers[:, None, :])[:, None]
    dtype = next(model.parameters()).dtype
    if numbers.is_cuda and dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")  # otherwise every layer would convert it
    mask = torch.zeros(others.shape, dtype=dtype, device=numbers.device).masked_fill_(others, torch.finfo(dtype).min)
    return inputs | {"attention_mask": mask, "position_ids": inputs["position_ids"] + first_position(model.config)}
