"""The folder of parts that `annotate` writes: on a disk, or in an object store (s3, gs, az) that fsspec writes.

A file appears under its name whole or not at all. On a disk it is written beside its name and renamed. An object store shows an
object once its upload is complete.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from serve.bundle.remote_files import listed, removed, store_of, tried
from serve.errors import BadInput
from serve.files import PARTIAL, disk_errors_reported, lock_at, no_room, replacing
from stillroom.verbs.annotate.inputs import in_store, local_path

LOCK, UNFINISHED = ".annotate.lock", ".unfinished"
PARTIAL_NAME = re.compile(rf"\..+\.[0-9a-f]{{8,32}}{re.escape(PARTIAL)}")
# The bytes of a name on a disk, less those that the name of a file beside it has more while it is written.
MOST_NAME_BYTES = 255 - len(f"..{'0' * 32}{PARTIAL}")


class DiskFolder:
    """A folder on a disk, which several machines may share."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, str(path)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Makes the folder, which no other run may write to meanwhile. If nothing is written, it is removed again."""
        new, locked = not self.path.exists(), self.path / LOCK
        with self.refused():
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(locked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not lock_at(locked, descriptor):
                raise BadInput(f"another `annotate` is writing {self.place}; wait for it, or give another --output")
            try:
                yield
            finally:
                locked.unlink(missing_ok=True)
                if new:
                    with suppress(OSError):  # where something was written
                        self.path.rmdir()
        finally:
            os.close(descriptor)

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

    def remove_partial_files(self, *, anew: bool = False) -> None:
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

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing: a store has no folders and no locks."""
        yield

    def sizes(self) -> dict[str, int]:
        """The bytes of each file in it and below, by name."""
        store, folder = self._store
        store.invalidate_cache()
        found = tried(self.place, "", lambda: listed(store, folder), does="read")
        # A name that ends with / is a folder that a console made.
        return {name: size for name, size in found.items() if name and not name.endswith("/")}

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

    def remove_partial_files(self, *, anew: bool = False) -> None:
        """Nothing: what was not uploaded whole is not there."""


Storage = DiskFolder | StoreFolder


def storage_of(place: str) -> Storage:
    """The folder at a path or URL."""
    return StoreFolder(place) if in_store(place) else DiskFolder(local_path(place))
