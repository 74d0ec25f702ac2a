"""The student before it has learned anything: parts of the teacher where shapes allow, otherwise as transformers makes them."""

import copy
from typing import Any

import torch
from torch import nn

from compress.families import Family, encoder_of, layers_of, linear
from compress.students import Shape


def uniform_layers(teacher_layers: int, student_layers: int) -> tuple[int, ...]:
    """Which teacher layers (from 1) a student starts from: evenly spread, ending with the last.

    >>> uniform_layers(12, 3), uniform_layers(6, 4)
    ((4, 8, 12), (2, 3, 5, 6))
    """
    return tuple(-(-(i * teacher_layers) // student_layers) for i in range(1, student_layers + 1))


def student_of(teacher: Any, family: Family, shape: Shape, *, seed: int) -> tuple[Any, dict[str, str]]:
    """A student of `shape` of the teacher's own class, and where each of its parts comes from.

    Same width: embeddings and head are copied, layers are those of `uniform_layers`, and of a wider feed-forward layer
    the units of largest norm are kept. Narrower: word embeddings by truncated SVD (XtremeDistil, section 3.1: the first
    columns of `U S`), the rest new. Deeper or wider than the teacher: what does not fit is new.
    """
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = shape.layers
    config.hidden_size = shape.hidden
    config.num_attention_heads = shape.heads
    setattr(config, family.ffn_size, shape.ffn)
    if getattr(config, "embedding_size", None) == teacher.config.hidden_size:
        config.embedding_size = shape.hidden
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = type(teacher)(config)
    with torch.no_grad():
        origin = _embeddings(teacher, student)
        origin |= _layers(teacher, student, family, shape)
        origin |= _head(teacher, student)
    return student.eval(), origin


def _embeddings(teacher: Any, student: Any) -> dict[str, str]:
    ours, theirs = student.get_input_embeddings(), teacher.get_input_embeddings()
    width = ours.weight.shape[1]
    if width == theirs.weight.shape[1]:
        _copy_part(encoder_of(teacher), encoder_of(student), "embeddings")
        if hasattr(encoder_of(student), "embeddings_project") and width != student.config.hidden_size:
            _copy_part(encoder_of(teacher), encoder_of(student), "embeddings_project")
        return {"embeddings": "the teacher's"}
    if width > theirs.weight.shape[1]:
        return {"embeddings": "new"}
    ours.weight.copy_(truncated(theirs.weight, width))
    return {
        "embeddings": f"truncated SVD of the teacher's, {theirs.weight.shape[1]} to {width}; positions and segments new"
    }


def truncated(embedding: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` columns of `U S` of `embedding` (rows, d), as (rows, width): the best product of that rank.

    `U S = embedding V`, and `V` is found from the small `(d, d)` Gram matrix, in float64.
    """
    wide = embedding.double()
    _, vectors = torch.linalg.eigh(wide.T @ wide)  # ascending
    v = vectors.flip(1)[:, :width]
    # The sign of an eigenvector is arbitrary; make its largest entry positive so that equal inputs give equal students.
    v = v * torch.sign(v.gather(0, v.abs().argmax(dim=0, keepdim=True)))
    product: torch.Tensor = (wide @ v).to(embedding.dtype)
    return product


def layers_fit(config: Any, shape: Shape) -> bool:
    """Whether a student of `shape` can start from layers of a teacher of this configuration."""
    return bool(
        shape.hidden == config.hidden_size
        and shape.heads == config.num_attention_heads
        and shape.layers <= config.num_hidden_layers
    )


def _layers(teacher: Any, student: Any, family: Family, shape: Shape) -> dict[str, str]:
    theirs, ours = layers_of(teacher, family), layers_of(student, family)
    if not layers_fit(teacher.config, shape):
        return {"layers": "new"}
    chosen = uniform_layers(len(theirs), shape.layers)
    fewer = False
    for layer, number in zip(ours, chosen, strict=True):
        source = theirs[number - 1]
        wide, narrow = linear(source, family.ffn_in), linear(layer, family.ffn_in)
        if narrow.out_features > wide.out_features:
            _copy_matching(source, layer)
            continue
        kept = largest_units(wide, linear(source, family.ffn_out), narrow.out_features)
        fewer |= len(kept) < wide.out_features
        _copy_matching(source, layer)
        narrow.weight.copy_(wide.weight[kept])
        narrow.bias.copy_(wide.bias[kept])
        out = linear(layer, family.ffn_out)
        out.weight.copy_(linear(source, family.ffn_out).weight[:, kept])
        out.bias.copy_(linear(source, family.ffn_out).bias)
    units = f", the {shape.ffn} feed-forward units of largest norm" if fewer else ""
    return {"layers": f"teacher layers {', '.join(map(str, chosen))}{units}"}


def largest_units(ffn_in: nn.Linear, ffn_out: nn.Linear, count: int) -> torch.Tensor:
    """Indices, ascending, of the `count` feed-forward units with the largest product of incoming and outgoing norm."""
    strength = ffn_in.weight.norm(dim=1) * ffn_out.weight.norm(dim=0)
    kept: torch.Tensor = strength.topk(count).indices.sort().values
    return kept


def _head(teacher: Any, student: Any) -> dict[str, str]:
    if teacher.config.hidden_size != student.config.hidden_size:
        return {"head": "new"}
    inside = encoder_of(teacher)
    # An encoder without a head is its own inside: its children are no heads.
    children = {} if inside is teacher else dict(teacher.named_children())
    heads = {name: module for name, module in children.items() if module is not inside}
    for name, module in heads.items():
        _copy_matching(module, student.get_submodule(name))
    if getattr(inside, "pooler", None) is not None:
        _copy_part(inside, encoder_of(student), "pooler")
    return {"head": "the teacher's"}


def _copy_part(source: nn.Module, target: nn.Module, name: str) -> None:
    _copy_matching(source.get_submodule(name), target.get_submodule(name))


def _copy_matching(source: nn.Module, target: nn.Module) -> None:
    """Copy each parameter whose name and shape agree."""
    theirs = dict(source.named_parameters())
    for name, ours in target.named_parameters():
        if name in theirs and theirs[name].shape == ours.shape:
            ours.copy_(theirs[name])
