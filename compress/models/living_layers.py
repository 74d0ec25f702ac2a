"""Which layers of a model do something: how much each changes its input on real text."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from compress.models.activations import Part, read
from compress.models.families import Family, layers_of

LIVES = 0.1  # a layer lives if its `relative_changes` are at least this (ours)


def relative_changes(
    model: nn.Module, family: Family, inputs: Mapping[str, Tensor], *, rescaled: bool = True
) -> tuple[float, ...]:
    """How much each layer changes its input: the least `|c layer(x) - x| / |x|` over `c`, averaged over real tokens.

    `c` is chosen for each token, so this is the sine of the angle between a token's vectors before and after the layer. A layer
    with LayerNorm after its branches rescales every token even if the branches add nothing, and that is no change.

    Args:
        model: an encoder of `family` with any head, or none.
        family: the model's module paths.
        inputs: `input_ids` and `attention_mask` (batch, tokens) of some texts, where the model is.
        rescaled: False takes `c = 1`, so that scale counts as well.
    """
    numbers = range(len(layers_of(model, family)) + 1)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        found = read(model, family, inputs, [Part("hidden", number) for number in numbers])
        hidden = [found["hidden", number][real].double() for number in numbers]  # (real tokens, width) each
        return tuple(float(_change(before, after, rescaled).mean()) for before, after in pairwise(hidden))


def _change(before: Tensor, after: Tensor, rescaled: bool) -> Tensor:
    """The relative change of each token (tokens,); the vectors are (tokens, width)."""
    scale: Tensor | float = 1.0
    if rescaled:
        scale = (before * after).sum(dim=-1, keepdim=True) / after.square().sum(dim=-1, keepdim=True)
    change: Tensor = (scale * after - before).norm(dim=-1) / before.norm(dim=-1)
    return change


def living_layers(changes: Sequence[float]) -> tuple[int, ...]:
    """The layers, from 1, that live by their `relative_changes`.

    >>> living_layers([0.5, 0.02, 0.4, 0.1])
    (1, 3, 4)
    """
    return tuple(number for number, change in enumerate(changes, 1) if change >= LIVES)


def nearest_living(layer: int, changes: Sequence[float]) -> int:
    """`layer` if it lives, otherwise the nearest that does, the lower of two; `layer` itself if none lives.

    >>> nearest_living(2, [0.5, 0.02, 0.4]), nearest_living(1, [0.02, 0.03, 0.4])
    (1, 3)
    """
    return min(living_layers(changes), key=lambda other: (abs(other - layer), other), default=layer)
