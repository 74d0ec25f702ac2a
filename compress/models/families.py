"""The module paths of the parts of each family of encoders."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.losses.tiled_relations import Dots
from serve.errors import BadInput

# Gives the factors of a family's attention scores from the encoder, the layer, and queries and keys by head, both
# (batch, heads, tokens, width of a head).
Attends = Callable[[Any, Any, Tensor, Tensor], Dots]


def plain(_encoder: Any, _layer: Any, queries: Tensor, keys: Tensor) -> Dots:
    """For encoders with positions in their embeddings."""
    return Dots(queries, keys)


def biased(encoder: Any, _layer: Any, queries: Tensor, keys: Tensor) -> Dots:
    """For MPNet, which adds a learned bias by distance."""
    return Dots(queries, keys, encoder.encoder.compute_position_bias(queries[:, 0])[0])


def rotary(encoder: Any, layer: Any, queries: Tensor, keys: Tensor) -> Dots:
    """For ModernBERT, which rotates queries and keys by their positions.

    Its windows are masks, like padding, and not part of the scores, so layers with and without a window can be compared.
    """
    positions = torch.arange(queries.shape[2], device=queries.device)[None]
    if hasattr(encoder, "rotary_emb"):  # transformers 5: one for all layers
        cos, sin = encoder.rotary_emb(queries, positions, layer.attention_type)
    else:
        cos, sin = layer.attn.rotary_emb(queries, position_ids=positions)

    def turned(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        rotated: Tensor = x.float() * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
        return rotated

    return Dots(turned(queries), turned(keys))


@dataclass(frozen=True)
class Family:
    """Dotted paths: `layers` and `final_norm` from the encoder, the rest from one layer.

    Queries, keys and values of layer `l` are projections of the output of layer `l - 1`; only ModernBERT has a norm between.
    """

    layers: str
    attention_output: str
    ffn_in: str
    ffn_out: str
    # Three projections, or one (`fused`) whose output is queries, keys and values side by side.
    query: str = ""
    key: str = ""
    value: str = ""
    fused: str = ""
    # The configuration's name for the feed-forward width.
    ffn_size: str = "intermediate_size"
    # The configuration's name for the activation of that layer.
    activation: str = "hidden_act"
    # Rows of the first feed-forward matrix per unit: 2 if one gates the other.
    ffn_rows: int = 1
    # A norm between the last layer and the head.
    final_norm: str = ""
    attends: Attends = plain
    # Whether its models can keep the pieces of a packed row apart, see `compress.models.packed_inputs`.
    packs: bool = True


_BERT = Family(
    layers="encoder.layer",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_output="attention.output.dense",
    ffn_in="intermediate.dense",
    ffn_out="output.dense",
)
_MPNET = replace(
    _BERT,
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    attention_output="attention.attn.o",
    attends=biased,
)
_DISTILBERT = Family(
    layers="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_output="attention.out_lin",
    ffn_in="ffn.lin1",
    ffn_out="ffn.lin2",
    ffn_size="hidden_dim",
    activation="activation",
)
_MODERNBERT = Family(
    layers="layers",
    fused="attn.Wqkv",
    attention_output="attn.Wo",
    activation="hidden_activation",
    ffn_in="mlp.Wi",
    ffn_out="mlp.Wo",
    ffn_rows=2,
    final_norm="final_norm",
    attends=rotary,
    packs=False,
)
FAMILIES = {
    "bert": _BERT,
    "electra": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "distilbert": _DISTILBERT,
    "mpnet": _MPNET,
    "modernbert": _MODERNBERT,
}


def family_of(model_type: str, name: str) -> Family:
    """The family of a configuration's `model_type`; messages name the model as `name`.

    Raises:
        BadInput: an unknown family; the message lists the known ones.
    """
    if model_type not in FAMILIES:
        role, _, given = name.partition(" ")
        asked = f" With a head for the task it can teach by its answers: stillroom run --teacher {given} --start ENCODER ..."
        raise BadInput(
            f"{name} is a {model_type!r} model, which is not supported. "
            f"Give an encoder of one of these families: {', '.join(sorted(FAMILIES))}.{asked if role == '--teacher' else ''}"
        )
    return FAMILIES[model_type]


def encoder_of(model: nn.Module) -> nn.Module:
    """The encoder of `model`, without any head."""
    prefix = str(model.base_model_prefix)
    return model.get_submodule(prefix) if hasattr(model, prefix) else model


def layers_of(model: nn.Module, family: Family) -> nn.ModuleList:
    """The encoder layers of `model`, first to last."""
    layers = encoder_of(model).get_submodule(family.layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def linear(layer: nn.Module, path: str) -> nn.Linear:
    """The dense projection at `path` of one layer."""
    module = layer.get_submodule(path)
    assert isinstance(module, nn.Linear), f"{path} is {type(module).__name__}"
    return module
