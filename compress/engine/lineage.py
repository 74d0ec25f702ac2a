"""A checkpoint as every stage leaves it: a folder that `AutoModel` opens, and beside the weights what they were made from."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compress.models.pretrained import Opened, in_one_line, quiet, save_tokenizer
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput

LINEAGE = "lineage.json"


def save_with_lineage(model: Any, opened: Opened, folder: Path, details: dict[str, Any]) -> None:
    """Write `model` with the tokenizer of `opened`; `details` and the versions at work stand in its lineage."""
    model.config.architectures = [type(model).__name__]
    with quiet():
        model.to("cpu").save_pretrained(folder)
    save_tokenizer(opened, folder)
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    lineage = {"teacher": opened.public_name, "teacher_revision": opened.revision, "base_model": base_model_of(opened)}
    lineage |= {"versions": versions} | details
    (folder / LINEAGE).write_bytes(canonical_json(lineage))


def base_model_of(opened: Opened) -> str | None:
    """The model of the Hub that `opened` is or was made from, as far as its lineage says; None where it does not."""
    try:
        return opened.hub_name or read_lineage(opened.folder).get("base_model")
    except BadInput:  # a damaged file costs the name and not what was trained
        return None


def read_lineage(folder: Path) -> dict[str, Any]:
    """What the checkpoint in `folder` was made from; empty when it does not say.

    Raises:
        BadInput: the file that says it is damaged.
    """
    file = folder / LINEAGE
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not an object")
    except ValueError as error:
        raise BadInput(f"{file} cannot be read ({in_one_line(error)}). Remove it, or copy the folder again.") from None
    return found
