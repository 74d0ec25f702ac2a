"""Finds weights and files of a model's folder that transformers does not use, so that its answers are not the trained model's."""

import re
from pathlib import Path
from typing import Any

from compress.distributed import warn
from compress.models.families import FAMILIES, encoder_of
from serve.errors import BadInput

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "pytorch_adapter.bin")

# Files of weights that a folder may hold beside those that are read: of other frameworks, and of a training.
OTHER_FILES = re.compile(
    r"((pytorch_|tf_|flax_)?model)([.-].*)?\.(safetensors|bin|pt|h5|msgpack)|training_args\.bin|"
    r"(optimizer|scheduler|scaler|rng_state|random_states|checkpoint|best|maps).*"
)
OF_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".pkl", ".joblib", ".ckpt"})

# Keys of weights that no answer needs, each with its reason.
HARMLESS = {
    r"(^|\.)(position_ids|token_type_ids)$": "buffers that older versions saved: they count from 0",
    r"(^|\.)(inv_freq|cos_cached|sin_cached)$": "tables that are computed from the configuration",
    r"(^|\.)num_batches_tracked$": "a counter of training",
    r"(^|\.)pooler\.": "the pooler of a model whose head does not read it",
}
# First parts of the keys of heads that a model was pre-trained or used with before: they do not feed the head in use.
OTHER_HEADS = frozenset(
    {
        "cls",
        "lm_head",
        "predictions",
        "generator_predictions",
        "generator_lm_head",
        "discriminator_predictions",
        "head",
        "decoder",
    }
    | {
        "vocab_transform",
        "vocab_layer_norm",
        "vocab_projector",
        "mlm",
        "nsp",
        "sop_classifier",
        "qa_outputs",
        "classifier",
    }
    | {
        "loss",
        "loss_fct",
        "loss_fn",
        "criterion",
        "logits_proj",
        "sequence_summary",
        "lm_predictions",
        "mask_predictions",
    }
)


def check_files(folder: Path, named: str) -> None:
    """BadInput if `folder` holds an adapter (LoRA and its kind), which changes what a base model answers; a warning about other weights."""
    if there := [name for name in ADAPTER_FILES if (folder / name).is_file()]:
        raise BadInput(
            f"{named} holds an adapter ({', '.join(there)}), which is not applied here. Merge it into its base model: "
            "peft's AutoPeftModelFor....from_pretrained(folder).merge_and_unload().save_pretrained(other), the tokenizer too, and give "
            "that folder; or take the adapter's files away to use the base model alone."
        )
    names = sorted(file.name for file in folder.iterdir() if file.suffix in OF_WEIGHTS)
    if others := [name for name in names if not OTHER_FILES.fullmatch(name)]:
        warn(
            f"{named}: beside its model the folder holds {', '.join(others)}, which is not read: a head or a layer in it is left out."
        )


def check_used(model: Any, unexpected: list[str], named: str, *, has_head: bool) -> None:
    """Check the keys of weights that `model` does not use, which is loaded with its head for a task, if it has one.

    Raises:
        BadInput: weights that change the answers are not used. For a family whose insides are not read here it is a warning.
    """
    if unused := sorted(key for key in unexpected if _matters(model, key, has_head=has_head)):
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        said = f"{named}: its weights hold {unused[0]}{more}, which {type(model).__name__} of transformers does not use"
        if model.config.model_type not in FAMILIES:
            warn(f"{said}; its answers may differ from the trained model's.")
            return
        raise BadInput(f"{said}, so it would not answer as it was trained to.{_advice(model, unused[0])}")
    kind = getattr(model.config, "position_embedding_type", None) or "absolute"
    if kind != "absolute" and not any("distance_embedding" in name for name, _ in model.named_parameters()):
        raise BadInput(f"{named}: it would not answer as it was trained to.{_advice(model, 'distance_embedding')}")


def _matters(model: Any, key: str, *, has_head: bool) -> bool:
    if any(re.search(pattern, key) for pattern in HARMLESS):
        return False
    prefix = f"{model.base_model_prefix}."
    first = key.removeprefix(prefix).split(".")[0]
    if key.startswith(prefix) or first in {name for name, _ in encoder_of(model).named_children()}:
        return True
    # A second map in the head that is used, such as a layer before it or a CRF behind it.
    own = {name for name, _ in model.named_children()}
    return has_head and (first in own or first not in OTHER_HEADS)


def _advice(model: Any, key: str) -> str:
    if "distance_embedding" in key:
        return (
            f" position_embedding_type is {getattr(model.config, 'position_embedding_type', 'absolute')} in its config.json, which this "
            "version of transformers does not have. Give a model of absolute positions."
        )
    if "lora_" in key or "adapter" in key:
        return " Merge the adapter into the model (merge_and_unload in peft) and save that."
    return " Give a model whose weights all belong to the class that its config.json names, or take these weights away."
