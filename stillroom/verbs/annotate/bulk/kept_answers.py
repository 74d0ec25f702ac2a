"""The answers to a part that is not finished, in a file beside it, so that a run that is killed goes on within the part.

A part appears whole, and a slow model takes minutes for one. Its batches depend on its rows alone, so the answers of a batch, once they
are there, need not be computed again. The file has a line for each batch, in order. Only a run on this machine's disk keeps such a
file: two machines may write the same part at once, and a store cannot append.
"""

import hashlib
import os
from pathlib import Path

import msgspec

from serve.files import lock

# The answer to a row as JSON, or why there is none: a code and a message.
Outcome = bytes | tuple[str, str]
DECODER = msgspec.json.Decoder(list[str | tuple[str, str]])


class KeptAnswers:
    """The answers to the batches of one part, from the first; a context manager. `path` None: nothing is kept.

    `decides` is all that decides the answers: what an earlier run kept under other circumstances is not used.
    """

    def __init__(self, path: Path | None, decides: str) -> None:
        self.path, self._key = path, hashlib.sha256(decides.encode(errors="surrogatepass")).hexdigest().encode() + b"\n"
        self._reads = path is not None  # until all that is there was given

    def __enter__(self) -> "KeptAnswers":
        if self.path:
            self._file = self.path.open("a+b")
            lock(self._file.fileno())  # a worker whose run was killed ends a moment after it
            self._file.seek(0)
            if self._file.readline() != self._key:
                self._file.truncate(0)
                self._file.write(self._key)
                self._reads = False
        return self

    def __exit__(self, *_: object) -> None:
        if self.path:
            self._file.close()

    def take(self, count: int) -> list[Outcome] | None:
        """The answers to the next batch, which has `count` rows; None if it must be computed, and each after it."""
        if not self._reads:
            return None
        at = self._file.tell()
        try:
            found = DECODER.decode(self._file.readline())
        except (msgspec.DecodeError, UnicodeDecodeError):  # the end, or half a line, which a kill left
            found = []
        if len(found) == count:
            return [each.encode() if isinstance(each, str) else each for each in found]
        self._reads = False
        os.ftruncate(self._file.fileno(), at)
        return None

    def add(self, outcomes: list[Outcome]) -> None:
        """Keeps the answers to a batch that was computed."""
        if self.path:
            line = msgspec.json.encode([each.decode() if isinstance(each, bytes) else each for each in outcomes])
            self._file.write(line + b"\n")
            self._file.flush()

    def remove(self) -> None:
        """Removes the file: the part is there."""
        if self.path:
            self.path.unlink(missing_ok=True)
