"""Checks the folder `--out` of a verb that writes a few files into it."""

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from compress.runs.resumable_stages import check_writable
from serve.errors import BadInput


def check_out_folder(out: Path, files: Iterable[str]) -> None:
    """Check that `files` can be written into the folder `out`, which must be absent or hold only earlier versions of them.

    Partial files of a killed process (`serve.files`) are ignored.

    Raises:
        BadInput: `out` holds something else, or cannot be made or written to.
    """
    if out.exists() and not (out.is_dir() and _names_in(out) <= set(files)):
        found = "holds other files" if out.is_dir() else "is not a folder"
        raise BadInput(f"--out {out} already exists and {found}; nothing was written. Give another folder.")
    check_writable(out)
    if out.is_dir() and not os.access(out, os.W_OK):
        raise BadInput(f"--out {out}: this user may not write to it. Give another folder.")


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not fnmatch(path.name, ".*.partial")}
