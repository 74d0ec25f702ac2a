"""Reads a model's activations: hidden states, queries, keys, values, attention scores; and how much each layer changes its input.

Forward hooks on the model's modules read them, so any head and any attention kernel works, and the model does not change.
If no output is wanted, the forward pass ends once the last wanted part has been computed, so later layers cost nothing.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compress import distributed
from compress.losses.outputs import full
from compress.losses.tiled_relations import RelationFactors
from compress.losses.vectors import split_heads
from compress.models.families import encoder_of, family_in, layers_of, linear
from compress.models.precision import hold_in, own_precision
from serve.errors import BadInput


class Part(NamedTuple):
    """One part of a model's activations: `of` is hidden, queries, keys, values or scores; layers count from 1.

    `hidden` of layer 0 is the input of the first layer; of layer `l` its output; of the last layer the input of the head.
    """

    of: str
    layer: int


class Unprojected(NamedTuple):
    """The logits of a masked-language-model head, not computed yet: its last matrix makes them from `vectors` (rows, width).

    A row of logits is as long as the vocabulary, so those of a whole batch take gigabytes.
    """

    vectors: Tensor
    projection: nn.Linear

    @property
    def words(self) -> int:
        """The size of the vocabulary."""
        return self.projection.out_features

    def logits(self, rows: slice) -> Tensor:
        """The logits (rows, vocabulary) of some of the rows."""
        found: Tensor = self.projection(self.vectors[rows])
        return found


@dataclass
class Activations:
    """What was read: vectors (batch, tokens, width); by layer the factors of scores; and the model's output, if wanted."""

    parts: dict[Part, Tensor]
    scores: dict[int, RelationFactors] = field(default_factory=dict)
    output: Any = None
    words: Unprojected | None = None

    def __getitem__(self, part: tuple[str, int]) -> Tensor:
        return self.parts[Part(*part)]


class _Enough(Exception):
    """Raised inside a forward pass to leave it."""


def read(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    wanted: Collection[Part],
    *,
    output: bool = False,
    rows: Tensor | None = None,
) -> Activations:
    """The parts `wanted` of `model` on `inputs`; they carry gradients if torch records them.

    Scores are those before any mask and the softmax, and include the family's positions.

    Args:
        model: an encoder with any head, or none.
        inputs: the arguments of its forward: `input_ids` and `attention_mask`, both (batch, tokens), and others.
        wanted: the parts.
        output: whether the model's output is wanted too; it is then in `output`.
        rows: indices into (batch * tokens) of the tokens that a masked-language-model head is asked about. In place of `output`
            there is then `words`, of these tokens alone.

    Raises:
        BadInput: a layer that the model does not have.
    """
    layers = layers_of(model)
    for part in wanted:
        if not (0 if part.of == "hidden" else 1) <= part.layer <= len(layers):
            raise BadInput(f"Layer {part.layer} has no {part.of} to read. Give a layer from 1 to {len(layers)}.")
    sources = sources_of(wanted)
    found: dict[Part, Tensor] = {}
    if not wanted and not output:
        return Activations({})
    answer = words = None
    with _hooks(model, sources, found, leave=not output), _asked(model, rows) as vectors:
        with suppress(_Enough), own_precision(model):
            answer = model(**inputs)
    if vectors:
        words = Unprojected(vectors[0], model.get_output_embeddings())  # type: ignore[operator]
    return replace(assembled(model, found, wanted, answer), words=words)


def sources_of(wanted: Collection[Part]) -> set[Part]:
    """The vectors from which the parts `wanted` can be assembled."""
    made_from = {Part(of, part.layer) for part in wanted if part.of == "scores" for of in ("queries", "keys")}
    return {part for part in wanted if part.of != "scores"} | made_from


def assembled(
    model: nn.Module, found: Mapping[Part, Tensor], wanted: Collection[Part], output: Any = None
) -> Activations:
    """The parts `wanted`, assembled from `found`, the vectors of `sources_of`."""
    scores: dict[int, RelationFactors] = {}
    layers = layers_of(model)
    for layer in {part.layer for part in wanted if part.of == "scores"}:
        heads = int(model.config.num_attention_heads)  # type: ignore[union-attr, arg-type]
        queries, keys = (split_heads(full(found[Part(of, layer)]), heads) for of in ("queries", "keys"))
        with torch.autocast(queries.device.type, enabled=False):
            scores[layer] = family_in(model).attends(encoder_of(model), layers[layer - 1], queries, keys)
    return Activations({part: found[part] for part in wanted if part in found}, scores, output)


@contextmanager
def _asked(model: nn.Module, rows: Tensor | None) -> Iterator[list[Tensor]]:
    """Context in which a masked-language-model head gets only the tokens `rows`, and is left before it computes logits.

    What it would compute them from, (rows, width), is then in the list.
    """
    vectors: list[Tensor] = []
    if rows is None:
        yield vectors
        return

    def choose(_module: nn.Module, _inputs: Any, result: Any) -> Any:
        hidden = result.last_hidden_state
        result.last_hidden_state = hidden.reshape(1, -1, hidden.shape[-1])[:, rows]
        return result

    def leave(_module: nn.Module, inputs: tuple[Tensor]) -> None:
        vectors.append(inputs[0].squeeze(0))
        raise _Enough

    projection: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
    handles = (encoder_of(model).register_forward_hook(choose), projection.register_forward_pre_hook(leave))
    try:
        yield vectors
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _hooks(model: nn.Module, sources: set[Part], found: dict[Part, Tensor], *, leave: bool) -> Iterator[None]:
    """Context in which `model` writes each part of `sources` into `found`; with `leave`, the last one ends the forward pass, but not in
    the middle of a layer that is cut over processes."""
    layers, family = layers_of(model), family_in(model)
    # A layer that is cut over processes gives its gathered weights back at its own end.
    ends_layers = is_sharded(layers[0])

    def leave_if_enough(*_: Any) -> None:
        if leave and len(found) == len(sources):
            raise _Enough

    def keep(part: Part, value: Tensor) -> None:
        if part in sources:
            found[part] = value
            if not ends_layers:
                leave_if_enough()

    def enters(_module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        keep(Part("hidden", 0), positional[0] if positional else named["hidden_states"])

    handles = [layers[0].register_forward_pre_hook(enters, with_kwargs=True)]

    def after(module: nn.Module, *parts: Part) -> None:
        def left(_module: nn.Module, _inputs: Any, result: Any) -> None:
            value = result[0] if isinstance(result, tuple) else result
            pieces = value.chunk(len(parts), dim=-1) if len(parts) > 1 else (value,)
            for part, piece in zip(parts, pieces, strict=True):
                keep(part, piece)

        handles.append(module.register_forward_hook(left))

    for number, layer in enumerate(layers, 1):
        last = number == len(layers)
        ends = encoder_of(model).get_submodule(family.final_norm) if last and family.final_norm else layer
        after(ends, Part("hidden", number))
        if family.fused:
            after(linear(layer, family.fused), *(Part(of, number) for of in ("queries", "keys", "values")))
        else:
            for of, path in (("queries", family.query), ("keys", family.key), ("values", family.value)):
                after(linear(layer, path), Part(of, number))
        if ends_layers:
            handles += [module.register_forward_hook(leave_if_enough) for module in {layer, ends}]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


LIVES = 0.1  # a layer lives if its `relative_changes` are at least this (ours)


def relative_changes(model: nn.Module, inputs: Mapping[str, Tensor], *, rescaled: bool = True) -> tuple[float, ...]:
    """How much each layer changes its input: the least `|c layer(x) - x| / |x|` over `c`, averaged over real tokens.

    `c` is chosen for each token, so this is the sine of the angle between a token's vectors before and after the layer. A layer
    with LayerNorm after its branches rescales every token even if the branches add nothing, and that is no change.

    Args:
        model: an encoder with any head, or none.
        inputs: `input_ids` and `attention_mask` (batch, tokens) of some texts, where the model is.
        rescaled: False takes `c = 1`, so that scale counts as well.
    """
    numbers = range(len(layers_of(model)) + 1)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        found = read(model, inputs, [Part("hidden", number) for number in numbers])
        hidden = [found["hidden", number][real].double() for number in numbers]  # (real tokens, width) each
        return tuple(float(_change(before, after, rescaled).mean()) for before, after in pairwise(hidden))


def _change(before: Tensor, after: Tensor, rescaled: bool) -> Tensor:
    """The relative change of each token (tokens,); the vectors are (tokens, width)."""
    scale: Tensor | float = 1.0
    if rescaled:
        scale = (before * after).sum(dim=-1, keepdim=True) / after.square().sum(dim=-1, keepdim=True)
    change: Tensor = (scale * after - before).norm(dim=-1) / before.norm(dim=-1)
    return change


def active_layers(changes: Sequence[float]) -> tuple[int, ...]:
    """The layers, from 1, that live by their `relative_changes`.

    >>> active_layers([0.5, 0.02, 0.4, 0.1])
    (1, 3, 4)
    """
    return tuple(number for number, change in enumerate(changes, 1) if change >= LIVES)


def nearest_living(layer: int, changes: Sequence[float]) -> int:
    """`layer` if it lives, otherwise the nearest that does, the lower of two; `layer` itself if none lives.

    >>> nearest_living(2, [0.5, 0.02, 0.4]), nearest_living(1, [0.02, 0.03, 0.4])
    (1, 3)
    """
    return min(active_layers(changes), key=lambda other: (abs(other - layer), other), default=layer)


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

    Raises BadInput: a training goes on with a number of processes that does not divide the number of parts.
    """
    parts, processes = distributed.shares(accumulate)[0].of, distributed.count()
    if parts % processes:
        raise BadInput(
            f"--teacher-shard: this training began with {parts // accumulate} processes, so its batches are cut into {parts} parts, which "
            f"{processes} processes cannot share evenly, and every process must ask the cut teacher as often as the others. Go on with "
            f"{parts // accumulate} processes, or another number that divides {parts}."
        )
