"""The file that `annotate` appends answers to, and the checks before a stopped run resumes in it.

F.jsonl.lineage.json, beside F.jsonl, holds the bundle and the options of its answers. It is written before the first answer.
The answers themselves show how far a run came. Lines are appended. Where lines in the middle change, the whole file is
written again beside the old one and renamed into its place.
"""

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from serve.errors import BadInput
from serve.files import RESUME, disk_errors_reported, lock, lock_at, replacing

STDOUT = Path("-")
# A power cut loses at most the answers of this time. A kill loses nothing that was written: the system's cache holds it.
SYNC_S = 10.0
TAIL_BYTES = 1 << 16
PIECE_BYTES = 1 << 20


class AnswerFile:
    """Appends whole lines; a context manager. `lineage` is what decides the answers.

    A file that this run created is removed if an error ends the run before a line is written.

    Standard output (`-`) and what is not a regular file are written from the start, without a lineage file.

    Raises:
        BadInput: another run is writing the file, it has another lineage, or it cannot be written.
    """

    def __init__(self, path: Path, lineage: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path, self.lineage, self.restart = path, dict(lineage), restart
        self.name = "standard output" if path == STDOUT else str(path)
        self.lineage_path = path.parent / f"{path.name}.lineage.json"
        self.lasting = False
        self._real = Path(os.path.realpath(path))  # of a link its target is replaced, so that the link stays
        self._mended = self._real.with_name(f"{self._real.name}.mended")
        self._ours = False  # whether this run made the file
        self._left: list[int] = []  # descriptors of replaced files, whose locks are held until the end
        self._synced_s = time.monotonic()

    def __enter__(self) -> "AnswerFile":
        with self._full_disk_reported():
            if self.path == STDOUT:
                self._descriptor = os.dup(1)
                return self
            self._ours = not os.path.lexists(self.path)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self.lasting = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
                if self.lasting:
                    self._take_up()
            except BaseException:
                os.close(self._descriptor)
                raise
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if self.lasting:
                with self._full_disk_reported():
                    os.fsync(self._descriptor)
                    if error and self._ours and os.fstat(self._descriptor).st_size == 0:
                        self.path.unlink(missing_ok=True)
                        self.lineage_path.unlink(missing_ok=True)
        finally:
            for descriptor in (self._descriptor, *self._left):
                os.close(descriptor)

    def lines(self) -> Iterator[bytes]:
        """The lines that are there already."""
        if self.lasting:
            with self.path.open("rb", buffering=1 << 20) as file:
                yield from file

    def write(self, lines: bytes) -> None:
        """Appends `lines`, which end with a newline."""
        with self._full_disk_reported():
            left = memoryview(lines)
            while left:
                left = left[os.write(self._descriptor, left) :]
            if self.lasting and time.monotonic() - self._synced_s > SYNC_S:
                os.fsync(self._descriptor)
                self._synced_s = time.monotonic()

    @contextlib.contextmanager
    def mending(self, kept_bytes: int) -> Iterator[None]:
        """Within it, `write` goes to a new file that begins with the first `kept_bytes` of this one and replaces it at the end.

        If an error ends it earlier, this file stays unchanged.
        """
        old = self._descriptor
        with self._full_disk_reported():
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            new = os.open(self._mended, flags, stat.S_IMODE(os.fstat(old).st_mode))
        try:
            lock(new)  # another run that opens it under its final name finds it locked
            self._descriptor = new
            at = 0
            while piece := os.pread(old, min(PIECE_BYTES, kept_bytes - at), at):
                self.write(piece)
                at += len(piece)
            yield
            with self._full_disk_reported():
                os.fsync(new)
                os.replace(self._mended, self._real)
        except BaseException:
            self._descriptor = old
            os.close(new)
            self._mended.unlink(missing_ok=True)
            raise
        self._left.append(old)

    def _take_up(self) -> None:
        if not lock_at(self.path, self._descriptor):
            raise BadInput(f"another `annotate` is writing {self.path}; wait for it, or give another --output")
        self._mended.unlink(missing_ok=True)  # of a run that was killed
        if self.restart:
            os.ftruncate(self._descriptor, 0)
        if os.fstat(self._descriptor).st_size == 0:
            self._write_lineage()
            return
        if fault := self._fault_of_lineage():
            raise BadInput(
                f"{self.path} is there already and {fault}. Give another --output, or --restart to overwrite it"
            )
        self._cut_half_a_line()

    def _fault_of_lineage(self) -> str | None:
        """Why this run may not go on in the file; None when it may."""
        try:
            found = json.loads(self.lineage_path.read_bytes())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict):
            return f"was not begun by `annotate`: {self.lineage_path.name} is not beside it"
        changed = [
            f"{name} {json.dumps(found.get(name))}, now {json.dumps(self.lineage.get(name))}"
            for name in {**found, **self.lineage}
            if found.get(name) != self.lineage.get(name)
        ]
        return f"was begun with {'; '.join(changed)}" if changed else None

    def _cut_half_a_line(self) -> None:
        """Drops an incomplete last line, which a kill or a full disk left."""
        end = os.fstat(self._descriptor).st_size
        while end:
            begin = max(0, end - TAIL_BYTES)
            at = os.pread(self._descriptor, end - begin, begin).rfind(b"\n")
            if at >= 0:
                end = begin + at + 1
                break
            end = begin
        os.ftruncate(self._descriptor, end)

    def _write_lineage(self) -> None:
        with replacing(self.lineage_path, synced=True) as beside:
            beside.write_text(json.dumps(self.lineage, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def _full_disk_reported(self) -> Iterator[None]:
        """Turns the system's errors of writing the output into BadInput."""
        if_full = RESUME if self.lasting else "Make room"
        with disk_errors_reported(self.name, if_full=if_full, otherwise="give another file as --output"):
            try:
                yield
            except BrokenPipeError as error:
                raise BadInput(f"the reader of {self.name} closed it; the rest was not annotated") from error
