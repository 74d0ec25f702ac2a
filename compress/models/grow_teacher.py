"""Makes a larger teacher from a smaller one, to test a reduction of width and depth without a large model."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.families import Family, layers_of, linear
from serve.errors import BadInput

# Families with layers `LayerNorm(x + f(x))`, separate queries, keys and values, and embeddings as wide as the layers.
GROWABLE = ("bert", "roberta", "xlm-roberta")


def grown(model: Any, family: Family, *, noise: float = 0.0, branch: float = 0.0, seed: int = 0) -> Any:
    """A model twice as wide and twice as deep as `model` that computes nearly the same function.

    Every unit occurs twice: embeddings and outputs are repeated and incoming weights halved, which keeps the function. Heads
    are twice as wide, so queries are divided by sqrt(2). After each layer comes a new layer whose two branches end in zeros:
    it passes its input on, except for its LayerNorms, which are set to the average mean and spread of the layer below.

    Twins, the two copies of a unit, get equal gradients and never part by training. `noise` parts them.

    Args:
        model: an encoder, with or without a head for a task.
        family: the model's module paths.
        noise: normal noise added to every matrix, as a share of the root mean square of the matrix. 0 adds none.
        branch: the share of the layer below's branches that a new layer adds, in place of zeros.
        seed: of the noise.

    Returns:
        A model of the same class whose hidden states (batch, tokens, 2 width) hold each unit's value twice; it has as many
        labels as `model`.

    Raises:
        BadInput: a family whose layers are of another kind, or a masked-language-model head.
    """
    config = copy.deepcopy(model.config)
    guesses = type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining", "LMHeadModel"))
    if config.model_type not in GROWABLE or guesses:
        raise BadInput(
            f"A {config.model_type} model with this head cannot be grown. Give one of {', '.join(GROWABLE)}, with a head for a task "
            "or without a head."
        )
    config.hidden_size *= 2
    config.intermediate_size *= 2
    config.num_hidden_layers *= 2
    larger = type(model)(config)
    theirs, ours = layers_of(model), layers_of(larger)
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
            _pass_on(new, own, family, branch)
        _add_noise(larger, noise, seed)
    return larger.eval()


def _double(module: nn.Module, larger: nn.Module) -> None:
    """Set the own parameters of `larger` to those of `module`, with every unit repeated next to itself.

    A matrix whose inputs occur twice is halved; a table of words or positions has no inputs.
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


def _pass_on(new: nn.Module, below: nn.Module, family: Family, branch: float) -> None:
    """Make `new` pass on the output of the layer `below`, and add `branch` of its two branches, which are those of `below`."""
    for path in (family.attention_output, family.ffn_out):
        projection: Any = linear(new, path)
        projection.weight *= branch
        projection.bias *= branch
    norms: list[Any] = [module for module in below.modules() if isinstance(module, nn.LayerNorm)]
    last: Any = norms[-1]  # its output is `weight * n + bias` with n of mean 0 and spread 1
    spread = (last.weight.square().mean() + last.bias.var(unbiased=False)).sqrt()
    theirs: list[Any] = [module for module in new.modules() if isinstance(module, nn.LayerNorm)]
    for norm in theirs:
        norm.weight.fill_(spread)
        norm.bias.fill_(last.bias.mean())


def _add_noise(model: nn.Module, noise: float, seed: int) -> None:
    """Add normal noise to every matrix and table of `model`, `noise` times its root mean square; zeros stay zeros."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if noise and parameter.ndim == 2:
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * parameter.square().mean().sqrt() * drawn)
