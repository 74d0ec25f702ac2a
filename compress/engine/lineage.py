"""A checkpoint as every stage leaves it: a folder that `AutoModel` opens, and beside the weights what they were made from."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compress.models.pretrained import Opened, quiet, save_tokenizer
from serve.bundle.manifest import canonical_json

LINEAGE = "lineage.json"


def save_with_lineage(model: Any, opened: Opened, folder: Path, details: dict[str, Any]) -> None:
    """Write `model` with the tokenizer of `opened`; `details` and the versions at work stand in its lineage."""
    model.config.architectures = [type(model).__name__]
    with quiet():
        model.to("cpu").save_pretrained(folder)
    save_tokenizer(opened, folder)
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    lineage = {"teacher": opened.public_name, "versions": versions} | details
    (folder / LINEAGE).write_bytes(canonical_json(lineage))


def read_lineage(folder: Path) -> dict[str, Any]:
    """What the checkpoint in `folder` was made from; empty when it does not say."""
    if not (folder / LINEAGE).is_file():
        return {}
    found: dict[str, Any] = json.loads((folder / LINEAGE).read_text(encoding="utf-8"))
    return found
