"""stillroom: a large text encoder in, a small one out, distilled, exported, measured and served.

Names are resolved when they are first used, so that nobody waits for torch who does not ask for it.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "run": "stillroom.verbs",
    "distill": "stillroom.verbs",
    "finetune": "stillroom.verbs",
    "export": "stillroom.verbs",
    "profile": "stillroom.verbs",
    "evaluate": "stillroom.verbs",
    "load": "stillroom.loading",
    "Pipeline": "serve.pipeline",
    "Client": "serve.client",
}
__all__ = sorted(_HOME)  # noqa: PLE0605 - one list of names, not two


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"stillroom has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
