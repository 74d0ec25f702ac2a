"""Folders that the command line names: a bundle, the folder of the results, a model that must not lie where a verb works."""

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from serve.bundle.fetched import open_remote
from serve.bundle.remote_files import is_url
from serve.errors import BadInput
from serve.files import LOST_AND_FOUND, output
from serve.tasks import check_manifest
from stillroom.console import bar

MB = 1_000_000


def local_bundle(place: Path | str) -> Path:
    """The folder `place`, or the folder in the cache of the bundle at the URL `place`, with a bar while it is fetched.

    Raises:
        BundleError: as `serve.bundle.fetched.open_remote`.
    """
    if not is_url(place):
        return Path(os.path.expanduser(place))
    with bar("fetch, in MB") as shown:
        return open_remote(
            str(place), lambda done, whole: shown(done // MB, -(-whole // MB)), check=check_manifest
        ).path


def check_out_folder(out: Path | str, files: Iterable[str], *, beside: bool = False) -> None:
    """Check that `files` can be written into the folder `out`, which must be absent or hold only earlier versions of them.

    Partial files of a killed process (`serve.files`) are ignored. `beside` tells that more is written beside it.

    Raises:
        BadInput: `out` holds something else, or cannot be made or written to.
    """
    folder = output(out, beside=beside)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if any(not fnmatch(name, ".*.partial") for name in names - {*files, LOST_AND_FOUND}):
        raise BadInput(f"--out {out} already exists and holds other files; nothing was written. Give another folder.")


def check_outside(role: str, model: str, work: Path) -> None:
    """Check that `model`, which the flag `role` names, is not inside the working folder of a run.

    Raises:
        BadInput: it is inside, and the run would delete it.
    """
    if Path(model).resolve().is_relative_to(work.resolve()):
        raise BadInput(f"{role} {model} is in {work}, which this run would delete. Copy it elsewhere.")
