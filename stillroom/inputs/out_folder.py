"""The folder `--out` of a verb that writes a few files into it: whether it may be written to."""

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from compress.engine.resumable_stages import check_writable
from serve.errors import BadInput


def check_out_folder(out: Path, files: Iterable[str]) -> None:
    """Nothing, when `files` can be written into the folder `out`, which is free or holds nothing but earlier ones.

    What a kill left of one of them while it was written (`serve.bundle.replaced_files`) is let be.

    Raises:
        BadInput: something else is there, or the folder cannot be made or written in.
    """
    if out.exists() and not (out.is_dir() and _names_in(out) <= set(files)):
        raise BadInput(
            f"--out {out} is there already and holds other things; nothing was written. Give another folder."
        )
    check_writable(out)
    if out.is_dir() and not os.access(out, os.W_OK):
        raise BadInput(f"--out {out}: this user may not write there. Give another folder.")


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not fnmatch(path.name, ".*.partial")}
