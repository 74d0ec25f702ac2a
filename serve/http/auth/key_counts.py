"""How much of each key's limits is used: counts of one process, or those that all front processes share."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    """Counts in memory that all processes forked from this one share.

    A file's lock guards them: the system releases it if its owner dies.
    """

    def __init__(self, fronts: int) -> None:
        self._width = 2 + fronts
        self._digests = mmap.mmap(-1, 32 * MOST_KEYS)
        self._numbers = memoryview(mmap.mmap(-1, 8 * self._width * MOST_KEYS)).cast("d")
        # No file of the file system, where there is another: that may be read-only.
        self.lock = os.memfd_create("stillroom-keys") if hasattr(os, "memfd_create") else _unnamed_file()

    def of_front(self, front: int) -> "FrontCounts":
        """The counts as the front process `front` uses them; to be called there."""
        return FrontCounts(self, front)


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class FrontCounts:
    """The shared counts, in one front process. A process that replaces another starts without requests under way."""

    def __init__(self, shared: SharedCounts, front: int) -> None:
        self._shared = shared
        self._front = front
        for slot in range(MOST_KEYS):
            shared._numbers[slot * shared._width + 2 + front] = 0.0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within this context no other process changes a count."""
        import fcntl  # not on Windows, where there is one front

        fcntl.lockf(self._shared.lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._shared.lock, fcntl.LOCK_UN)

    def __call__(self, digest: bytes) -> Counts:
        """The counts of the key and limits with `digest` (32 bytes). BadInput if there is no room for another."""
        digests, width = self._shared._digests, self._shared._width
        with self.locked():
            first = int.from_bytes(digest[:4])
            for slot in ((first + tried) % MOST_KEYS for tried in range(MOST_KEYS)):
                known = digests[32 * slot : 32 * slot + 32]
                if known == digest or not any(known):
                    digests[32 * slot : 32 * slot + 32] = digest
                    numbers = self._shared._numbers[slot * width : (slot + 1) * width]
                    return Counts(numbers[:2], numbers[2:], self._front, _Again(self.locked))
        raise BadInput(
            f"this server has had {MOST_KEYS:,} keys with limits since it started; restart it, or give --fronts 1"
        )


class _Again:
    """A context manager that can be entered again and again."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._entered: Any = None

    def __enter__(self) -> None:
        self._entered = self._make()
        self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(*error)
