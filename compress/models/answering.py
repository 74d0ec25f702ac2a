"""A model that is asked for its answers alone, of any family that transformers has without code of its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from compress.data.task import Task
from compress.models.configurations import LONGEST_TEXT, loading_config, quiet, usual_length
from compress.models.families import FAMILIES
from compress.models.heads import is_multi_label
from compress.models.pretrained import (
    MOST_TOKENS,
    check_labels,
    check_length,
    head_fault,
    open_config_only,
    public_name_of,
    warn_of_head,
)
from compress.models.sentence_pooling import LEAST_TOKENS
from compress.models.tokenizer_files import fast_tokenizer
from compress.models.weight_checks import check_weights
from serve.errors import BadInput
from serve.text.entity_markers import MARKERS

NO_LIMIT = 1_000_000  # tokens: what transformers gives for a tokenizer that states no longest text


@dataclass(frozen=True)
class AnsweringTeacher:
    """A fine-tuned model whose folder passed the checks, not loaded yet."""

    name: str
    folder: Path
    config: Any
    task: Task
    labels: tuple[str, ...]
    """Classes or tags by index."""
    tokenizer: Any  # as transformers opens it
    revision: str = ""
    role: str = "--with"  # the flag that named it

    @property
    def multi_label(self) -> bool:
        """Whether any number of its labels may apply to a text."""
        return is_multi_label(self.config)

    @property
    def has_markers(self) -> bool:
        """Whether its vocabulary has the markers of head and tail, which a teacher of relations needs."""
        known = self.tokenizer.get_vocab()
        return all(marker in known for marker in MARKERS)

    @property
    def public_name(self) -> str:
        """The name for published files."""
        return public_name_of(self.name, self.folder)


@dataclass(frozen=True)
class AnsweringModel:
    """A fine-tuned model with its tokenizer, cut to `max_length` tokens. None of its insides is read."""

    name: str
    folder: Path
    task: Task
    labels: tuple[str, ...]
    """Classes or tags by index."""
    multi_label: bool
    max_length: int
    model: Any
    tokenizer: Tokenizer


def open_answering(
    name: str, task_of: Callable[[Any], Task | None], *, role: str = "--with", revision: str = "", max_length: int = 0
) -> AnsweringModel:
    """The model in the folder `name`, or of that name on the Hub: `find_answering`, then `load_answering`."""
    return load_answering(find_answering(name, task_of, role=role, revision=revision), max_length)


def find_answering(
    name: str, task_of: Callable[[Any], Task | None], *, role: str = "--with", revision: str = ""
) -> AnsweringTeacher:
    """The model in the folder `name`, or of that name on the Hub, checked and not loaded.

    Args:
        name: the folder or the name.
        task_of: gives the task that a model with a configuration has a head for.
        role: the flag that named it.
        revision: a branch, tag or commit of the Hub's model; empty for its main branch.

    Raises:
        BadInput: no such folder or name; files missing or damaged, pickled weights only, no head for a task, or a tokenizer without
            character offsets.
    """
    named = f"{role} {name}"
    folder, config = open_config_only(name, role, "a transformers folder of a model fine-tuned on a task", revision)
    task = task_of(config)
    if task and task.has_contexts:
        raise BadInput(
            f"{named} answers questions about a context, which no file of texts has. Give a model of classes, numbers or entities."
        )
    if task is None:
        how = f": stillroom finetune --model {name} ..." if config.model_type in FAMILIES else " with transformers."
        raise BadInput(f"{named} {head_fault(config)}. Fine-tune it first{how}")
    assert task.head
    labels = task.head.labels_in(config) or ()
    check_labels(labels, task, named)
    check_weights(folder, config, named)
    warn_of_head(config, named)
    tokenizer = fast_tokenizer(folder, named, config)
    return AnsweringTeacher(name, folder, config, task, labels, tokenizer, revision, role)


def load_answering(found: AnsweringTeacher, max_length: int = 0) -> AnsweringModel:
    """The model of `found` in float32 on the CPU, reading texts up to `max_length` tokens, or by default `usual_length`.

    Raises BadInput: it cannot read texts of that length.
    """
    model = _loaded(found.folder, found.task)
    backend, length = cut_tokenizer(found.name, found.folder, model, found.tokenizer, max_length)
    return AnsweringModel(found.name, found.folder, found.task, found.labels, found.multi_label, length, model, backend)


def on_device(model: AnsweringModel, device: torch.device) -> AnsweringModel:
    """`model` with its weights on `device`."""
    return replace(model, model=model.model.to(device))


def _loaded(folder: Path, task: Task) -> Any:
    assert task.head
    with quiet():
        return task.head.model_class.from_pretrained(
            folder, config=loading_config(folder), local_files_only=True, use_safetensors=True, dtype=torch.float32
        ).eval()


def cut_tokenizer(name: str, folder: Path, model: Any, tokenizer: Any, max_length: int) -> tuple[Tokenizer, int]:
    """The tokenizer of `model`, which cuts texts at `max_length` tokens, by default `usual_length` or what it can read; and that length.

    Raises BadInput: the model cannot read texts of that length.
    """
    longest = _longest(model, int(tokenizer.model_max_length))
    if longest < LEAST_TOKENS:
        raise BadInput(
            f"{name} reads {longest} tokens of a text, by model_max_length in its tokenizer_config.json or its table of positions; "
            f"{LEAST_TOKENS} or more are needed. Correct model_max_length."
        )
    check_length(max_length, longest, name)
    length = max_length or min(longest, usual_length(folder))
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.enable_truncation(max_length=length)
    return backend, length


def _longest(model: Any, stated: int) -> int:
    """The most tokens that can be asked for: what the tokenizer states and the table of positions has, at most `MOST_TOKENS`."""
    table = getattr(model.config, "max_position_embeddings", None)
    limits = [stated] if 0 < stated < NO_LIMIT else []
    if isinstance(table, int) and table > 0:
        # Where the table has a row for padding, as in RoBERTa, positions begin behind it.
        paddings = [
            module.padding_idx
            for name, module in model.named_modules()
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        ]
        limits.append(table - (paddings[0] + 1 if paddings else 0))
    return min(MOST_TOKENS, *(limits or [LONGEST_TEXT]))
