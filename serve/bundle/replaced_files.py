"""Files that are replaced in one step: a reader sees the old file or the new one, never half of one. And how they reach the disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to. At the end it replaces `path`, or is deleted if writing failed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_through(folder: Path) -> None:
    """Syncs every file and folder to the disk, so that a crash after a rename does not leave an incomplete folder."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Syncs a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
