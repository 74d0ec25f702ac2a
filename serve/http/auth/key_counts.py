"""How much of each key's limits is used: counts of one process, or those that all front processes share."""

import mmap
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from serve.errors import BadInput

# Keys with limits that the front processes of one server can count, those that were withdrawn included.
MOST_KEYS = 4096


class Counts(NamedTuple):
    """Counts of one key, to be changed while `locked`."""

    bucket: "memoryview[float]"
    """Requests that may begin, and 1 + the time in seconds of that count; 0 before the first."""
    running: "memoryview[float]"
    """Requests under way, of each front process."""
    front: int
    locked: AbstractContextManager[Any]


def own_counts(digest: bytes) -> Counts:
    """New counts, of one process."""
    numbers = memoryview(bytearray(24)).cast("d")
    return Counts(numbers[:2], numbers[2:], 0, nullcontext())


class SharedCounts:
    """Counts in memory that all processes forked from this one share."""

    def __init__(self, fronts: int) -> None:
        self._width = 2 + fronts
        self._digests = mmap.mmap(-1, 32 * MOST_KEYS)
        self._numbers = memoryview(mmap.mmap(-1, 8 * self._width * MOST_KEYS)).cast("d")
        self._locked = FileLock()

    def of_front(self, front: int) -> Callable[[bytes], Counts]:
        """Makes the counts of a key for the front process `front`, to be called there: it starts without requests under way.

        BadInput if there is no room for another key.
        """
        for slot in range(MOST_KEYS):
            self._numbers[slot * self._width + 2 + front] = 0.0
        return partial(self._counts, front)

    def _counts(self, front: int, digest: bytes) -> Counts:
        first = int.from_bytes(digest[:4])
        with self._locked:
            for slot in ((first + tried) % MOST_KEYS for tried in range(MOST_KEYS)):
                known = self._digests[32 * slot : 32 * slot + 32]
                if known == digest or not any(known):
                    self._digests[32 * slot : 32 * slot + 32] = digest
                    numbers = self._numbers[slot * self._width : (slot + 1) * self._width]
                    return Counts(numbers[:2], numbers[2:], front, self._locked)
        raise BadInput(
            f"this server has had {MOST_KEYS:,} keys with limits since it started; restart it, or give --fronts 1"
        )


class FileLock:
    """A lock between processes that were forked from the one which made it. The system releases it if its owner dies."""

    def __init__(self) -> None:
        # No file of the file system, where there is another: that may be read-only.
        self._file = os.memfd_create("stillroom-keys") if hasattr(os, "memfd_create") else _unnamed_file()

    def __enter__(self) -> None:
        import fcntl  # not on Windows, where there is one front

        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        import fcntl

        fcntl.lockf(self._file, fcntl.LOCK_UN)


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
