"""Distils and fine-tunes encoders: from a teacher to a student checkpoint. Usable without the rest of stillroom.

Names are imported when they are first used, so that `import compress` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.progress import Event
    from compress.runs.distill import distill
    from compress.runs.finetune import finetune
    from compress.settings import Distillation, FineTuning

_HOME = {
    "Distillation": "compress.settings",
    "Event": "compress.progress",
    "FineTuning": "compress.settings",
    "distill": "compress.runs.distill",
    "finetune": "compress.runs.finetune",
}
__all__ = ["Distillation", "Event", "FineTuning", "distill", "finetune"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"compress has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
