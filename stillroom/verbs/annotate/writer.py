"""The file that `annotate` appends answers to, and the checks before a stopped run resumes in it.

F.jsonl.lineage.json, beside F.jsonl, holds the bundle and the options of its answers. It is written before the first answer.
The answers themselves show how far a run came. Lines are appended. Where lines in the middle change, the whole file is
written again beside the old one and renamed into its place.

To find the rows that still need an answer, the rows of the input are paired with the lines that are there. An error line holds the SHA-256
of its row as it was read. When the row has changed, it is answered again.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from serve.errors import BadInput
from serve.files import RESUME, disk_errors_reported, lock, lock_at, replacing
from stillroom.verbs.annotate.reader import InputFile
from stillroom.verbs.annotate.rows import InputRow

STDOUT = Path("-")
# A power cut loses at most the answers of this time. A kill loses nothing that was written: the system's cache holds it.
SYNC_S = 10.0
TAIL_BYTES = 1 << 16
PIECE_BYTES = 1 << 20
ERROR_LINE = re.compile(rb'\{"error":\{"line":\d+,"row_sha256":"([0-9a-f]{64})",')


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
            with replacing(self.lineage_path, synced=True) as beside:
                beside.write_text(json.dumps(self.lineage, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
            return
        try:
            found = json.loads(self.lineage_path.read_bytes())
        except (OSError, ValueError):
            found = None
        fault = f"was not begun by `annotate`: {self.lineage_path.name} is not beside it"
        if isinstance(found, dict):
            changed = lineage_changes(found, self.lineage)
            fault = f"was begun with {changed}" if changed else ""
        if fault:
            raise BadInput(
                f"{self.path} is there already and {fault}. Give another --output, or --restart to overwrite it"
            )
        # An incomplete last line, which a kill or a full disk left, is dropped.
        end = os.fstat(self._descriptor).st_size
        while end:
            begin = max(0, end - TAIL_BYTES)
            at = os.pread(self._descriptor, end - begin, begin).rfind(b"\n")
            if at >= 0:
                end = begin + at + 1
                break
            end = begin
        os.ftruncate(self._descriptor, end)

    @contextlib.contextmanager
    def _full_disk_reported(self) -> Iterator[None]:
        """Turns the system's errors of writing the output into BadInput."""
        if_full = RESUME if self.lasting else "Make room"
        with disk_errors_reported(self.name, if_full=if_full, otherwise="give another file as --output"):
            try:
                yield
            except BrokenPipeError as error:
                raise BadInput(f"the reader of {self.name} closed it; the rest was not annotated") from error


def lineage_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In which settings an output was begun otherwise than this run goes on."""
    return "; ".join(
        f"{name} {json.dumps(before.get(name))}, now {json.dumps(now.get(name))}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    )


class Place(NamedTuple):
    """A row of the input, its line in the output if there is one, and whether the row needs an answer."""

    row: InputRow
    line: bytes | None
    asked: bool


def places(source: InputFile, output: AnswerFile) -> Iterator[Place]:
    """A place for each row of `source`, in order: first those that `output` has a line for.

    Raises:
        BadInput: a line is the answer to another row.
    """
    rows, closing = source.rows(), answer_opening(source.columns.answer)
    for number, line in enumerate(output.lines(), 1):
        row = next(rows, None)
        if row and not row.fault and line.startswith(row.fields + closing):
            yield Place(row, line, asked=False)
        elif row and (error := ERROR_LINE.match(line)):
            yield Place(row, line, asked=error[1].decode() != _fingerprint(row))
        else:
            which = f"row {number:,}" + (f" ({source.unit} {row.line:,})" if row else ", which does not exist,")
            raise BadInput(
                f"line {number:,} of {output.name} is not the answer to {which} of {source.name}: one of the files was "
                "changed. Give the original input, another --output, or --restart to overwrite the output"
            )
    for row in rows:
        yield Place(row, None, asked=True)


def answer_opening(field: str) -> bytes:
    """The JSON between a row's fields and the value of `field`, its answer."""
    return b"," + msgspec.json.encode(field) + b":"


def error_line(row: InputRow, code: str, message: str) -> bytes:
    """The output line of a row that has no answer."""
    error = {"line": row.line, "row_sha256": _fingerprint(row), "code": code, "message": message}
    return msgspec.json.encode({"error": error}) + b"\n"


def _fingerprint(row: InputRow) -> str:
    return hashlib.sha256(row.fields).hexdigest()
