"""`stillroom annotate`: a bundle's answers to a file of any size, in the file's order, with every core at work.

Rows are read in windows of a few thousand, which bounds memory and lets texts of like length be computed together. A window is
written at once when all its answers are there, so that whatever happens the output holds whole rows in order, and the next
run goes on after the last of them.
"""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve.bundle.manifest import Task
from serve.errors import BadInput, StillroomError
from serve.http.v1.requests import ClassifyRequest, EntitiesRequest
from serve.model.work_items import TextWork
from serve.text.answers import AnswerOptions
from serve.workers.offline_pool import OfflinePool, Result
from stillroom.commands.annotate.reader import STDIN, InputFile, InputRow
from stillroom.commands.annotate.writer import STDOUT, AnswerFile
from stillroom.console import Bar, bar, say
from stillroom.settings.annotate import Annotation

# Rows that are sorted by length together; or fewer, when they are long.
WINDOW_ROWS = 4096
WINDOW_BYTES = 8 * 2**20
# Windows that are computed while the next is read and the one before is written.
WINDOWS_AHEAD = 2
# Bad rows that are told one by one; the output has all of them.
SHOWN_FAULTS = 20
# Rows between two looks at the clock while finished rows are compared.
COMPARED_ROWS = 10_000

REQUEST_OF: dict[Task, type[msgspec.Struct]] = {
    "token-classification": EntitiesRequest,
    "text-classification": ClassifyRequest,
}


@dataclass
class _Window:
    """Rows in order, and where among them those stand that are computed."""

    rows: list[InputRow]
    share_read: float | None
    computed: list[int] = field(default_factory=list)
    results: "Future[list[Result]]" = field(default_factory=Future)


@dataclass
class _Tally:
    """What was written so far, and which rows were bad."""

    rows_before: int = 0
    rows: int = 0
    bad_rows: int = 0
    faults: list[str] = field(default_factory=list)

    def bad(self, name: str, line: int, fault: str) -> None:
        """Counts a bad row."""
        self.bad_rows += 1
        if len(self.faults) < SHOWN_FAULTS:
            self.faults.append(f"  {name}, line {line}: {fault}")

    def as_lines(self) -> str:
        """The bad rows, a line each."""
        more = self.bad_rows - len(self.faults)
        return "\n".join([*self.faults, *([f"  ... and {more:,} more"] if more else [])])


def annotate(settings: Annotation) -> dict[str, Any]:
    """Answer every row of the input that the output does not hold yet; the document that `annotate --json` prints.

    Raises:
        BadInput: anything wrong with what was given; a bad row, with `bad_rows` "stop", once all before it are written; an
            output that holds other answers; no room, or nobody who reads any more.
        InternalError: the model's processes die again and again.
    """
    _refuse(settings)
    pool = OfflinePool(
        settings.bundle, variant=settings.variant, threads=settings.threads, processes=settings.processes
    )
    _refuse_options(settings.options, pool.manifest.task)
    lineage = {
        "bundle": pool.manifest.digest,
        "variant": pool.variant,
        "threads": pool.threads,
        "field": settings.answer_field,
        **dataclasses.asdict(settings.options),
    }
    tally, seconds = _Tally(), 0.0
    with (
        InputFile(settings.input, settings.format, answer_field=settings.answer_field) as source,
        AnswerFile(settings.output, lineage, restart=settings.restart) as output,
    ):
        rows = source.rows()
        tally.rows_before = _compared(rows, source, output, settings.answer_field)
        if (first := next(rows, None)) is not None:
            with pool, bar("annotate") as shown:
                began_s = time.monotonic()
                windows = _windows(itertools.chain([first], rows), source, settings, tally)
                _answer(windows, pool, settings, output, tally, shown)
                seconds = time.monotonic() - began_s
    written = tally.rows_before + tally.rows
    if tally.bad_rows and settings.bad_rows == "stop":
        raise BadInput(
            f"{written:,} {'row is' if written == 1 else 'rows are'} in {output.name}; the next cannot be used:\n{tally.as_lines()}\n"
            "Mend what is told and give the same command again, which goes on there; or give --bad-rows skip."
        )
    if tally.bad_rows:
        bad = "1 bad row has" if tally.bad_rows == 1 else f"{tally.bad_rows:,} bad rows have"
        say(f"{bad} an error in place of an answer:\n{tally.as_lines()}")
    return {
        "input": source.name,
        "output": output.name,
        "model": pool.manifest.name,
        "variant": pool.variant,
        "digest": pool.manifest.digest,
        "rows": tally.rows_before + tally.rows,
        "rows_before": tally.rows_before,
        "bad_rows": tally.bad_rows,
        "seconds": seconds,
        "texts_per_s": tally.rows / seconds if tally.rows else None,
        "processes": pool.processes,
        "threads": pool.threads,
    }


def _refuse(settings: Annotation) -> None:
    """BadInput when settings cannot go together."""
    if settings.bad_rows not in ("stop", "skip"):
        raise BadInput(f"--bad-rows {settings.bad_rows}: give stop or skip")
    for name, number in (("processes", settings.processes), ("threads", settings.threads)):
        if number is not None and number < 1:
            raise BadInput(f"--{name} {number}: give 1 or more, or leave it out for what fits the cores")
    given, out = settings.input, settings.output
    if given != STDIN and out != STDOUT and given.exists() and out.exists() and given.samefile(out):
        raise BadInput(f"--output {out} is the input itself; give another file")
    if out != STDOUT and not out.absolute().parent.is_dir():
        raise BadInput(f"--output {out}: there is no folder {out.absolute().parent}; make it first")


def _refuse_options(options: AnswerOptions, task: Task) -> None:
    """BadInput when an option is given that answers of this task do not heed."""
    heeded = REQUEST_OF[task].__struct_fields__
    for option in dataclasses.fields(options):
        if option.name not in heeded and getattr(options, option.name) != option.default:
            flag = option.name.replace("_", "-")
            raise BadInput(f"--{flag} means nothing to a model for {task}; leave it out", field=option.name)


def _compared(rows: Iterator[InputRow], source: InputFile, output: AnswerFile, answer_field: str) -> int:
    """How many rows the output holds, each of which is compared with the input's row in its place, which is thereby read.

    Raises:
        BadInput: it holds the answers to other rows.
    """
    count, closing = 0, b"," + msgspec.json.encode(answer_field) + b":"
    with bar("compare what is there") as shown:
        for count, line in enumerate(output.lines(), 1):
            row = next(rows, None)
            expected = _error_opening(row.line) if row else b""
            if row is None or not (
                line.startswith(expected) or (not row.fault and line.startswith(row.fields + closing))
            ):
                place = f"row {count:,}" + (f" (line {row.line:,})" if row else ", which it does not have")
                raise BadInput(
                    f"line {count:,} of {output.name} is not the answer to {place} of {source.name}: one of the two was "
                    "changed. Give the input that it was begun with, another --output, or --restart to begin it anew"
                )
            if count % COMPARED_ROWS == 0:
                _show(shown, count, source.share_read())
    return count


def _windows(rows: Iterator[InputRow], source: InputFile, settings: Annotation, tally: _Tally) -> Iterator[_Window]:
    """The rows in windows; the last one ends before a bad row, where bad rows stop the work."""
    held: list[InputRow] = []
    held_bytes = 0
    for row in rows:
        held.append(row)
        held_bytes += len(row.fields)
        if row.fault is not None:
            tally.bad(source.name, row.line, row.fault)
        if len(held) >= WINDOW_ROWS or held_bytes >= WINDOW_BYTES:
            yield _Window(held, source.share_read())
            if tally.bad_rows and settings.bad_rows == "stop":
                return
            held, held_bytes = [], 0
    if held:
        yield _Window(held, source.share_read())


def _answer(
    windows: Iterator[_Window],
    pool: OfflinePool,
    settings: Annotation,
    output: AnswerFile,
    tally: _Tally,
    shown: Bar,
) -> None:
    """Has the windows computed and writes them in order; returns early at a bad row that stops the work."""
    waiting: deque[_Window] = deque()
    for window in windows:
        window.computed = [place for place, row in enumerate(window.rows) if row.fault is None]
        chosen = [window.rows[place] for place in window.computed]
        window.results = pool.submit([TextWork(row.text, row.pair, settings.options) for row in chosen])
        waiting.append(window)
        if len(waiting) > WINDOWS_AHEAD and not _write(waiting.popleft(), settings, output, tally, shown):
            return
    while waiting:
        if not _write(waiting.popleft(), settings, output, tally, shown):
            return


def _write(window: _Window, settings: Annotation, output: AnswerFile, tally: _Tally, shown: Bar) -> bool:
    """Writes a window once it is computed; False when it was cut at a bad row, where the work stops."""
    results: dict[int, Result] = dict(zip(window.computed, window.results.result(), strict=True))
    ends = b"," + msgspec.json.encode(settings.answer_field) + b":"
    parts: list[bytes] = []
    whole = True
    for place, row in enumerate(window.rows):
        result = results.get(place)
        if isinstance(result, bytes):
            parts += (row.fields, ends, result, b"}\n")
            tally.rows += 1
            continue
        if isinstance(result, StillroomError):
            tally.bad(str(settings.input), row.line, result.message)
        if settings.bad_rows == "stop":
            whole = False
            break
        parts.append(_error_line(row, result))
        tally.rows += 1
    output.write(b"".join(parts))
    _show(shown, tally.rows_before + tally.rows, window.share_read)
    return whole


def _error_opening(line: int) -> bytes:
    """How the line begins that stands in the place of the bad row of `line`."""
    return b'{"error":{"line":%d,' % line


def _error_line(row: InputRow, result: object) -> bytes:
    code, message = "bad_row", row.fault
    if isinstance(result, StillroomError):
        code, message = result.code, result.message
    return _error_opening(row.line) + msgspec.json.encode({"code": code, "message": message})[1:] + b"}\n"


def _show(shown: Bar, rows: int, share_read: float | None) -> None:
    """Rows done, of about as many as the file will turn out to have."""
    shown(rows, None if share_read is None else max(rows, round(rows / max(share_read, 1e-9))))


def summary(document: dict[str, Any]) -> Sequence[str]:
    """What a person is told at the end."""
    if document["texts_per_s"] is None:
        rows = document["rows"]
        answers = "the answer to its 1 row" if rows == 1 else f"the answers to all {rows:,} rows"
        return [f"{document['output']} holds {answers} already; nothing was done."]
    done = document["rows"] - document["rows_before"]
    count = document["processes"]
    processes = "1 process" if count == 1 else f"{count} processes"
    before = f" after {document['rows_before']:,} that were there" if document["rows_before"] else ""
    return [
        f"{done:,} {'row' if done == 1 else 'rows'}{before} by {document['model']} ({document['variant']}) in {document['seconds']:.1f} s: "
        f"{document['texts_per_s']:,.0f} texts/s on {processes}. Output {document['output']}"
    ]
