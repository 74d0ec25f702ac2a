"""A larger teacher from a smaller one, so that a true reduction of width and depth can be tried where no larger one is at hand."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from compress.families import Family, encoder_of, layers_of, linear
from serve.errors import BadInput

# Those whose layers are `LayerNorm(x + f(x))` with separate queries, keys and values, and embeddings as wide as they.
GROWABLE = ("bert", "roberta", "xlm-roberta")


def grown(model: Any, family: Family) -> Any:
    """An encoder twice as wide and twice as deep as `model` that says nearly the same.

    Every unit stands twice: embeddings and outputs are doubled, incoming weights halved, so that the function stays as
    it was; heads are doubled in width, and queries divided by sqrt(2) for it. Below each layer's successor comes a new
    layer whose two branches end in zeros: it passes on what it gets, but for its LayerNorms, which are set to the mean and
    the spread that the layer below has on average.

    Args:
        model: an encoder without a head.
        family: where it keeps its parts.

    Returns:
        A model of the same class whose hidden states (batch, tokens, 2 width) hold each unit's value twice.

    Raises:
        BadInput: a family whose layers are of another kind.
    """
    config = copy.deepcopy(model.config)
    if config.model_type not in GROWABLE or encoder_of(model) is not model:
        raise BadInput(
            f"A {config.model_type} model with this head cannot be grown; "
            f"an encoder without a head, of {', '.join(GROWABLE)}, can."
        )
    config.hidden_size *= 2
    config.intermediate_size *= 2
    config.num_hidden_layers *= 2
    larger = type(model)(config)
    doubled = {name: _doubled(name, value) for name, value in model.state_dict().items()}
    prefix = f"{family.layers}."
    with torch.no_grad():
        larger.load_state_dict({n: v for n, v in doubled.items() if not n.startswith(prefix)}, strict=False)
        for number, layer in enumerate(layers_of(model, family)):
            own, new = layers_of(larger, family)[2 * number], layers_of(larger, family)[2 * number + 1]
            for target in (own, new):
                target.load_state_dict({name: _doubled(name, value) for name, value in layer.state_dict().items()})
                query: Any = linear(target, family.query)
                query.weight /= 2**0.5
                query.bias /= 2**0.5
            _pass_on(new, own, family)
    return larger.eval()


def _doubled(name: str, value: Tensor) -> Tensor:
    """A parameter with every unit twice, one beside the other; incoming weights are halved, tables are not."""
    if value.ndim == 1:
        return value.repeat_interleave(2)
    if value.ndim == 2 and value.is_floating_point() and "embeddings" in name:
        return value.repeat_interleave(2, dim=1)
    if value.ndim == 2 and value.is_floating_point():
        return value.repeat_interleave(2, dim=0).repeat_interleave(2, dim=1) / 2
    return value


def _pass_on(new: nn.Module, below: nn.Module, family: Family) -> None:
    """Make `new` pass on what the layer `below` gives."""
    for path in (family.attention_output, family.ffn_out):
        projection: Any = linear(new, path)
        projection.weight.zero_()
        projection.bias.zero_()
    norms: list[Any] = [module for module in below.modules() if isinstance(module, nn.LayerNorm)]
    last: Any = norms[-1]  # what it gives is `weight * n + bias` with n of mean 0 and spread 1
    spread = (last.weight.square().mean() + last.bias.var(unbiased=False)).sqrt()
    theirs: list[Any] = [module for module in new.modules() if isinstance(module, nn.LayerNorm)]
    for norm in theirs:
        norm.weight.fill_(spread)
        norm.bias.fill_(last.bias.mean())
