"""Reads the configuration of a model's folder, without the settings that change no answer and may stop the work."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serve.errors import BadInput
from serve.text.labels import MULTI_LABEL, REGRESSION
from serve.wording import one_of

CONFIG = "config.json"
# Tokens that a text has at most unless a longer one is asked for, as the papers' teachers were trained on.
LONGEST_TEXT = 512
LINEAGE = "lineage.json"  # what a checkpoint made here was made from; its `max_length` is that of training where it was longer
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

PROBLEMS = (
    REGRESSION,
    "single_label_classification",
    MULTI_LABEL,
)  # the values of `problem_type` that transformers knows
POINTER = b"version https://git-lfs"
MOST_LAYERS = 10_000  # more would take minutes to build before their weights are missed

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


def read_json(folder: Path, file: str, named: str, kind: type = dict) -> Any:
    """The JSON in `file` of `folder`, which is of `kind`. Messages name the model as `named`.

    Raises:
        BadInput: it is no such JSON, holds a number that is not finite, or gives a key two values, of which readers take either.
    """
    try:
        found = json.loads((folder / file).read_text(encoding="utf-8"), object_pairs_hook=_stated_once)
        if not isinstance(found, kind):
            raise TypeError(f"it holds a {type(found).__name__}, not a {kind.__name__}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"{named}: its {file} cannot be read ({damage_of(folder / file, error)}). {MEND}") from None
    return found


def damage_of(file: Path, error: Exception) -> str:
    """What is wrong with `file`, at which a reader raised `error`, in one line."""
    with suppress(OSError), file.open("rb") as content:
        if content.read(len(POINTER)) == POINTER:
            return "it is a pointer of Git LFS, not the file: run git lfs pull"
    return in_one_line(error)


def _stated_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if not all(
            math.isfinite(each) for each in (value if isinstance(value, list) else [value]) if isinstance(each, float)
        ):
            raise ValueError(f"{key} is {value}")
        if found.setdefault(key, value) != value:
            raise ValueError(f"{key} is there twice, as {found[key]!r} and {value!r}")
    return found


def check_stated(folder: Path, named: str) -> str:
    """The kind of model (`model_type`) that the folder's configuration states. Messages name the model as `named`.

    Raises BadInput: it is no JSON object, its `id2label` does not name each label by its index or `label2id` contradicts it, its
    `architectures` are no list of one class, its `problem_type` is unknown, or it is of quantised weights.
    """
    stated = read_json(folder, CONFIG, named)
    labels, classes = stated.get("id2label") or {}, stated.get("architectures") or []
    if not isinstance(labels, dict) or set(labels) != set(map(str, range(len(labels)))):
        has = f"has the ids {', '.join(labels)}" if isinstance(labels, dict) else f"is a {type(labels).__name__}"
        raise BadInput(
            f"{named}: id2label in its {CONFIG} {has}; it needs a label for each of 0 to {len(labels) - 1}, the outputs of the model in "
            'their order: {"0": "LABEL", ...}. Name every label.'
        )
    ids = stated.get("label2id") or {}
    for index, label in labels.items():
        if isinstance(ids, dict) and str(ids.get(label, index)) != index and list(labels.values()).count(label) == 1:
            raise BadInput(
                f"{named}: {label!r} is label {index} by id2label in its {CONFIG} and label {ids[label]} by label2id. Correct the one that "
                "the model was not trained with."
            )
    # With two classes, readers would choose by rules of their own which head the weights have.
    if (
        not isinstance(classes, list)
        or len(set(map(str, classes))) > 1
        or not all(isinstance(name, str) and name for name in classes)
    ):
        raise BadInput(
            f'{named}: architectures in its {CONFIG} is {classes!r}, not a list of one class. Write ["CLASS"], the class that saved the '
            "weights."
        )
    if (problem := stated.get("problem_type")) not in (None, *PROBLEMS):
        raise BadInput(f"{named}: problem_type in its {CONFIG} is {problem!r}; null, {one_of(PROBLEMS)} is needed.")
    if quantised := [key for key in ("quantization_config", "compression_config") if stated.get(key)]:
        raise BadInput(
            f"{named}: its weights are quantised ({quantised[0]} in {CONFIG}); float weights are needed. Give the model from before "
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


def usual_length(folder: Path) -> int:
    """Tokens of the longest text that the model in `folder` is given by default: `LONGEST_TEXT`, or those of its training here, if more."""
    try:
        trained = json.loads((folder / LINEAGE).read_text(encoding="utf-8"))["max_length"]
    except (OSError, ValueError, TypeError, KeyError):
        trained = 0
    return max(LONGEST_TEXT, trained if isinstance(trained, int) else 0)


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
