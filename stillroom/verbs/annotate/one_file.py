"""`annotate` of one file, or of standard input: a file of lines in the input's order, on all cores.

A window of rows is written when all its answers are there, so the output always holds whole rows in order, and the next run resumes after
the last of them. The first windows are small, so that a run that is killed every few seconds gets on.

F.jsonl.lineage.json, beside F.jsonl, holds the bundle and the options of its answers. It is written before the first answer.
Lines are appended. Where lines in the middle change, the whole file is written again beside the old one and renamed into its place.
"""

import contextlib
import itertools
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from serve.errors import BadInput, InternalError
from serve.files import RESUME, disk_errors_reported, lock, lock_at, replacing
from serve.text.inputs import TextWork
from serve.wording import counted
from stillroom.console import Bar, bar, say
from stillroom.verbs.annotate.answering import (
    WINDOW_BYTES,
    Failure,
    Outcome,
    RowFaults,
    RowPosition,
    Window,
    answered,
    outcomes_of,
    output_line,
    places,
    windows,
)
from stillroom.verbs.annotate.parts import Job, changes
from stillroom.verbs.annotate.pool import OfflinePool
from stillroom.verbs.annotate.reader import STDIN, InputFile
from stillroom.verbs.annotate.rows import InputRow
from stillroom.verbs.annotate.workers import ctrl_c_kept

# The text of the first windows, and how long a window may take: each has up to twice the text of the one before, until it takes so long.
FIRST_CHARACTERS, WINDOW_S = 4096, 10.0
# Windows under computation while the next one is read and the one before is written.
WINDOWS_AHEAD = 2
# Rows between two updates of the bar while finished rows are compared.
COMPARED_ROWS = 10_000
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
        self.name = "standard output" if path == STDIN else str(path)
        self.lineage_path = path.parent / f"{path.name}.lineage.json"
        self.lasting = False
        self._real = Path(os.path.realpath(path))  # of a link its target is replaced, so that the link stays
        self._mended = self._real.with_name(f"{self._real.name}.mended")
        self._ours = False  # whether this run made the file
        self._left: list[int] = []  # descriptors of replaced files, whose locks are held until the end
        self._synced_s = time.monotonic()

    def __enter__(self) -> "AnswerFile":
        with self._full_disk_reported():
            if self.path == STDIN:
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
    def rewriting(self, kept_bytes: int) -> Iterator[None]:
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
            changed = changes(found, self.lineage)
            fault = f"was begun with {changed}" if changed else ""
        if fault:
            raise BadInput(
                f"{self.path} is there already and {fault}. Give another --output, or --restart to overwrite it"
            )
        self._cut_half_a_line()

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

    @contextlib.contextmanager
    def _full_disk_reported(self) -> Iterator[None]:
        """Turns the system's errors of writing the output into BadInput."""
        if_full = RESUME if self.lasting else "Make room"
        with disk_errors_reported(self.name, if_full=if_full, otherwise="give another file as --output"):
            try:
                yield
            except BrokenPipeError as error:
                raise BadInput(f"the reader of {self.name} closed it; the rest was not annotated") from error


class FileRun:
    """One run: the rows of `source`, what `pool` answers, and what was written of it to `output` so far."""

    def __init__(self, job: Job, source: InputFile, output: AnswerFile, pool: OfflinePool) -> None:
        self.job, self.source, self.output, self.pool = job, source, output, pool
        self.skips = job.bad_rows == "skip"
        self.bad = RowFaults(source.name, source.unit)
        self.rows_before = self.asked_again = self.rows = 0
        """Rows that were there already, those of them that had an error and were answered again, and new ones."""
        self.ours = ""
        """The message about the first row that failed by a fault of this program."""
        self.stopped = False
        self.seconds = 0.0
        self._window_characters: float = FIRST_CHARACTERS  # the text that the next window may have
        self._written_s = 0.0  # when the last window was written

    def answer(self) -> None:
        """Answers every row that the output does not hold yet, and the rows with an error that have changed since.

        Raises:
            BadInput, InternalError: as `annotate`.
        """
        found = places(self.source, self.output.lines(), self.output.name)
        first, kept_bytes = self._first_asked(found)
        if first is not None:
            with ctrl_c_kept() as stop_if_asked, self.pool, bar("annotate") as shown:
                began_s = self._written_s = time.monotonic()
                # Lines that are there are replaced, after the first `kept_bytes`; then lines are appended.
                for there, group in itertools.groupby(
                    itertools.chain([first], found), key=lambda place: place.line is not None
                ):
                    with self.output.rewriting(kept_bytes) if there else contextlib.nullcontext():
                        self._write_group(group, stop_if_asked, shown)
                    if self.stopped:
                        break
                self.seconds = time.monotonic() - began_s
        self._tell()

    def _first_asked(self, found: Iterator[RowPosition]) -> tuple[RowPosition | None, int]:
        """The first place that needs an answer, and the bytes of the lines before it."""
        kept_bytes = 0
        with bar("compare finished rows") as shown:
            for place in found:
                if place.asked:
                    return place, kept_bytes
                assert place.line is not None
                kept_bytes += len(place.line)
                self.rows_before += 1
                if self.rows_before % COMPARED_ROWS == 0:
                    self._show(shown, self.source.share_read())
        return None, kept_bytes

    def _write_group(self, group: Iterator[RowPosition], stop_if_asked: Callable[[], None], shown: Bar) -> None:
        """Writes the lines of places, up to a row without a line that stops the work."""

        def ask(rows: list[InputRow]) -> Callable[[], Sequence[Outcome]]:
            results = self.pool.submit([TextWork(row.text, row.pair, self.job.options) for row in rows])

            def outcomes() -> Sequence[Outcome]:
                stop_if_asked()
                return outcomes_of(results.result(), skips=self.skips)

            return outcomes

        read = windows(
            group,
            stops=not self.skips,
            most_characters=lambda: self._window_characters,
            share_read=self.source.share_read,
        )
        for window in answered(read, ask, WINDOWS_AHEAD):
            lines = self._lines_of(window)
            self.output.write(b"".join(lines))
            now_s = time.monotonic()
            in_time = window.characters * WINDOW_S / max(now_s - self._written_s, 1e-6)
            self._window_characters = max(FIRST_CHARACTERS, min(2 * self._window_characters, in_time, WINDOW_BYTES))
            self._written_s = now_s
            self._show(shown, window.share_read)
            if len(lines) < len(window.places):
                return

    def _lines_of(self, window: Window) -> list[bytes]:
        """The lines of a window, up to a row without a line that stops the work; a row with one keeps it."""
        if not self.skips:  # all that cannot be read, for the message
            for row in (place.row for place in window.places if place.asked):
                if row.fault is not None:
                    self.bad.add(row.line, row.fault)
        lines: list[bytes] = []
        for place, outcome in zip(window.places, window.outcomes, strict=True):
            row, line = place.row, place.line
            if isinstance(outcome, Failure):
                if outcome.ours:
                    self.ours = self.ours or f"{self.source.place(row.line)}: {outcome.message}"
                elif self.skips or not row.fault:
                    self.bad.add(row.line, outcome.message)
                self.stopped = self.stopped or outcome.ours or not self.skips
            if isinstance(outcome, bytes) or (isinstance(outcome, Failure) and self.skips and not outcome.ours):
                line = output_line(row, outcome, self.source.columns.answer)
            if line is None:
                break
            lines.append(line)
            self.rows += place.line is None
            self.rows_before += place.line is not None
            self.asked_again += place.line is not None and place.asked
        return lines

    def _show(self, shown: Bar, share_read: float | None) -> None:
        """Shows the rows done, and an estimate of all rows from the share of the file that was read."""
        done = self.rows_before + self.rows
        shown(done, None if share_read is None else max(done, round(done / max(share_read, 1e-9))))

    def _tell(self) -> None:
        """Prints which rows were bad. Raises BadInput if one stopped the work, InternalError if a fault of this program did."""
        if self.bad.count and self.skips:
            bad = counted(self.bad.count, "bad row has", "bad rows have")
            say(f"{bad} an error in place of an answer:\n{self.bad}")
        written = self.rows_before + self.rows
        there = f"{counted(written, 'row is', 'rows are')} in {self.output.name}"
        if self.ours:
            raise InternalError(
                f"{there}; the next row could not be answered. The fault is in this program or the bundle's model, not in the row:\n"
                f"  {self.ours}\nThe output of the worker process is above. Give the same command again to resume at this row."
            )
        if self.stopped:
            remedy = " and give the same command again to resume there" if written else ", --text-column or --format"
            raise BadInput(
                f"{there if written else 'Nothing was written'}; these rows cannot be used:\n{self.bad}\n"
                f"Correct these rows{remedy}; or give --bad-rows skip."
            )
