"""Tiny encoders of every family, with random weights."""

from typing import Any

import torch
import transformers

SIZES = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
VOCABULARY = 60


def config_of(kind: str, **changes: Any) -> Any:
    """A tiny configuration of the family `kind`."""
    common = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 40} | changes
    if kind == "distilbert":
        names = {
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
        }
        return transformers.DistilBertConfig(**{names.get(name, name): value for name, value in common.items()})
    if kind == "modernbert":
        extra = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
        return transformers.ModernBertConfig(**extra, global_attn_every_n_layers=2, local_attention=64, **common)
    classes = {
        "bert": "BertConfig",
        "roberta": "RobertaConfig",
        "xlm-roberta": "XLMRobertaConfig",
        "electra": "ElectraConfig",
        "mpnet": "MPNetConfig",
    }
    if kind == "electra":
        common = {"embedding_size": 12} | common  # as the public ones: embeddings narrower than the layers
    return getattr(transformers, classes[kind])(**common)


def encoder(kind: str, head: str = "", seed: int = 0, *, attention: str = "sdpa", **changes: Any) -> Any:
    """A model of family `kind` in evaluation mode; `head` is what its class is for: `ForMaskedLM`, or nothing."""
    torch.manual_seed(seed)
    auto = getattr(transformers, f"AutoModel{head}")
    if kind == "mpnet" or (kind == "electra" and transformers.__version__.startswith("4.")):
        attention = "eager"  # transformers has no other for it
    model = auto.from_config(config_of(kind, **changes), attn_implementation=attention)
    return model.eval()


def inputs(texts: int = 3, longest: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids, the later texts shorter and padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (texts, longest), generator=generator)
    lengths = torch.tensor([max(1, longest - 3 * i) for i in range(texts)])
    mask = (torch.arange(longest)[None] < lengths[:, None]).long()
    return {"input_ids": torch.where(mask.bool(), ids, torch.ones_like(ids)), "attention_mask": mask}
