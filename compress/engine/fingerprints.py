"""What decides the outcome of a stage, as one name: settings, texts, models and versions."""

import hashlib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from compress.data.examples import Example, examples_fingerprint
from compress.engine.hardware import device_here
from serve.bundle.manifest import canonical_json, sha256_file

# Raised when a change of code makes stages of an older version unfit to be taken over.
STAGE_FORMAT = 3


def fingerprint(*parts: object) -> str:
    """One name for all that `parts` (anything that JSON carries) say."""
    return hashlib.sha256(canonical_json([STAGE_FORMAT, *parts])).hexdigest()


def trained_with(device: str) -> list[str]:
    """The versions and the device that decide what training and tokenising give, for fingerprints.

    `device` is as settings name it; what counts is the one that it is in fact.
    """
    return [*(version(name) for name in ("torch", "transformers", "tokenizers")), device_here(device).type]


def texts_fingerprint(texts: Iterable[str]) -> str:
    """What `texts` are, as one name."""
    return examples_fingerprint(Example(text) for text in texts)


def folder_fingerprint(folder: Path) -> str:
    """The content of a model folder, as one name."""
    files = sorted(
        f for f in folder.iterdir() if f.suffix in (".safetensors", ".json", ".txt", ".model") and f.is_file()
    )
    return ":".join(sha256_file(file) for file in files)
