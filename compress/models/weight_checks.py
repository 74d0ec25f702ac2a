"""Checks the weights of a model's folder: that they are whole, finite, and those that its configuration needs.

Weights and files that transformers does not use are found too: without them its answers are not the trained model's.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from compress.distributed import warn
from compress.models.configurations import CONFIG, MEND, damage_of, in_one_line, quiet, read_json
from compress.models.families import FAMILIES, encoder_of
from compress.models.heads import head_of, names_vocabulary_head
from serve.errors import BadInput
from serve.wording import counted

WEIGHTS = "model.safetensors"
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
OTHER_HEADS = frozenset((
    "cls", "lm_head", "predictions", "generator_predictions", "generator_lm_head", "discriminator_predictions", "head", "decoder",
    "vocab_transform", "vocab_layer_norm", "vocab_projector", "mlm", "nsp", "sop_classifier", "qa_outputs", "classifier", "loss",
    "loss_fct", "loss_fn", "criterion", "logits_proj", "sequence_summary", "lm_predictions", "mask_predictions",
))  # fmt: skip


def check_weights(folder: Path, config: Any, named: str) -> None:
    """Check that the folder's weights are whole, finite, and those that its configuration needs.

    Raises BadInput: they are not, or are pickled. The message names the model as `named`.
    """
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoModelForMaskedLM

    check_files(folder, named)
    weights: dict[str, str] = {}
    for file in _weight_files(folder, named):
        try:
            there = file.stat()
            weights |= _weight_faults(file.resolve(), there.st_size, there.st_mtime_ns)
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{named}: its {file.name} is damaged ({damage_of(file, error)}). {MEND}") from None
    # The class of the model as it was saved: with its head, if it has one for a task or for masked words.
    head = head_of(config)
    without = AutoModelForMaskedLM if names_vocabulary_head(config) else AutoModel
    try:
        with quiet():
            model, found = (head.model_class if head else without).from_pretrained(
                folder, config=config, local_files_only=True, use_safetensors=True, device_map="meta", dtype=torch.float32,
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception as error:
        raise BadInput(f"{named}: no model can be built from its {CONFIG} ({in_one_line(error)}). {MEND}") from None
    parameters = [name for name, _ in model.named_parameters()]
    missing = sorted(key for key in found["missing_keys"] if head or not key.startswith("pooler."))
    if not head and names_vocabulary_head(config):
        encoder = f"{model.base_model_prefix}."
        of_words = {name for name in parameters if not name.startswith(encoder)}
        if of_words.isdisjoint(weights):  # an encoder alone: a head is drawn where one is needed
            missing = [key for key in missing if key.startswith(encoder)]
    if missing:
        raise BadInput(f"{named}: its weights lack {_first_of(missing)}, which its {CONFIG} requires. {MEND}")
    other = sorted(
        f"{each} of another shape"  # transformers 4 names the keys alone
        if isinstance(each, str)
        else f"{each[0]} of shape {list(each[1])} instead of {list(each[2])}"
        for each in found["mismatched_keys"]
    )
    if other:
        raise BadInput(f"{named}: its weights do not fit its {CONFIG}: they hold {_first_of(other)}. {MEND}")
    check_used(model, list(found["unexpected_keys"]), named, has_head=head is not None)
    # Tables and masks beside the parameters may be of whole numbers.
    strange = [
        (key, fault)
        for key, fault in weights.items()
        if "values" in fault or (fault and any(name.endswith(key) or key.endswith(name) for name in parameters))
    ]
    if strange:
        key, fault = strange[0]
        more = f"; {len(strange) - 1} more of its weights have such values" if len(strange) > 1 else ""
        raise BadInput(
            f"{named}: its weight {key} {fault}{more}. Give a checkpoint of finite float weights, from before its training failed or it "
            "was quantised, or copy the folder again."
        )


@lru_cache(maxsize=32)
def _weight_faults(file: Path, _size_bytes: int, _mtime_ns: int) -> dict[str, str]:
    """For each weight in `file` why it cannot be used: it holds NaN or infinity in float32, or is no float numbers; empty if it can.

    The result is cached until the file changes, because one call opens a model several times. BERT-base takes about 0.3 s.
    """
    from safetensors import safe_open

    found = {}
    with safe_open(file, "pt") as weights:
        for key in sorted(weights.keys()):
            found[key] = ""
            tensor = weights.get_tensor(key)
            if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                found[key] = f"is of type {str(tensor.dtype).removeprefix('torch.')}"
                continue
            tensor = tensor.float() if tensor.dtype == torch.float64 else tensor
            # The sum is not finite if a value is not, and takes a fifth of the time of checking each. A sum of finite values may
            # overflow, so values are then counted.
            if not tensor.sum().isfinite() and (count := int((~tensor.isfinite()).sum())):
                values = counted(count, "value that is", "values that are")
                found[key] = f"has {values} not finite (NaN or infinite)"
    return found


def _weight_files(folder: Path, named: str) -> list[Path]:
    """The files that hold the weights. BadInput if one is missing, or the index is damaged."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / f"{WEIGHTS}.index.json"
    if not index.is_file():
        raise BadInput(
            f"{named} has no .safetensors weights. Pickled weights are not opened; save the model with save_pretrained."
        )
    stated = read_json(folder, index.name, named)
    files = stated.get("weight_map")
    names = sorted(set(map(str, files.values()))) if isinstance(files, dict) else []
    if strange := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise BadInput(
            f"{named}: its {index.name} names {_first_of(strange)}; it needs .safetensors files in the folder itself. {MEND}"
        )
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise BadInput(f"{named} lacks {_first_of(missing)}, which its {index.name} names. {MEND}")
    if not names or not isinstance(stated.get("metadata"), dict):
        raise BadInput(f"{named}: its {index.name} has no weight_map of files, or no metadata. {MEND}")
    return [folder / name for name in names]


def _first_of(things: Sequence[str]) -> str:
    """The first of `things`, and how many more there are."""
    return things[0] if len(things) == 1 else f"{things[0]} and {len(things) - 1} more"


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

    Raises BadInput: weights that change the answers are not used. For a family whose insides are not read here it is a warning.
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
