"""How a folder of sentence-transformers makes the vector of a text: its `modules.json`, read and written."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.bundle.manifest import canonical_json
from serve.errors import BadInput

if TYPE_CHECKING:
    from compress.losses.vectors import Pooling  # which imports torch

MODULES, SETTINGS = "modules.json", "sentence_bert_config.json"
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
    file = folder / SETTINGS
    length = _read(file, str(folder), dict).get("max_seq_length") if file.is_file() else None
    return min(length, limit) if isinstance(length, int) and not isinstance(length, bool) and length > 0 else limit


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
