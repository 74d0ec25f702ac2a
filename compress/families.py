"""Where each family of encoders keeps its parts, by the public names of its modules.

All here are post-norm: queries, keys and values of layer `l` are projections of the output of layer `l - 1` as it stands.
"""

from dataclasses import dataclass

from torch import nn

from serve.errors import BadInput


@dataclass(frozen=True)
class Family:
    """Dotted paths: `layers` from the encoder, `embeddings` its parts, the rest from one layer."""

    layers: str
    query: str
    key: str
    value: str
    attention_output: str
    ffn_in: str
    ffn_out: str
    # The configuration's name for the feed-forward width, where `intermediate_size` is not it.
    ffn_size: str = "intermediate_size"
    # Rows at the head of the position table that no token uses.
    position_offset: int = 0


_BERT = Family(
    layers="encoder.layer",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_output="attention.output.dense",
    ffn_in="intermediate.dense",
    ffn_out="output.dense",
)
_ROBERTA = Family(**{**_BERT.__dict__, "position_offset": 2})
_DISTILBERT = Family(
    layers="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_output="attention.out_lin",
    ffn_in="ffn.lin1",
    ffn_out="ffn.lin2",
    ffn_size="hidden_dim",
)
FAMILIES = {"bert": _BERT, "electra": _BERT, "roberta": _ROBERTA, "xlm-roberta": _ROBERTA, "distilbert": _DISTILBERT}


def family_of(model_type: str, name: str) -> Family:
    """The family of a configuration's `model_type`; `name` is what the caller calls the model.

    Raises:
        BadInput: a family that is not known here; the message names those that are.
    """
    if model_type not in FAMILIES:
        raise BadInput(
            f"{name} is a {model_type!r} model, which is not an encoder that can be distilled here. "
            f"Give an encoder of one of these families: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


def encoder_of(model: nn.Module) -> nn.Module:
    """The encoder inside `model`, whatever head it carries."""
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
