"""How a folder of sentence-transformers makes the vector of a text: its `modules.json`, read and written."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.distributed import warn
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput

if TYPE_CHECKING:
    from compress.losses.vectors import Pooling  # which imports torch

MODULES, SETTINGS, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
# The names of SETTINGS in older versions, which sentence-transformers reads, too.
OLD_SETTINGS = tuple(
    f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
POOLING, NORMALIZE = "1_Pooling", "2_Normalize"
MEND = "Copy the folder again."
# As in sentence-transformers: the key of each pooling in its configuration.
KEYS: "dict[str, Pooling]" = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
MODES: "dict[str, Pooling]" = {"mean": "mean", "cls": "first"}  # of its later versions


@dataclass(frozen=True)
class SentencePooling:
    """How the last hidden states of a text become its vector, and whether that has length 1."""

    pooling: "Pooling" = "mean"
    normalised: bool = True


def pooling_in(folder: Path, named: str = "") -> SentencePooling | None:
    """What `modules.json` in `folder` says; None without such a file. Errors name the model as `named`, or by its folder.

    Raises:
        BadInput: a damaged file, another pooling than mean or first token, or a module that changes vectors, such as a dense layer.
    """
    if not (folder / MODULES).is_file():
        return None
    named = named or str(folder)
    modules = _read(folder / MODULES, named, list)
    if not all(isinstance(module, dict) for module in modules):
        raise BadInput(f"{named}: {MODULES} is not a list of modules. {MEND}")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if len(kinds) < 2 or kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Normalize"}:
        raise BadInput(
            f"{named} makes its vectors by {', '.join(kinds) or 'no module'} ({MODULES}); an encoder, its mean or first token, and a "
            "normalisation are known here. Save the encoder without other modules."
        )
    if inner := str(modules[0].get("path") or ""):
        raise BadInput(_is_inside(named, inner))
    _check_own_settings(folder, named)
    place = str(modules[1].get("path") or POOLING)
    if Path(place).is_absolute() or ".." in Path(place).parts:
        raise BadInput(f"{named}: {MODULES} names the folder {place}, which is outside the model's. {MEND}")
    config = _read(folder / place / "config.json", named, dict)
    mode = config.get("pooling_mode")
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    found = [MODES.get(mode)] if isinstance(mode, str) else [KEYS.get(key) for key in chosen] if mode is None else []
    if len(found) != 1 or found[0] is None:
        raise BadInput(
            f"{named} pools by {mode or ' and '.join(chosen) or 'nothing'} ({place}/config.json); the mean of the tokens or the first "
            "token alone is known here."
        )
    return SentencePooling(found[0], "Normalize" in kinds)


def max_tokens_in(folder: Path, limit: int) -> int:
    """The longest text in tokens that the folder's settings name, and at most `limit`, which it is if they name none."""
    length = _settings(folder).get("max_seq_length")
    return min(length, limit) if isinstance(length, int) and not isinstance(length, bool) and length > 0 else limit


def lowers_texts(folder: Path) -> bool:
    """Whether sentence-transformers lowers each text before it goes to the tokenizer of `folder`."""
    return bool(_settings(folder).get("do_lower_case"))


def refuse_inner_encoder(folder: Path, named: str) -> None:
    """BadInput if `modules.json` says that the encoder is in a folder below `folder`, as older versions wrote it."""
    modules = _read(folder / MODULES, named, list) if (folder / MODULES).is_file() else []
    if modules and isinstance(modules[0], dict) and (inner := str(modules[0].get("path") or "")):
        raise BadInput(_is_inside(named, inner))


def warn_of_activation(config: Any, named: str) -> None:
    """Warn if `config` is that of a CrossEncoder whose scores are not what its head gives, which is what is read here."""
    own = getattr(config, "sentence_transformers", None)
    stated = (
        own.get("activation_fn")
        if isinstance(own, dict)
        else getattr(config, "sbert_ce_default_activation_function", None)
    )
    if stated is None and not isinstance(own, dict):
        return
    usual = "Sigmoid" if config.num_labels == 1 else "Identity"  # as in sentence-transformers
    activation = str(stated or usual).rpartition(".")[2]
    if activation != "Identity":
        given = "the number before it" if config.num_labels == 1 else "the probabilities of its labels"
        warn(
            f"{named}: its config.json names the activation {activation} for a CrossEncoder, which is left out: a score here is {given}."
        )


def forget_activation(config: Any) -> None:
    """Take what a CrossEncoder's head was from `config`, since that head is replaced."""
    for name in ("sentence_transformers", "sbert_ce_default_activation_function"):
        if hasattr(config, name):
            delattr(config, name)


def _is_inside(named: str, inner: str) -> str:
    return (
        f"{named}: its encoder is in {inner} ({MODULES} says so), an older layout of sentence-transformers. Move the files of {inner} into "
        f'the folder itself, and write "path": "" for that module in {MODULES}.'
    )


def _check_own_settings(folder: Path, named: str) -> None:
    """BadInput if sentence-transformers puts a prompt before each text; a warning if callers may ask for one, or get shorter vectors."""
    said = _read(folder / PROMPTS, named, dict) if (folder / PROMPTS).is_file() else {}
    prompts = said.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise BadInput(f"{named}: prompts in {PROMPTS} is not an object. {MEND}")
    if prompt := prompts.get(str(said.get("default_prompt_name"))):
        raise BadInput(
            f"{named}: sentence-transformers puts the prompt {prompt!r} before each text (default_prompt_name in {PROMPTS}), which is not "
            "done here. Make default_prompt_name null there, and put the prompt before the texts yourself."
        )
    if named_prompts := [name for name, prompt in prompts.items() if prompt]:
        warn(
            f"{named}: {PROMPTS} has prompts ({', '.join(named_prompts)}), which are not put before texts here; send texts that begin with "
            "them."
        )
    if width := said.get("truncate_dim"):
        warn(
            f"{named}: truncate_dim is {width} in {PROMPTS}, which is not read: vectors have all their numbers, and callers ask for fewer."
        )


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of the encoder; empty without a file of them."""
    file = next((folder / name for name in (SETTINGS, *OLD_SETTINGS) if (folder / name).is_file()), None)
    found: dict[str, Any] = _read(file, str(folder), dict) if file else {}
    return found


def write_pooling(folder: Path, how: SentencePooling, width: int, max_tokens: int) -> None:
    """Write the files by which sentence-transformers opens the checkpoint in `folder` as an encoder of sentences."""
    package = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{package}.Transformer"},
        {"idx": 1, "name": "1", "path": POOLING, "type": f"{package}.Pooling"},
    ]
    if how.normalised:
        modules.append({"idx": 2, "name": "2", "path": NORMALIZE, "type": f"{package}.Normalize"})
    pooling = {"word_embedding_dimension": width} | {key: value == how.pooling for key, value in KEYS.items()}
    for file, content in (
        (folder / MODULES, modules),
        (folder / POOLING / "config.json", pooling),
        (folder / SETTINGS, {"max_seq_length": max_tokens, "do_lower_case": False}),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(canonical_json(content))


def _read(file: Path, named: str, kind: type) -> Any:
    """The JSON in `file`, which is of `kind`. BadInput where it is not."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{named}: {file.name} cannot be read ({error}). {MEND}") from None
    if not isinstance(found, kind):
        raise BadInput(f"{named}: {file.name} holds a {type(found).__name__}, not a {kind.__name__}. {MEND}")
    return found
