"""stillroom: a large text encoder in, a small one out, distilled, exported, measured and served.

Names are resolved at first use, so that torch is loaded only where it is needed.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

IN_PYTHON = (
    "run", "distill", "finetune", "export", "label", "select", "profile", "push", "benchmark", "search", "transfer", "evaluate", "explain",
    "load",
)  # fmt: skip
OUR_PACKAGES = ("compress", "export", "latency", "serve")
_HOME = {name: f"stillroom.verbs.{name}" for name in IN_PYTHON} | {
    "Pipeline": "serve.model.pipeline",
    "Generator": "compress.models.generator",
    "Client": "serve.client",
}
__all__ = sorted(_HOME)  # noqa: PLE0605 - one list of names, not two


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"stillroom has no {name!r}; it has {', '.join(__all__)}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ImportError as error:
        # A file or folder of the user's own may hide a package of stillroom.
        part = str(error.name).partition(".")[0]
        found = getattr(sys.modules.get(part), "__file__", None)
        if part not in OUR_PACKAGES or found is None or Path(found).parent.parent == Path(__file__).parent.parent:
            raise
        raise ImportError(
            f"{found} hides stillroom's package {part!r}; rename it, start Python in another folder, or run it with -P"
        ) from error
