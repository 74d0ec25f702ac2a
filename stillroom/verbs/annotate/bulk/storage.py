"""Where the files of a bulk annotation are: on a disk, or in an object store (s3, gs, az) that fsspec reads.

A file appears under its name whole or not at all. On a disk it is written beside its name and renamed. An object store shows an
object once its upload is complete.
"""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from serve.bundle.remote_files import EXTRAS, is_url, listed, removed, scheme_of, shown, store_of, tried
from serve.errors import BadInput
from serve.files import PARTIAL, disk_errors_reported, no_room, replacing

WILD = re.compile(r"[*?\[]")
HIDDEN = (".", "_")  # files and folders with such names are no data, as for Spark, DuckDB and pyarrow
# The bytes that one request to a store asks for while a file is read.
BLOCK_BYTES = 4 * 2**20
SHOWN_FILES = 5  # in a message
UNFINISHED = ".unfinished"
PARTIAL_NAME = re.compile(rf"\..+\.[0-9a-f]{{8,32}}{re.escape(PARTIAL)}")
# The bytes of a name on a disk, less those that the name of a file beside it has more while it is written.
MOST_NAME_BYTES = 255 - len(f"..{'0' * 32}{PARTIAL}")


class InputPlace(NamedTuple):
    """An input file."""

    name: str
    """Its path below the folder that was given, or below the folder before the first wildcard."""
    place: str
    """Its path or URL."""
    bytes: int
    mark: str
    """Changes when the file does: the time of its last change, or the store's ETag."""


class Storage(Protocol):
    """A folder for output."""

    place: str

    def make(self) -> None:
        """Makes the folder, if it is not there."""

    def sizes(self) -> dict[str, int]:
        """The bytes of each file in it and below, by name; those with hidden names are left out, but for `_manifest.json`."""

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""

    def writing(self, name: str) -> Any:
        """A context that gives a path to write to. At its end the content is the file `name`."""

    def unfinished(self, name: str) -> Path | None:
        """The file that keeps what is known of the file `name` until it is there; None where no file can grow."""

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""


def inputs_of(place: str) -> list[InputPlace]:
    """The files of a folder, at any depth, of a pattern (`*`, `**`, `?`, `[...]`), or the one file, in order of their names.

    On a disk, links to folders are not entered.

    Raises:
        BadInput: there is none, it may not be read, two have one name, or its scheme cannot be listed.
    """
    found = sorted(set(_inputs_in_store(place) if _in_store(place) else _inputs_on_disk(local_path(place))))
    if not found:
        raise BadInput(
            f"--input {shown(place)}: no file is there; give a file, a folder, or a pattern such as 'tickets/*.parquet'"
        )
    count = Counter(each.name for each in found)
    if same := [shown(each.place) for each in found if count[each.name] > 1]:  # in a store, `a//b` and `a/b`
        raise BadInput(
            f"--input {shown(place)}: the parts of these files would have the same names: {', '.join(same[:SHOWN_FILES])}; rename "
            "all but one, or give one by its own URL"
        )
    return found


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
    if _in_store(place):
        store, path = store_of(place)
        store.invalidate_cache()
        return _of_store(place, path, store.info(path), path)
    return _of_disk(Path(place), Path(place).parent)


def opened(place: str) -> BinaryIO:
    """The file at a path or URL."""
    if not _in_store(place):
        return Path(place).open("rb")
    store, path = store_of(place)
    return cast(BinaryIO, store.open(path, "rb", block_size=BLOCK_BYTES))


def storage_of(place: str) -> Storage:
    """The folder at a path or URL."""
    return StoreFolder(place) if _in_store(place) else DiskFolder(local_path(place))


def local_path(place: str) -> Path:
    """The path that a place on this machine's disk names."""
    return Path(os.path.abspath(place.removeprefix("file://") if place.startswith("file://") else place))


def is_remote(place: str) -> bool:
    """Whether a place is not on this machine's disk."""
    return is_url(place) and not place.startswith("file://")


def _in_store(place: str) -> bool:
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
            raise BadInput(
                f"--input {path}: these links lead to no file: {', '.join(sorted(lost)[:SHOWN_FILES])}; remove them"
            )
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


class DiskFolder:
    """A folder on a disk, which several machines may share."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, str(path)

    def make(self) -> None:
        """Makes the folder, if it is not there."""
        with self.refused():
            self.path.mkdir(parents=True, exist_ok=True)

    def sizes(self) -> dict[str, int]:
        """The bytes of each file in it and below, by name, but for files of a writer (`.*.partial`) and locks."""
        found = (each for each in self.path.rglob("*") if not each.name.startswith(".") and each.is_file())
        return {each.relative_to(self.path).as_posix(): each.stat().st_size for each in found}

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A path beside the file `name`, which it is renamed to at the end."""
        target = self.path / name
        with self.refused():
            target.parent.mkdir(parents=True, exist_ok=True)
            # Not alone: two machines may write the same part, if one of them was thought dead.
            with replacing(target, synced=True) as beside:
                yield beside

    def unfinished(self, name: str) -> Path | None:
        """The file beside the file `name` that keeps what is known of it until it is there."""
        target = self.path / name
        return target.with_name(f".{target.name}{UNFINISHED}")

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with self.refused():
            (self.path / name).unlink(missing_ok=True)

    def remove_partial_files(self, *, anew: bool) -> None:
        """Removes what writers that were killed have left; of unfinished files only if they are there, or all are made `anew`."""
        for each in self.path.rglob(f".*{PARTIAL}"):
            if PARTIAL_NAME.fullmatch(each.name) and each.is_file():
                each.unlink(missing_ok=True)
        for each in self.path.rglob(f".*{UNFINISHED}"):
            if anew or each.with_name(each.name[1:].removesuffix(UNFINISHED)).is_file():
                each.unlink(missing_ok=True)

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Turns an OSError of this folder into BadInput."""
        with disk_errors_reported(self.place):
            try:
                yield
            except OSError as error:
                of_an_input = error.filename is not None and not str(error.filename).startswith(self.place)
                if no_room(error) or of_an_input:
                    raise
                raise BadInput(
                    f"--output {self.place} cannot be written ({error.strerror or error}); give another folder"
                ) from error


class StoreFolder:
    """A folder of an object store."""

    def __init__(self, url: str) -> None:
        self.place = url.rstrip("/")

    @cached_property
    def _store(self) -> tuple[Any, str]:
        return store_of(self.place)

    def make(self) -> None:
        """Nothing: a store has no folders."""

    def sizes(self) -> dict[str, int]:
        """The bytes of each file in it and below, by name."""
        store, folder = self._store
        store.invalidate_cache()
        found = tried(self.place, "", lambda: listed(store, folder), does="read")
        return {
            name: size for name, size in found.items() if name and not name.endswith("/")
        }  # a folder that a console made

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""
        store, folder = self._store

        def content() -> bytes | None:
            try:
                return bytes(store.cat_file(f"{folder}/{name}"))
            except FileNotFoundError:
                return None

        return tried(self.place, name, content, does="read")

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A path on this machine's disk, whose content is uploaded at the end."""
        store, folder = self._store
        with tempfile.TemporaryDirectory(prefix="stillroom-") as here:
            local = Path(here) / "part"
            with disk_errors_reported(
                f"{tempfile.gettempdir()}, where files are written before they are uploaded,",
                if_full="Make room, or set TMPDIR to another folder",
            ):
                yield local
            tried(self.place, name, lambda: store.put_file(str(local), f"{folder}/{name}"), does="written")

    def unfinished(self, name: str) -> Path | None:
        """None: an object cannot grow."""
        return None

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        store, folder = self._store
        tried(self.place, name, lambda: removed(store, f"{folder}/{name}"), does="written")
