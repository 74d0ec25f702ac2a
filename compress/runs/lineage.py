"""Writes a checkpoint that `AutoModel` opens, with its lineage: what the weights were made from."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compress.data.examples import GENERATION, GENERATOR
from compress.models.configurations import in_one_line, quiet
from compress.models.pretrained import Opened, save_tokenizer
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput

LINEAGE = "lineage.json"


def save_with_lineage(
    model: Any, opened: Opened, folder: Path, details: dict[str, Any], tokens_of: Opened | None = None
) -> None:
    """Write `model`, which was made from `opened`, with the tokenizer of `tokens_of` or else of `opened`.

    The lineage holds `details` and the versions of the libraries.
    """
    model.config.architectures = [type(model).__name__]
    if details.get("task") != GENERATION and hasattr(model.config, GENERATOR):  # of the model that it was made from
        delattr(model.config, GENERATOR)
    with quiet():
        model.to("cpu").save_pretrained(folder)
    save_tokenizer(tokens_of or opened, folder)
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    lineage = {"teacher": opened.public_name, "teacher_revision": opened.revision, "base_model": base_model_of(opened)}
    lineage |= {"versions": versions} | details
    (folder / LINEAGE).write_bytes(canonical_json(lineage))


def base_model_of(opened: Opened) -> str | None:
    """The Hub model that `opened` is, or that its lineage names as its origin; None if unknown."""
    try:
        return opened.hub_name or read_lineage(opened.folder).get("base_model")
    except BadInput:  # a damaged lineage must not stop the caller: the name is optional
        return None


def read_lineage(folder: Path) -> dict[str, Any]:
    """The lineage of the checkpoint in `folder`; empty if it has none.

    Raises:
        BadInput: the lineage file is damaged.
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
