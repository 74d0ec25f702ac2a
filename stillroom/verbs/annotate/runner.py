"""`stillroom annotate`: a bundle's answers to a file of any size, in the file's order, on all cores.

Rows are read in windows of up to a few thousand, which bounds memory and batches texts of similar length. A window is written when
all its answers are there, so the output always holds whole rows in order, and the next run resumes after the last of them. The first
windows are small, so that a run that is killed every few seconds gets on.
"""

import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve.errors import BadInput, InternalError, StillroomError
from serve.tasks import open_bundle, task_of
from serve.text.inputs import TextWork
from serve.wording import counted
from serve.workers.offline_pool import OfflinePool, Result
from stillroom.console import Bar, bar, say
from stillroom.verbs.annotate import Annotation
from stillroom.verbs.annotate.checks import checked
from stillroom.verbs.annotate.ctrl_c import ctrl_c_kept
from stillroom.verbs.annotate.reader import InputFile
from stillroom.verbs.annotate.rows import PAIR, RowFaults, fails_on_some
from stillroom.verbs.annotate.tables import ARRAY, ERROR, SUFFIXES, TABLE, rows_beside, write_array, write_table
from stillroom.verbs.annotate.writer import AnswerFile, Place, answer_opening, error_line, places

# The rows of a window are sorted by length; a window of long rows has fewer.
WINDOW_ROWS = 4096
WINDOW_BYTES = 8 * 2**20
# The text of the first windows, and how long a window may take: each has up to twice the text of the one before, until it takes so long.
FIRST_CHARACTERS, WINDOW_S = 4096, 10.0
ROW_CHARACTERS = 8  # what a row costs beside its text: two tokens at its ends
# Windows under computation while the next one is read and the one before is written.
WINDOWS_AHEAD = 2
# Rows between two updates of the bar while finished rows are compared.
COMPARED_ROWS = 10_000


@dataclass
class _Window:
    """Rows in order, and the indices of those that are computed."""

    places: list[Place]
    share_read: float | None
    computed: list[int]
    characters: int
    results: "Future[list[Result]]" = field(default_factory=Future)


@dataclass
class _Tally:
    """The rows written so far, and the bad ones."""

    rows_before: int = 0
    """Rows that were there already."""
    asked_again: int = 0
    """Rows of these that had an error and were answered again."""
    rows: int = 0
    bad: RowFaults = field(default_factory=RowFaults)
    ours: str | None = None
    """The message about the first row that failed by a fault of this program."""
    stopped: bool = False


@dataclass
class _Job:
    """A run of `annotate`: its settings, input, output, processes and progress."""

    settings: Annotation
    source: InputFile
    output: AnswerFile
    pool: OfflinePool
    tally: _Tally
    shown: Bar
    stop_if_asked: Callable[[], None]
    window_characters: float = FIRST_CHARACTERS
    """The text that the next window may have."""
    written_s: float = field(default_factory=time.monotonic)
    """When the last window was written."""

    def show(self, share_read: float | None) -> None:
        """Shows the rows done, and an estimate of all rows from the share of the file that was read."""
        done = self.tally.rows_before + self.tally.rows
        self.shown(done, None if share_read is None else max(done, round(done / max(share_read, 1e-9))))


def annotate(settings: Annotation) -> dict[str, Any]:
    """Answer every row that the output does not hold yet, and the rows with an error that have changed since.

    Returns `input`, `output`, `model`, `variant`, `digest`, `rows` (in the output now), `rows_before` (in it at the start),
    `rows_asked_again` (of these, the rows with an error that were answered again), `bad_rows` (of this run), `seconds`,
    `texts_per_s` (None where no row needed an answer), `processes` and `threads`. An output that ends in `.parquet` or `.npy` is a table,
    or an array of vectors, made of the lines in a file beside it once all are there.

    Raises:
        BadInput: a fault of the settings, the bundle or the input, before a row is read; with `bad_rows` "stop" a bad row, once all
            rows before it are written; an output with other answers, a full disk, or a closed pipe.
        InternalError: the model failed on a row, with `bad_rows` "skip" on every row of a window, once all rows before it are written;
            or the worker processes died repeatedly.
    """
    if Path(settings.output).suffix in SUFFIXES:
        return _as_table(settings)
    tally, seconds = _Tally(), 0.0
    with contextlib.ExitStack() as opened:
        pool, source = checked(settings, opened)
        output = opened.enter_context(
            AnswerFile(Path(settings.output), _lineage(settings, pool), restart=settings.restart)
        )
        found = places(source, output)
        first, kept_bytes = _first_asked(found, source, tally)
        if first is not None:
            with ctrl_c_kept() as stop_if_asked, pool, bar("annotate") as shown:
                began_s = time.monotonic()
                job = _Job(settings, source, output, pool, tally, shown, stop_if_asked)
                _write_from(itertools.chain([first], found), kept_bytes, job)
                seconds = time.monotonic() - began_s
        _tell(tally, settings, output.name, source)
    asked = tally.rows + tally.asked_again
    return {
        "input": source.name,
        "output": output.name,
        "model": pool.manifest.name,
        "variant": pool.variant,
        "digest": pool.manifest.digest,
        "rows": tally.rows_before + tally.rows,
        "rows_before": tally.rows_before,
        "rows_asked_again": tally.asked_again,
        "bad_rows": tally.bad.count,
        "seconds": seconds,
        "texts_per_s": asked / seconds if asked else None,
        "processes": pool.processes,
        "threads": pool.threads,
    }


def _as_table(settings: Annotation) -> dict[str, Any]:
    """`annotate` with the answers as a table: first as lines in a file beside it, then from these."""
    out = Path(settings.output)
    rows = rows_beside(out)
    if settings.answer_field == ERROR and out.suffix == TABLE:
        raise BadInput(f"--field {ERROR} is the column of errors in a {TABLE} file; give another name")
    manifest = open_bundle(settings.bundle).manifest
    kind = task_of(manifest).answer_kind(manifest.labels)
    if out.suffix == ARRAY and not manifest.vector_width:
        raise BadInput(
            f"--output {out} is an array of vectors, and {manifest.name!r} gives {kind}; give a name that ends in .jsonl or {TABLE}"
        )
    options = settings.options
    if manifest.vector_width:
        options = dataclasses.replace(options, encoding_format="base64")
    document = annotate(dataclasses.replace(settings, output=rows, options=options))
    say(f"writing {out}")
    if out.suffix == ARRAY:
        width = options.dimensions or manifest.vector_width
        write_array(rows, out, settings.answer_field, width, document["rows"])
    else:
        write_table(rows, out, settings.answer_field, manifest, Path(settings.input))
    return document | {"output": str(out)}


def _lineage(settings: Annotation, pool: OfflinePool) -> dict[str, Any]:
    """What decides the answers: a run resumes only in an output with the same lineage."""
    return {
        "bundle": pool.manifest.digest,
        "variant": pool.variant,
        "threads": pool.threads,
        "text_column": settings.text_column,
        # Left out under their usual values, so that outputs from before these settings can be resumed.
        **({} if settings.text_pair_column == PAIR else {"text_pair_column": settings.text_pair_column}),
        **({} if settings.device == "cpu" else {"device": settings.device}),
        "field": settings.answer_field,
        **dataclasses.asdict(settings.options),
    }


def _first_asked(found: Iterator[Place], source: InputFile, tally: _Tally) -> tuple[Place | None, int]:
    """The first place that needs an answer, and the bytes of the lines before it."""
    kept_bytes = 0
    with bar("compare finished rows") as shown:
        for place in found:
            if place.asked:
                return place, kept_bytes
            assert place.line is not None
            kept_bytes += len(place.line)
            tally.rows_before += 1
            if tally.rows_before % COMPARED_ROWS == 0:
                share = source.share_read()
                shown(tally.rows_before, None if share is None else round(tally.rows_before / max(share, 1e-9)))
    return None, kept_bytes


def _write_from(found: Iterator[Place], kept_bytes: int, job: _Job) -> None:
    """Writes all places of `found`: replaces lines that are there, after the first `kept_bytes`, then appends."""
    for there, group in itertools.groupby(found, key=lambda place: place.line is not None):
        with job.output.mending(kept_bytes) if there else contextlib.nullcontext():
            _answer(_windows(group, job), job)
        if job.tally.stopped:
            return


def _windows(found: Iterable[Place], job: _Job) -> Iterator[_Window]:
    """The places in windows. Where bad rows stop the work, the window of a bad row is the last to be appended."""
    held: list[Place] = []
    held_bytes = characters = 0
    stops = job.settings.bad_rows == "stop"
    for place in found:
        held.append(place)
        held_bytes += len(place.row.fields) + len(place.line or b"")
        characters += place.asked * (ROW_CHARACTERS + len(place.row.text) + len(place.row.pair or ""))
        if stops and place.asked and place.row.fault is not None:  # later ones of the window, too, for the message
            job.tally.bad.add(place.row.line, place.row.fault)
        enough = characters >= job.window_characters and not (stops and job.tally.bad.count)
        if enough or len(held) >= WINDOW_ROWS or held_bytes >= WINDOW_BYTES:
            yield _window(held, characters, job)
            if job.tally.bad.count and stops and place.line is None:
                return
            held, held_bytes, characters = [], 0, 0
    if held:
        yield _window(held, characters, job)


def _window(held: list[Place], characters: int, job: _Job) -> _Window:
    computed = []
    for index, place in enumerate(held):
        if place.asked and place.row.fault is None:
            computed.append(index)
        elif place.asked and place.line is None and job.settings.bad_rows == "stop":
            break  # nothing behind this row is written
    return _Window(held, job.source.share_read(), computed, characters)


def _answer(windows: Iterator[_Window], job: _Job) -> None:
    """Computes the windows and writes them in order; returns early at a row that stops the work."""
    waiting: deque[_Window] = deque()
    for window in windows:
        rows = [window.places[index].row for index in window.computed]
        window.results = job.pool.submit([TextWork(row.text, row.pair, job.settings.options) for row in rows])
        waiting.append(window)
        if len(waiting) > WINDOWS_AHEAD and not _write(waiting.popleft(), job):
            return
    while waiting:
        if not _write(waiting.popleft(), job):
            return


def _write(window: _Window, job: _Job) -> bool:
    """Writes a window once it is computed. False if a row stopped the work; the window is written up to that row."""
    job.stop_if_asked()
    results: dict[int, Result] = dict(zip(window.computed, window.results.result(), strict=True))
    passes = job.settings.bad_rows == "skip" and fails_on_some(results.values())
    lines: list[bytes] = []
    whole = True
    for index, place in enumerate(window.places):
        line = _line_of(place, results.get(index), job, passes=passes) if place.asked else place.line
        if line is None:
            whole = False
            break
        lines.append(line)
        if place.line is None:
            job.tally.rows += 1
        else:
            job.tally.rows_before += 1
            job.tally.asked_again += place.asked
    job.output.write(b"".join(lines))
    now_s = time.monotonic()
    in_time = window.characters * WINDOW_S / max(now_s - job.written_s, 1e-6)
    job.window_characters = max(FIRST_CHARACTERS, min(2 * job.window_characters, in_time, WINDOW_BYTES))
    job.written_s = now_s
    job.show(window.share_read)
    return whole


def _line_of(place: Place, result: Result | None, job: _Job, *, passes: bool) -> bytes | None:
    """The new line of a row. If the row stops the work: its old line, so that the next run answers it again, or None.

    `passes`: a row on which the model failed does not stop it.
    """
    row, tally = place.row, job.tally
    if isinstance(result, bytes):
        return row.fields + answer_opening(job.settings.answer_field) + result + b"}\n"
    stops, where = job.settings.bad_rows == "stop", job.source.place(row.line)
    code, message = "bad_row", row.fault or ""
    if isinstance(result, StillroomError):
        code, message = result.code, result.message
        if result.fault != "caller" and not passes:
            tally.ours = tally.ours or f"{where}: {message}"
            tally.stopped = True
            return place.line
    if not (stops and row.fault):  # such a row is counted already
        tally.bad.add(row.line, message)
    if stops:
        tally.stopped = True
        return place.line
    return error_line(row, code, message)


def _tell(tally: _Tally, settings: Annotation, output: str, source: InputFile) -> None:
    """Prints which rows were bad. Raises BadInput if one stopped the work, InternalError if a fault of this program did."""
    if tally.bad.count and settings.bad_rows == "skip":
        bad = counted(tally.bad.count, "bad row has", "bad rows have")
        say(f"{bad} an error in place of an answer:\n{tally.bad.as_lines(source.name, source.unit)}")
    written = tally.rows_before + tally.rows
    there = f"{counted(written, 'row is', 'rows are')} in {output}"
    if tally.ours:
        raise InternalError(
            f"{there}; the next row could not be answered. The fault is in this program or the bundle's model, not in the row:\n"
            f"  {tally.ours}\nThe output of the worker process is above. Give the same command again to resume at this row."
        )
    if tally.stopped and not written:
        raise BadInput(
            f"Nothing was written; these rows cannot be used:\n{tally.bad.as_lines(source.name, source.unit)}\n"
            "Correct these rows, --text-column or --format; or give --bad-rows skip."
        )
    if tally.stopped:
        raise BadInput(
            f"{there}; these rows cannot be used:\n{tally.bad.as_lines(source.name, source.unit)}\n"
            "Correct these rows and give the same command again to resume there; or give --bad-rows skip."
        )


def summary(document: dict[str, Any]) -> Sequence[str]:
    """The lines that end a run."""
    if document["texts_per_s"] is None:
        rows = document["rows"]
        if not rows:
            return [f"{document['input']} has no rows; nothing was done."]
        answers = "the answer to its 1 row" if rows == 1 else f"the answers to all {rows:,} rows"
        return [f"{document['output']} holds {answers} already; nothing was done."]
    done = document["rows"] - document["rows_before"]
    count, again = document["processes"], document["rows_asked_again"]
    processes = counted(count, "process", "processes")
    before = f" after {document['rows_before']:,} that were there" if document["rows_before"] else ""
    mended = f", {again:,} of which had an error and {'was' if again == 1 else 'were'} answered again" if again else ""
    return [
        f"{counted(done, 'row')}{before}{mended} by {document['model']} ({document['variant']}) in "
        f"{document['seconds']:.1f} s: {document['texts_per_s']:,.0f} texts/s on {processes}. Output {document['output']}"
    ]
