"""The module paths of the parts of each family of encoders, and how its models read the pieces of a packed row apart from each other."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from compress.losses.tiled_relations import RelationFactors
from compress.models.configurations import first_position
from serve.errors import BadInput

# Gives the factors of a family's attention scores from the encoder, the layer, and queries and keys by head, both
# (batch, heads, tokens, width of a head).
Attends = Callable[[Any, Any, Tensor, Tensor], RelationFactors]


def plain(_encoder: Any, _layer: Any, queries: Tensor, keys: Tensor) -> RelationFactors:
    """For encoders with positions in their embeddings."""
    return RelationFactors(queries, keys)


def biased(encoder: Any, _layer: Any, queries: Tensor, keys: Tensor) -> RelationFactors:
    """For MPNet, which adds a learned bias by distance."""
    return RelationFactors(queries, keys, encoder.encoder.compute_position_bias(queries[:, 0])[0])


def rotary(encoder: Any, layer: Any, queries: Tensor, keys: Tensor) -> RelationFactors:
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

    return RelationFactors(turned(queries), turned(keys))


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
    # Whether its models can keep the pieces of a packed row apart, see `compress.models.families`.
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
# Multilingual BERT has 105,879 or more tokens, XLM-RoBERTa 250,002, models of one language 30,000 to 65,000.
MULTILINGUAL_WORDS = 100_000


def family_of(model_type: str, name: str) -> Family:
    """The family of a configuration's `model_type`; messages name the model as `name`.

    Raises BadInput: an unknown family; the message lists the known ones.
    """
    if model_type not in FAMILIES:
        role, _, given = name.partition(" ")
        asked = f" With a head for the task it can teach by its answers: stillroom run --teacher {given} --start ENCODER ..."
        raise BadInput(
            f"{name} is a {model_type!r} model, which is not supported. "
            f"Give an encoder of one of these families: {', '.join(sorted(FAMILIES))}.{asked if role == '--teacher' else ''}"
        )
    return FAMILIES[model_type]


def is_multilingual(config: Any) -> bool:
    """Whether a model of this configuration was made for many languages: by its family, or by a vocabulary as large as theirs."""
    many = getattr(config, "vocab_size", 0) >= MULTILINGUAL_WORDS
    return many or getattr(config, "model_type", "") == "xlm-roberta"


def encoder_of(model: nn.Module) -> nn.Module:
    """The encoder of `model`, without any head."""
    prefix = str(model.base_model_prefix)
    return model.get_submodule(prefix) if hasattr(model, prefix) else model


def family_in(model: Any) -> Family:
    """The family of a `model` that was opened: by its configuration."""
    return FAMILIES[model.config.model_type]


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The encoder layers of `model`, first to last."""
    layers = encoder_of(model).get_submodule(family_in(model).layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def linear(layer: nn.Module, path: str) -> nn.Linear:
    """The dense projection at `path` of one layer."""
    module = layer.get_submodule(path)
    assert isinstance(module, nn.Linear), f"{path} is {type(module).__name__}"
    return module


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
