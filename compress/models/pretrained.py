"""Opens a teacher or student, a folder on disk or a Hub name, and checks it before use."""

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from compress.data.hub import download_model, may_be_on_hub
from compress.data.task import Task
from compress.distributed import warn
from compress.models.configurations import (
    CONFIG,
    IMPLEMENTATIONS,
    LONGEST_TEXT,
    MEND,
    MOST_LAYERS,
    check_stated,
    foreign_implementation,
    in_one_line,
    loading_config,
    position_limit,
    quiet,
    usual_length,
)
from compress.models.families import Family, encoder_of, family_of
from compress.models.heads import CLASSES, HEADS, SPANS, head_of, is_multi_label, names_vocabulary_head
from compress.models.sentence_pooling import LEAST_TOKENS, forget_activation, refuse_inner_encoder, warn_of_activation
from compress.models.tokenizer_files import MEND_TOKENIZER, TOKENIZER_FILES, check_ids, fast_tokenizer
from compress.models.weight_checks import check_files, check_weights
from serve.errors import BadInput, BundleError
from serve.text.entity_markers import MARKERS
from serve.text.labels import MULTI_LABEL, REGRESSION
from serve.text.tokenizer import load_tokenizer
from serve.wording import one_of

# The most that can be asked for: attention takes memory by the square, for 12 heads 0.2 GB a text and matrix here, 3.2 GB with 8,192.
MOST_TOKENS = 2048


@dataclass(frozen=True)
class Opened:
    """A model folder that passed the checks: its given name, its path, configuration and family."""

    name: str
    folder: Path
    config: Any
    family: Family
    role: str = "--teacher"  # the flag that named it
    added: tuple[str, ...] = ()  # special tokens that its vocabulary lacks; loading adds them

    @property
    def public_name(self) -> str:
        """The name for published files: its Hub name, or only the last part of its path, since the path is private."""
        return public_name_of(self.name, self.folder)

    @property
    def hub_name(self) -> str | None:
        """Its name on the Hub; None for a folder."""
        return None if Path(self.name).exists() else self.name

    @property
    def revision(self) -> str | None:
        """The commit of the Hub's model; None for a folder."""
        in_cache = self.folder.parent.name == "snapshots" and not Path(self.name).exists()
        return self.folder.name if in_cache else None

    @property
    def max_length(self) -> int:
        """The longest text in tokens, unless a longer one is asked for."""
        return min(self.most_tokens, usual_length(self.folder))

    @property
    def most_tokens(self) -> int:
        """The most tokens that it can be asked to read: those of its position table, at most `MOST_TOKENS`."""
        return min(MOST_TOKENS, position_limit(self.config) or LONGEST_TEXT)

    @property
    def multi_label(self) -> bool:
        """Whether its head, if it has one, is for texts with any number of labels."""
        return is_multi_label(self.config)

    @property
    def has_head(self) -> bool:
        """Whether it has a head for a task."""
        return head_of(self.config) is not None

    def head_for(self, task: Task) -> tuple[str, ...] | None:
        """The labels of its head for `task`, by index; None if it has no such head."""
        return task.head.labels_in(self.config) if task.head else None


def open_model(
    name: str, *, role: str = "--teacher", wanted: str = "a transformers folder", revision: str = ""
) -> Opened:
    """The model in the folder `name`, or of that name on the Hub; errors say that `wanted` is needed.

    `revision` is a branch, tag or commit of the Hub's model; empty for its main branch. Raises BadInput: no such folder or Hub
    name, files missing or damaged, not an encoder of a known family, pickled weights only, or a revision of a folder.
    """
    name = os.path.expanduser(name)
    folder = _folder_of(name, role, wanted, revision)
    config = config_in(folder, f"{role} {name}", any_family=False)
    family = family_of(config.model_type, f"{role} {name}")
    if getattr(config, "is_decoder", False):
        raise BadInput(f"{role} {name} is a decoder (is_decoder is true in {CONFIG}); give an encoder.")
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise BadInput(
            f"{role} {name} has no tokenizer; {one_of(TOKENIZER_FILES)} is needed. "
            "Save its tokenizer into the folder: AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    check_weights(folder, config, f"{role} {name}")
    warn_of_head(config, f"{role} {name}")
    return Opened(name, folder, config, family, role)


def warn_of_head(config: Any, named: str) -> None:
    """Warn if the head of `config` is of a class that transformers does not have, whose code is in the folder, or has an activation."""
    import transformers

    warn_of_activation(config, named)
    own = [str(name) for name in config.architectures or [] if not hasattr(transformers, str(name))]
    if head_of(config) and (own or getattr(config, "auto_map", None)):
        what = (
            f"its class {own[0]} is not one of transformers"
            if own
            else f"its {CONFIG} names code of its own (auto_map), which is not run"
        )
        warn(
            f"{named}: {what}; it is read as the {config.model_type} model of transformers with such a head, which may answer otherwise."
        )


def _folder_of(name: str, role: str, wanted: str, revision: str) -> Path:
    """The folder `name`, or that of the Hub's model of that name; it has a configuration."""
    here = Path(name).exists()
    if here and revision:
        raise BadInput(
            f"--revision is {revision}, but {role} {name} is a local folder; only models of the Hub have revisions. Leave it out."
        )
    folder = Path(name) if here else download_or_refuse(name, role, wanted, revision)
    if not (folder / CONFIG).is_file():
        check_files(folder, f"{role} {name}")
        refuse_inner_encoder(folder, f"{role} {name}")
        raise BadInput(f"{role} {name} holds no {CONFIG}; {wanted} is needed (save_pretrained writes one).")
    return folder


def public_name_of(name: str, folder: Path) -> str:
    """The name for published files of the model `name` in `folder`: its Hub name, or only the last part of its private path."""
    return folder.resolve().name if Path(name).exists() else name


def check_checkpoint(folder: Path, named: str) -> None:
    """Check that the model in `folder`, of any family and with or without a tokenizer, can be loaded.

    Raises BadInput: its configuration, weights or tokenizer.json are damaged, or do not fit each other. The message names the
    model as `named`.
    """
    config = config_in(folder, named, any_family=True)
    check_weights(folder, config, named)
    if (folder / "tokenizer.json").is_file():
        try:
            tokenizer = load_tokenizer(folder, LONGEST_TEXT)
        except BundleError as error:
            raise BadInput(
                f"{named}: its tokenizer cannot be opened from tokenizer.json ({in_one_line(error)}). {MEND_TOKENIZER}"
            ) from None
        check_ids(tokenizer, config, named)


def check_length(asked: int, longest: int, name: str) -> None:
    """BadInput if `asked` tokens, unless 0, are not from `LEAST_TOKENS` to `longest`, the most that the model `name` can read."""
    if asked and not LEAST_TOKENS <= asked <= longest:
        whose = "the most that stillroom reads at once" if longest == MOST_TOKENS else f"which {name} can read"
        raise BadInput(
            f"--max-length is {asked}; give {LEAST_TOKENS} to {longest:,} tokens, {whose}. Longer texts are read whole when they are "
            "served, in windows."
        )


def check_labels(labels: Sequence[str], task: Task, named: str) -> None:
    """Check the `labels` of the head for `task` of a model whose answers are read or served, named as `named`.

    Raises BadInput: a label is there twice or has no name; or they are tags in no scheme, by the rules for those of data.
    """
    if faults := task.label_faults(labels):
        raise BadInput(f"{named}: {'; '.join(faults)}. Correct the names in id2label and label2id of its {CONFIG}.")


def head_fault(config: Any) -> str:
    """Why a model with `config`, which has no head for a task here, has none: the end of a sentence about it."""
    kinds = " or ".join(dict.fromkeys(head.suffix for head in HEADS))
    named = [str(name) for name in config.architectures or []]
    if not named:
        return f"names no architectures in its {CONFIG}; if it has a head, name its class there, which ends in {kinds}"
    if any(name.endswith(CLASSES.suffix) for name in named):
        return f"gives {config.num_labels} numbers for a text (problem_type is {REGRESSION}), and a model of one output is needed"
    if any(name.endswith(SPANS.suffix) for name in named):
        return f"is a {named[0]} of {config.num_labels} outputs, and one of 2 is needed, the start and the end of an answer"
    return f"has no head for a task: its architecture is {', '.join(named)}, and one that ends in {kinds} is needed"


def open_config_only(name: str, role: str, wanted: str, revision: str) -> tuple[Path, Any]:
    """The folder and the configuration of a model of any family, none of whose insides is read: a folder, or a name on the Hub.

    Raises:
        BadInput: no such folder or name, a revision of a folder, or no configuration that can be read; `wanted` says what is needed.
    """
    name = os.path.expanduser(name)
    folder = _folder_of(name, role, wanted, revision)
    return folder, config_in(folder, f"{role} {name}", any_family=True)


def config_in(folder: Path, named: str, *, any_family: bool) -> Any:
    """The configuration of the model in `folder`; messages name the model as `named`.

    Raises BadInput: it cannot be read, names code that transformers does not have itself, or without `any_family` is of a family
    that students cannot be made of.
    """
    for file in sorted(folder.iterdir()):
        if (
            file.suffix in (".json", ".safetensors", ".txt", ".model")
            and file.is_file()
            and not os.access(file, os.R_OK)
        ):
            raise BadInput(f"{named}: this user may not read its {file.name}. Allow it, or give another model.")
    kind = check_stated(folder, named)
    if not any_family:
        family_of(kind, named)
    try:
        config = loading_config(folder)
        names = [config.id2label[index] for index in range(config.num_labels)]
        if not all(isinstance(label, str) for label in names):
            raise ValueError("id2label holds something that is not a string")
        for key, value in config.to_dict().items():
            if key.endswith("_eps") and isinstance(value, int | float) and value < 0:
                raise ValueError(f"{key} is {value}")
        for key, most in (("num_hidden_layers", MOST_LAYERS), ("num_attention_heads", math.inf)):
            if isinstance(value := getattr(config, key, 1), int) and not 0 <= value <= most:
                raise ValueError(f"{key} is {value}")
    except Exception as error:
        # The configuration classes raise any kind of error.
        raise BadInput(f"{named}: its {CONFIG} cannot be read ({in_one_line(error)}). {MEND}") from None
    if foreign := foreign_implementation(config):
        raise BadInput(
            f"{named}: its {CONFIG} asks for the attention or experts of {foreign!r}, for which transformers may load code of the Hub. "
            f"Remove attn_implementation and experts_implementation from it, or give one of {', '.join(sorted(IMPLEMENTATIONS))}."
        )
    return config


def download_or_refuse(name: str, role: str, wanted: str, revision: str) -> Path:
    """The folder of the Hub's model `name`.

    Raises BadInput: the Hub has no such model, or cannot be asked; the message says that `wanted` is needed for the flag `role`.
    """
    if not may_be_on_hub(name):
        raise BadInput(f"{role} {name} does not exist. Give the path of {wanted}, or a name on the Hub.")
    try:
        return download_model(name, revision)
    except LookupError as reason:
        raise BadInput(
            f"{role} {name} is neither a local folder nor a model that can be read from the Hub ({reason}). "
            f"Give the path of {wanted}."
        ) from None


def save_tokenizer(opened: Opened, folder: Path, max_length: int = 0) -> Tokenizer:
    """Write the fast tokenizer of `opened`, for texts of `max_length` tokens if that is more, and return it as serving loads it.

    Raises BadInput: the tokenizer cannot be opened, has no fast form, or has ids that the embedding has no rows for.
    """
    tokenizer = _tokenizer_of(opened)
    # Settings of one use, such as padding to a fixed length, do not belong to the checkpoint.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model_max_length = max(max_length, opened.max_length)
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder, max(max_length, opened.max_length))


def with_markers(opened: Opened) -> Opened:
    """`opened` for relations: loading it adds the markers of head and tail that its vocabulary lacks.

    Raises BadInput: its tokenizer cannot be opened, has no fast form, or has ids that the embedding has no rows for.
    """
    known = _tokenizer_of(opened).get_vocab()
    return replace(opened, added=tuple(marker for marker in MARKERS if marker not in known))


def _tokenizer_of(opened: Opened) -> Any:
    from tokenizers import AddedToken

    tokenizer = fast_tokenizer(opened.folder, f"{opened.role} {opened.name}", opened.config)
    # A marker includes the blank before it, so that the text around it is tokenised as without the marker.
    tokens = [AddedToken(token, lstrip=True, normalized=False, special=True) for token in opened.added]
    tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer


def open_tokenizer(opened: Opened) -> Tokenizer:
    """The tokenizer of `opened` as a checkpoint made from it will hold it.

    Raises BadInput: it cannot be opened, has no fast form, or has ids that the embedding has no rows for.
    """
    with tempfile.TemporaryDirectory() as folder:
        return save_tokenizer(opened, Path(folder))


def load(opened: Opened, task: Task, labels: tuple[str, ...] | None = None) -> Any:
    """The model of `opened` with a head for `task`, in float32.

    With `labels` (by index) the head is new. Without, the head in the folder is used.
    """
    assert task.head
    model_class = task.head.model_class
    changes: dict[str, Any] = {}
    if labels is not None:
        changes = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
        if task.problem_type or opened.config.problem_type in (MULTI_LABEL, REGRESSION):
            changes["problem_type"] = task.problem_type
    with quiet():
        config = loading_config(opened.folder, **changes)
        if labels is not None:
            forget_activation(config)
        model = model_class.from_pretrained(
            opened.folder, config=config, local_files_only=True, use_safetensors=True, dtype=torch.float32,
            ignore_mismatched_sizes=labels is not None,
        )  # fmt: skip
        if labels is not None:
            # `from_pretrained` keeps a head of the same size, even of another task; here the head must be new.
            fresh = model_class.from_config(model.config)
            encoder_of(fresh).load_state_dict(encoder_of(model).state_dict())
            model = fresh.eval()
        return _with_rows(task.head.ready(model), opened)


def _with_rows(model: Any, opened: Opened) -> Any:
    """`model` with embeddings for the tokens that `opened` adds, drawn with the mean and spread of the other embeddings.

    The seed is fixed. The mean itself would give all markers the same embedding.
    """
    if not opened.added:
        return model
    rows = model.get_input_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(0)
    drawn = rows.mean(dim=0) + rows.std(dim=0) * torch.randn(len(opened.added), rows.shape[1], generator=generator)
    ids = _tokenizer_of(opened).convert_tokens_to_ids(list(opened.added))
    if max(ids) >= len(rows):
        model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    model.get_input_embeddings().weight.data[ids] = drawn
    return model


def load_encoder(source: Path | Opened, *, seed: int, vocabulary: bool = False) -> Any:
    """The model of `source` without a task's head, in float32; with `vocabulary` it has a masked-language-model head.

    Parts that the folder lacks, such as that head, are new and drawn with `seed`.
    """
    from transformers import AutoModel, AutoModelForMaskedLM

    kind = AutoModelForMaskedLM if vocabulary else AutoModel
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        folder = source.folder if isinstance(source, Opened) else source
        model = kind.from_pretrained(
            folder, config=loading_config(folder), local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
        return _with_rows(model, source) if isinstance(source, Opened) else model


def has_vocabulary_head(opened: Opened) -> bool:
    """Whether the model was saved with a masked-language-model head."""
    return names_vocabulary_head(opened.config)
