"""Reads the configuration of a model's folder, without the settings that change no answer and may stop the work."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve.errors import BadInput

CONFIG = "config.json"
MEND = "Copy the folder again, or save the model again with save_pretrained."
# Implementations of attention and experts that are part of torch and transformers. Other names are repositories of the Hub, or stand
# for some. Flash attention is a wish of the machine that trained the model, and needs a package of its own.
IMPLEMENTATIONS = frozenset({"eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"})
IMPLEMENTATION_KEY = re.compile("_?(attn|experts)_implementation(_internal)?")
FLASH_ATTENTION = re.compile(r"(paged\|)?flash_attention_\d")

# How a model computes, or what it returns beside its answer: each with the value that every use here needs.
# Feed-forward layers in chunks need lengths that are multiples of the chunk, and save memory alone.
NEEDED = {
    "chunk_size_feed_forward": 0,
    "return_dict": True,
    "torchscript": False,
    "output_hidden_states": False,
    "output_attentions": False,
}

# Families whose first position is the padding token's id plus one. MPNet's code has that id as a constant, 1.
POSITIONS_FROM_PADDING = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer"})


def loading_config(folder: Path, **changes: Any) -> Any:
    """The configuration by which the model in `folder` is loaded, with `changes`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, **changes)
    if FLASH_ATTENTION.fullmatch(str(config._attn_implementation)):
        config._attn_implementation = None  # as if it named none: transformers takes the usual one
    for name, value in NEEDED.items():
        if getattr(config, name, value) != value:
            setattr(config, name, value)
    return config


def foreign_implementation(config: Any) -> str | None:
    """An implementation that `config` or one within it asks for and that transformers does not have itself; None if there is none."""
    return min(set(_implementations(config)) - IMPLEMENTATIONS, default=None)


def _implementations(config: Any) -> Iterator[str]:
    """The names of implementations that a configuration, or one within it, asks for: each may be a kernel of the Hub."""
    left, seen = [config], set()
    while left:
        each = left.pop()
        if isinstance(each, list | tuple):
            left += each
            continue
        if id(each) in seen or not (isinstance(each, dict) or hasattr(each, "to_dict")):
            continue
        seen.add(id(each))
        for key, value in (each if isinstance(each, dict) else vars(each)).items():
            if not IMPLEMENTATION_KEY.fullmatch(str(key)):
                left.append(value)
            elif isinstance(value, dict):  # one for each configuration within this one
                yield from (str(inner) for inner in value.values() if inner is not None)
            elif value is not None:
                yield str(value)


def check_stated(folder: Path, named: str) -> str:
    """The kind of model (`model_type`) that the folder's configuration states. Messages name the model as `named`.

    Raises:
        BadInput: it is no JSON object, its `id2label` does not name each label by its index, its `architectures` are no list, or it is of
            quantised weights.
    """
    try:
        stated = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(stated, dict):
            raise TypeError(f"it holds a {type(stated).__name__}, not an object")
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{named}: its {CONFIG} cannot be read ({in_one_line(error)}). {MEND}") from None
    labels, classes = stated.get("id2label") or {}, stated.get("architectures") or []
    if not isinstance(labels, dict) or set(labels) != set(map(str, range(len(labels)))):
        has = f"has the ids {', '.join(labels)}" if isinstance(labels, dict) else f"is a {type(labels).__name__}"
        raise BadInput(
            f"{named}: id2label in its {CONFIG} {has}; it needs a label for each of 0 to {len(labels) - 1}, the outputs of the model in "
            'their order: {"0": "LABEL", ...}. Name every label.'
        )
    if not isinstance(classes, list):
        raise BadInput(f'{named}: architectures in its {CONFIG} is {classes!r}, not a list. Write ["CLASS"].')
    if stated.get("quantization_config"):
        raise BadInput(
            f"{named}: its weights are quantised (quantization_config in {CONFIG}); float weights are needed. Give the model from before "
            "it was quantised."
        )
    kind = str(stated.get("model_type", "unknown"))
    if kind in POSITIONS_FROM_PADDING and stated.get("pad_token_id", 1) is None:
        raise BadInput(
            f"{named}: pad_token_id is null in its {CONFIG}, and a {kind} model counts positions from that id. Give the id of its padding."
        )
    return kind


def first_position(config: Any) -> int:
    """The row of the position table that a text's first token gets; the rows before it are unused."""
    if config.model_type not in POSITIONS_FROM_PADDING:
        return 0
    return 2 if config.model_type == "mpnet" else int(config.pad_token_id) + 1


def position_limit(config: Any) -> int | None:
    """The most tokens that the model has positions for, special tokens included; None when nothing limits them."""
    table = getattr(config, "max_position_embeddings", None)
    return None if table is None else int(table) - first_position(config)


def in_one_line(error: Exception) -> str:
    """The class and message of `error`, in one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which transformers shows no progress bars and no warnings about new head weights, which are expected."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
