"""The input files of `annotate`: on a disk, or in an object store (s3, gs, az) that fsspec reads."""

import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from serve.bundle.remote_files import EXTRAS, ReadFailed, is_url, scheme_of, shown, store_of, tried
from serve.errors import BadInput, StillroomError

WILD = re.compile(r"[*?\[]")
HIDDEN = (".", "_")  # files and folders with such names are no data, as for Spark, DuckDB and pyarrow
# The bytes that one request to a store asks for while a file is read.
BLOCK_BYTES = 4 * 2**20
SHOWN_FILES = 5  # in a message


class InputPlace(NamedTuple):
    """An input file."""

    name: str
    """Its path below the folder that was given, or below the folder before the first wildcard."""
    place: str
    """Its path or URL."""
    bytes: int
    mark: str
    """Changes when the file does: the time of its last change, or the store's ETag."""


def inputs_of(place: str) -> list[InputPlace]:
    """The files of a folder, at any depth, of a pattern (`*`, `**`, `?`, `[...]`), or the one file, in order of their names.

    On a disk, links to folders are not entered.

    Raises:
        BadInput: there is none, it may not be read, two have one name, or its scheme cannot be listed.
    """
    found = sorted(set(_inputs_in_store(place) if in_store(place) else _inputs_on_disk(local_path(place))))
    if not found:
        raise BadInput(
            f"--input {shown(place)}: no file is there; give a file, a folder, or a pattern such as 'tickets/*.parquet'"
        )
    count = Counter(each.name for each in found)
    if same := [shown(each.place) for each in found if count[each.name] > 1]:  # in a store, `a//b` and `a/b`
        raise BadInput(
            f"--input {shown(place)}: the parts of these files would have the same names: {some(same)}; rename "
            "all but one, or give one by its own URL"
        )
    return found


def some(names: Sequence[str]) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - SHOWN_FILES:,} more" if len(names) > SHOWN_FILES else ""
    return ", ".join(names[:SHOWN_FILES]) + more


def is_inside(output: str, given: str) -> bool:
    """Whether parts in the folder `output` may be inputs of the next run with the input `given`."""
    if is_remote(output) != is_remote(given):
        return False
    if is_remote(given):
        out, path = shown(output), shown(given)
        whole = not WILD.search(path)
    else:
        out, path = os.path.realpath(local_path(output)), str(local_path(given))
        whole = Path(path).is_dir()
        if not whole and not WILD.search(path):
            return False
    root = path if whole else _before_wildcard(path)
    root = root if is_remote(given) else os.path.realpath(root)
    # A part is deeper than its input by as much as the output is: a pattern of a fixed depth does not match it.
    below = (whole or "**" in path) and out.startswith(f"{root.rstrip('/')}/")
    return out == root or below


def place_of(place: str) -> InputPlace:
    """The file `place` as it is now. FileNotFoundError without one."""
    if in_store(place):
        store, path = store_of(place)
        store.invalidate_cache()
        return _of_store(place, path, store.info(path), path)
    return _of_disk(Path(place), Path(place).parent)


def opened(place: str) -> BinaryIO:
    """The file at a path or URL. If a store fails, this and the reading of the file raise ReadFailed."""
    return cast(BinaryIO, _StoreFile(place)) if in_store(place) else Path(place).open("rb")


class _StoreFile(io.RawIOBase):
    """A file of a store. Whatever the store raises becomes ReadFailed."""

    def __init__(self, url: str) -> None:
        with _read_failures():
            store, path = store_of(url)
            self._file = store.open(path, "rb", block_size=BLOCK_BYTES)
        self.seek, self.tell = self._file.seek, self._file.tell  # type: ignore[method-assign]

    def readinto(self, buffer: Any) -> int:
        with _read_failures():
            return int(self._file.readinto(buffer))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


@contextmanager
def _read_failures() -> Iterator[None]:
    try:
        yield
    except StillroomError:
        raise
    except Exception as error:
        raise ReadFailed from error


def local_path(place: str) -> Path:
    """The path that a place on this machine's disk names."""
    return Path(os.path.abspath(place.removeprefix("file://") if place.startswith("file://") else place))


def is_remote(place: str) -> bool:
    """Whether a place is not on this machine's disk."""
    return is_url(place) and not place.startswith("file://")


def in_store(place: str) -> bool:
    """Whether a place is in an object store. BadInput if it is neither there nor on this machine's disk."""
    if not is_remote(place):
        return False
    if scheme_of(place) not in EXTRAS:
        raise BadInput(
            f"{shown(place)}: files are read and written on this machine's disk and at s3://, gs:// and az://; give one "
            "of these"
        )
    return True


def _inputs_on_disk(path: Path) -> list[InputPlace]:
    if path.is_file():
        return [_of_disk(path, path.parent)]
    root = path
    pattern: tuple[str, ...] = ("**",)
    if not path.is_dir():
        if not WILD.search(str(path)):
            return []
        root = Path(_before_wildcard(str(path)))
        pattern = path.relative_to(root).parts
        if not root.is_dir():
            return []
    try:
        files = list(_files_below(root, [pattern]))
        if lost := [str(each) for each in files if not each.exists()]:
            raise BadInput(f"--input {path}: these links lead to no file: {some(sorted(lost))}; remove them")
        return [_of_disk(each, root) for each in files if each.is_file()]
    except OSError as error:
        raise BadInput(
            f"--input {path}: {error.filename} cannot be read ({error.strerror}); put it right, or name the files by a pattern without it"
        ) from error


def _files_below(folder: Path, patterns: list[tuple[str, ...]]) -> Iterator[Path]:
    """The files whose path below `folder` matches one of the patterns, each the parts of a path. OSError if a folder may not be read.

    `glob` skips such a folder, and enters links to folders, also one that leads back.
    """
    patterns = list(patterns)
    for each in patterns:
        if each[0] == "**" and len(each) > 1:
            patterns.append(each[1:])  # `**` may stand for no folder
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            fits = [each for each in patterns if each[0] == "**" or fnmatchcase(entry.name, each[0])]
            if entry.name.startswith(HIDDEN) or not fits:
                continue
            path = folder / entry.name
            if entry.is_dir(follow_symlinks=False):
                if inside := [
                    each if each[0] == "**" else each[1:] for each in fits if each[0] == "**" or len(each) > 1
                ]:
                    yield from _files_below(path, inside)
            elif not path.is_dir() and any(len(each) == 1 for each in fits):
                yield path


def _of_disk(path: Path, root: Path) -> InputPlace:
    found = path.stat()
    return InputPlace(path.relative_to(root).as_posix(), str(path), found.st_size, str(found.st_mtime_ns))


def _inputs_in_store(url: str) -> list[InputPlace]:
    store, path = store_of(url)
    store.invalidate_cache()

    def found() -> list[InputPlace]:
        if WILD.search(path) and not store.isfile(path):  # a name may have such a character, too
            root, files = _before_wildcard(path), store.glob(path, detail=True)
        else:
            root, files = path, store.find(path, detail=True)
            if list(files) == [path]:
                root = path.rpartition("/")[0]
        if not files:
            store.ls(root)  # of a bucket that is not there, or may not be read, the store says so
        return [
            _of_store(url, each, about, root)
            for each, about in files.items()
            # A name that ends with / stands for a folder, as consoles of stores make them.
            if about["type"] == "file"
            and not each.endswith("/")
            # Neither is data in hidden files and folders.
            and not any(part.startswith(HIDDEN) for part in each.removeprefix(root).strip("/").split("/"))
        ]

    try:
        return tried(url, "", found, does="read")
    except BadInput as fault:
        if "no such bucket" not in fault.message:
            raise
        return []


def _of_store(url: str, path: str, about: dict[str, Any], root: str) -> InputPlace:
    mark = next((str(about[key]) for key in ("ETag", "etag", "LastModified", "last_modified") if about.get(key)), "")
    return InputPlace(path.removeprefix(root).lstrip("/"), f"{scheme_of(url)}://{path}", int(about["size"]), mark)


def _before_wildcard(pattern: str) -> str:
    """The folder before the first wildcard."""
    match = WILD.search(pattern)
    return pattern[: match.start() if match else None].rpartition("/")[0] or "/"
