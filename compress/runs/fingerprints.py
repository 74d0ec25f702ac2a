"""Fingerprints (SHA-256) of everything that decides the result of a stage: settings, texts, models and versions."""

import hashlib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from compress.data.examples import Example, examples_fingerprint
from compress.runs.hardware import device_here
from serve.bundle.manifest import canonical_json, sha256_file

# Increase it when stages of an older version can no longer be reused.
STAGE_FORMAT = 3


def fingerprint(*parts: object) -> str:
    """The SHA-256 of `parts`, which are anything that JSON can hold."""
    return hashlib.sha256(canonical_json([STAGE_FORMAT, *parts])).hexdigest()


def trained_with(device: str) -> list[str]:
    """The library versions and the type of device that decide the result of training and tokenising.

    `device` is the setting; `auto` is resolved.
    """
    return [*(version(name) for name in ("torch", "transformers", "tokenizers")), device_here(device).type]


def texts_fingerprint(texts: Iterable[str]) -> str:
    """The SHA-256 of `texts`."""
    return examples_fingerprint(Example(text) for text in texts)


def folder_fingerprint(folder: Path) -> str:
    """The SHA-256 of each file of weights, configuration or vocabulary in a model folder, joined by colons."""
    files = sorted(
        f for f in folder.iterdir() if f.suffix in (".safetensors", ".json", ".txt", ".model") and f.is_file()
    )
    return ":".join(sha256_file(file) for file in files)
