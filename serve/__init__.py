"""A bundle's answers, in Python (`Pipeline`) and over HTTP (`serve.http.app`). Needs no torch and no transformers."""

import importlib
import os
from typing import TYPE_CHECKING

# Since pull request 27379 (released with 1.29) the official builds of onnxruntime send telemetry on Linux too, and keep an
# identifier and a queue of events under ~/.cache. This variable switches it off; it must be set before onnxruntime is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from serve.client import Client
    from serve.model.pipeline import Pipeline
    from serve.tasks import open_bundle

__all__ = ["Client", "Pipeline", "open_bundle"]


# Imported on first use, so that `import serve` does not load onnxruntime.
_HOMES = {"Client": "serve.client", "Pipeline": "serve.model.pipeline", "open_bundle": "serve.tasks"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
