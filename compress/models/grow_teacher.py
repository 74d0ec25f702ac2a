"""A larger teacher from a smaller one, so that a true reduction of width and depth can be tried where no larger one is at hand."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.families import Family, layers_of, linear
from serve.errors import BadInput

# Those whose layers are `LayerNorm(x + f(x))` with separate queries, keys and values, and embeddings as wide as they.
GROWABLE = ("bert", "roberta", "xlm-roberta")


def grown(model: Any, family: Family) -> Any:
    """A model twice as wide and twice as deep as `model` that says nearly the same.

    Every unit stands twice: embeddings and outputs are doubled, incoming weights halved, so that the function stays as
    it was; heads are doubled in width, and queries divided by sqrt(2) for it. Below each layer's successor comes a new
    layer whose two branches end in zeros: it passes on what it gets, but for its LayerNorms, which are set to the mean and
    the spread that the layer below has on average.

    Args:
        model: an encoder, with or without a head for a task.
        family: where it keeps its parts.

    Returns:
        A model of the same class whose hidden states (batch, tokens, 2 width) hold each unit's value twice; it has as many
        labels as `model`.

    Raises:
        BadInput: a family whose layers are of another kind, or a head that guesses masked words.
    """
    config = copy.deepcopy(model.config)
    guesses = type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining", "LMHeadModel"))
    if config.model_type not in GROWABLE or guesses:
        raise BadInput(
            f"A {config.model_type} model with this head cannot be grown; "
            f"one of {', '.join(GROWABLE)} can, with a head for a task or none."
        )
    config.hidden_size *= 2
    config.intermediate_size *= 2
    config.num_hidden_layers *= 2
    larger = type(model)(config)
    theirs, ours = layers_of(model, family), layers_of(larger, family)
    with torch.no_grad():
        of_layers = {id(module) for layer in ours for module in layer.modules()}
        for name, module in larger.named_modules():
            if id(module) not in of_layers:
                _double(model.get_submodule(name), module)
        for number, layer in enumerate(theirs):
            own, new = ours[2 * number], ours[2 * number + 1]
            for target in (own, new):
                for name, module in target.named_modules():
                    _double(layer.get_submodule(name), module)
                query: Any = linear(target, family.query)
                query.weight /= 2**0.5
                query.bias /= 2**0.5
            _pass_on(new, own, family)
    return larger.eval()


def _double(module: nn.Module, larger: nn.Module) -> None:
    """Give the parameters that `larger` itself holds those of `module` with every unit twice, one beside the other.

    Weights of what comes in are halved where it comes twice; a table of words or positions has nothing coming in.
    """
    for name, parameter in larger.named_parameters(recurse=False):
        value: Tensor = module.get_parameter(name)
        for axis in range(value.ndim):
            value = value.repeat_interleave(parameter.shape[axis] // value.shape[axis], dim=axis)
        halved = (
            isinstance(larger, nn.Linear)
            and value.ndim == 2
            and value.shape[1] == 2 * module.get_parameter(name).shape[1]
        )
        parameter.copy_(value / 2 if halved else value)


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
