"""The student before it has learned anything: parts of the teacher where shapes allow, otherwise as transformers makes them."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from compress.families import Family, encoder_of, layers_of, linear
from compress.students import Shape
from serve.errors import BadInput


def uniform_layers(teacher_layers: int, student_layers: int) -> tuple[int, ...]:
    """Which teacher layers (from 1) a student starts from: evenly spread, ending with the last.

    >>> uniform_layers(12, 3), uniform_layers(6, 4)
    ((4, 8, 12), (2, 3, 5, 6))
    """
    return tuple(-(-(i * teacher_layers) // student_layers) for i in range(1, student_layers + 1))


def student_of(
    teacher: Any, family: Family, shape: Shape, *, seed: int, chosen: Sequence[int] = (), new_layers: bool = False
) -> tuple[Any, dict[str, str]]:
    """A student of `shape` of the teacher's own class, and where each of its parts comes from.

    Same width: embeddings and head are copied, layers are those of `uniform_layers` or the `chosen` ones (from 1), and of a
    wider feed-forward layer the units of largest norm are kept. Narrower: word embeddings by truncated SVD (XtremeDistil,
    section 3.1: the first columns of `U S`), the rest new. Deeper or wider than the teacher: what does not fit is new.
    With `new_layers` the layers are new in any case.
    """
    chosen = tuple(chosen) or uniform_layers(teacher.config.num_hidden_layers, shape.layers)
    if len(chosen) != shape.layers or not all(1 <= layer <= teacher.config.num_hidden_layers for layer in chosen):
        raise BadInput(
            f"Layers {', '.join(map(str, chosen))} were asked for; a student of {shape.layers} layers needs {shape.layers} of the "
            f"teacher's, which has 1 to {teacher.config.num_hidden_layers}."
        )
    fits = layers_fit(teacher.config, shape) and not new_layers
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = shape.layers
    config.hidden_size = shape.hidden
    config.num_attention_heads = shape.heads
    setattr(config, family.ffn_size, shape.ffn)
    if getattr(config, "embedding_size", None) == teacher.config.hidden_size:
        config.embedding_size = shape.hidden
    kinds = getattr(config, "layer_types", None)
    if kinds:  # of ModernBERT's layers: a layer keeps the window that it was trained with
        config.layer_types = [kinds[layer - 1] for layer in chosen] if fits else (kinds * shape.layers)[: shape.layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = type(teacher)(config)
    with torch.no_grad():
        origin = _embeddings(teacher, student)
        origin |= _layers(teacher, student, family, shape, chosen) if fits else {"layers": "new"}
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


def _layers(teacher: Any, student: Any, family: Family, shape: Shape, chosen: Sequence[int]) -> dict[str, str]:
    theirs, ours = layers_of(teacher, family), layers_of(student, family)
    # What belongs to all layers: a norm above the last, a bias by distance.
    apart = [name for name, _ in encoder_of(student).named_children() if name not in {"embeddings", "pooler"}]
    for name in apart:
        _copy_matching(
            encoder_of(teacher).get_submodule(name),
            encoder_of(student).get_submodule(name),
            but=(id(x) for x in ours.parameters()),
        )
    fewer = False
    for layer, number in zip(ours, chosen, strict=True):
        source = theirs[number - 1]
        wide, narrow = linear(source, family.ffn_in), linear(layer, family.ffn_in)
        if narrow.out_features > wide.out_features:
            _copy_matching(source, layer)
            continue
        out, wide_out = linear(layer, family.ffn_out), linear(source, family.ffn_out)
        kept = largest_units(wide, wide_out, out.in_features)
        fewer |= len(kept) < wide_out.in_features
        _copy_matching(source, layer)
        # A gated unit has a row in each half.
        rows = torch.cat([kept + half * wide_out.in_features for half in range(family.ffn_rows)])
        narrow.weight.copy_(wide.weight[rows])
        if narrow.bias is not None:
            narrow.bias.copy_(wide.bias[rows])
        out.weight.copy_(wide_out.weight[:, kept])
        if out.bias is not None:
            out.bias.copy_(wide_out.bias)
    units = f", the {shape.ffn} feed-forward units of largest norm" if fewer else ""
    return {"layers": f"teacher layers {', '.join(map(str, chosen))}{units}"}


def largest_units(ffn_in: nn.Linear, ffn_out: nn.Linear, count: int) -> torch.Tensor:
    """Indices, ascending, of the `count` feed-forward units with the largest product of incoming and outgoing norm."""
    incoming = ffn_in.weight.norm(dim=1).view(-1, ffn_out.in_features).norm(dim=0)  # of both rows of a gated unit
    strength = incoming * ffn_out.weight.norm(dim=0)
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


def _copy_matching(source: nn.Module, target: nn.Module, but: Iterable[int] = ()) -> None:
    """Copy each parameter whose name and shape agree, other than those of the ids `but`."""
    theirs, left = dict(source.named_parameters()), set(but)
    for name, ours in target.named_parameters():
        if name in theirs and theirs[name].shape == ours.shape and id(ours) not in left:
            ours.copy_(theirs[name])
