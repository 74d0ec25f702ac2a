"""Lists and writes the files of a folder in an object store, again after failures that may pass."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from serve.bundle.remote_files import Absent, definite, in_words, pauses_s, shown
from serve.errors import BadInput

T = TypeVar("T")


class ReadFailed(Exception):
    """A store failed while a file of it was read; the cause says why."""


def tried(
    url: str, name: str, act: Callable[[], T], *, does: str = "written", caught: type[Exception] = Exception
) -> T:
    """What `act` gives, which is called again after a failure that may pass; `does` says what it does with the file `name` of `url`.

    Exceptions other than `caught` are not caught.

    Raises:
        BadInput: it failed for a reason that stays, or too often.
    """
    for pause_s in (*pauses_s(url), None):
        try:
            return act()
        except caught as failed:
            error: BaseException = (failed.__cause__ if caught is ReadFailed else None) or failed
            fault = definite(url, name, error)
            if isinstance(fault, Absent):
                raise BadInput(
                    f"{shown(url)} cannot be {does}: there is no such bucket or container; create it first"
                ) from None
            if fault:
                raise BadInput(fault.message.replace(" be read", f" be {does}")) from None
            if pause_s is None:
                raise BadInput(
                    f"{shown(url)}/{name} cannot be {does} ({in_words(url, error)}); give the same command again"
                ) from None
        time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def listed(store: Any, folder: str) -> dict[str, int]:
    """Sizes of the files in the folder and those below it, by their names in it."""
    try:
        files = store.find(folder, detail=True)
    except FileNotFoundError:
        return {}
    return {path.removeprefix(folder).lstrip("/"): int(each["size"]) for path, each in files.items()}


def removed(store: Any, path: str) -> None:
    """Removes a file, if it is there."""
    with suppress(FileNotFoundError):
        store.rm_file(path)
