"""Rows in, answers out: one way for a file that is answered here, and for whoever makes a part of many, on this machine or by Ray.

Rows are read in windows, which bounds memory, and batches texts of similar length. `answered` gives each window its outcomes; how the
texts are computed is the caller's. A file's go to the pool of processes behind it, which gives each what it has room for: its batches
depend on time, and the last bits of fp32 vectors depend on the batch. A part's are computed in its own process, batch by batch in an order
that its rows alone decide, so that parts can be compared by their bytes.
"""

import hashlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from compress.data.row_fields import SHOWN_FAULTS, SHOWN_LINES, faulty_rows
from serve.errors import BadInput, StillroomError
from stillroom.verbs.annotate.reader import InputFile
from stillroom.verbs.annotate.rows import NOT_JSON, InputRow

# The rows of a window are sorted by length; a window of long rows has fewer.
WINDOW_ROWS = 4096
WINDOW_BYTES = 8 * 2**20
ERROR_LINE = re.compile(rb'\{"error":\{"line":\d+,"row_sha256":"([0-9a-f]{64})",')
ROW_CHARACTERS = 8  # what a row costs beside its text: two tokens at its ends


class Failure(NamedTuple):
    """Why a row has no answer."""

    code: str
    message: str
    ours: bool = False
    """Whether the fault is of this program or the model, and stops the work."""


# The answer to a row as JSON, or why there is none.
Outcome = bytes | Failure


def output_line(row: InputRow, outcome: Outcome, field: str) -> bytes:
    """The line of a row in the output. That of an error has the SHA-256 of the row as it was read, to show whether it has changed."""
    if isinstance(outcome, bytes):
        return row.fields + _answer_opening(field) + outcome + b"}\n"
    error = {"line": row.line, "row_sha256": _row_sha256(row), "code": outcome.code, "message": outcome.message}
    return msgspec.json.encode({"error": error}) + b"\n"


def _answer_opening(field: str) -> bytes:
    """The JSON between a row's fields and the value of `field`, its answer."""
    return b"," + msgspec.json.encode(field) + b":"


def _row_sha256(row: InputRow) -> str:
    """The SHA-256 of the fields of a row, or of a row with a fault as it was read."""
    return hashlib.sha256(row.fields).hexdigest()


@dataclass
class _Alike:
    """Rows with the same fault: the first SHOWN_LINES of them, and how many there are."""

    fault: str
    lines: list[int] = field(default_factory=list)
    count: int = 0


@dataclass
class RowFaults:
    """How many rows of an input were bad, and the first of them. With --bad-rows skip the output has all of them.

    `name` is the input, and `unit` what a row is called: row or line.
    """

    name: str
    unit: str
    count: int = 0
    faults: dict[str, _Alike] = field(default_factory=dict)

    def add(self, line: int, fault: str) -> None:
        """Counts the bad row at `line`."""
        self.count += 1
        kind = NOT_JSON if fault.startswith(NOT_JSON) else fault
        if kind in self.faults or len(self.faults) < SHOWN_FAULTS:
            alike = self.faults.setdefault(kind, _Alike(fault))
            alike.count += 1
            if len(alike.lines) < SHOWN_LINES:
                alike.lines.append(line)

    def __str__(self) -> str:
        """A line for each fault, with the file and some of the rows."""
        alike = self.faults.values()
        shown = [f"  {faulty_rows(self.name, self.unit, each.lines, each.count, each.fault)}" for each in alike]
        more = self.count - sum(each.count for each in alike)
        return "\n".join([*shown, *([f"  ... and {more:,} more"] if more else [])])


class RowPosition(NamedTuple):
    """A row of the input, its line in the output if there is one, and whether the row needs an answer."""

    row: InputRow
    line: bytes | None = None
    asked: bool = True


def places(source: InputFile, lines: Iterable[bytes], output: str) -> Iterator[RowPosition]:
    """A place for each row of `source`, in order: first those of the `lines` that are in `output` already.

    A row with an error is asked again once it is another than the one that the error line has the digest of.

    Raises:
        BadInput: a line is the answer to another row.
    """
    rows, closing = source.rows(), _answer_opening(source.columns.answer)
    for number, line in enumerate(lines, 1):
        row = next(rows, None)
        if row and not row.fault and line.startswith(row.fields + closing):
            yield RowPosition(row, line, asked=False)
        elif row and (error := ERROR_LINE.match(line)):
            yield RowPosition(row, line, asked=error[1].decode() != _row_sha256(row))
        else:
            which = f"row {number:,}" + (f" ({source.unit} {row.line:,})" if row else ", which does not exist,")
            raise BadInput(
                f"line {number:,} of {output} is not the answer to {which} of {source.name}: one of the files was "
                "changed. Give the original input, another --output, or --restart to overwrite the output"
            )
    yield from map(RowPosition, rows)


@dataclass
class Window:
    """Rows in order, the indices of those that are computed, and what came of each: None of those that are not asked."""

    places: list[RowPosition]
    computed: list[int]
    characters: int = 0
    share_read: float | None = None
    outcomes: list[Outcome | None] = field(default_factory=list)


# Begins to answer rows. What it returns gives their outcomes, and waits for them.
Ask = Callable[[list[InputRow]], Callable[[], Sequence[Outcome]]]


def windows(
    places: Iterable[RowPosition],
    *,
    stops: bool,
    most_characters: Callable[[], float] = lambda: math.inf,
    share_read: Callable[[], float | None] = lambda: None,
) -> Iterator[Window]:
    """The places in windows. Where bad rows stop the work, the window of a bad row that has no line yet is the last one.

    That one goes on behind the bad row, for the message to name further ones, but nothing behind it is computed.
    """
    held: list[RowPosition] = []
    held_bytes = characters = 0
    computed: list[int] = []
    bad = ends = False
    for place in places:
        row = place.row
        if place.asked and row.fault is None and not ends:
            computed.append(len(held))
        bad = bad or (stops and place.asked and row.fault is not None)
        ends = ends or (bad and place.line is None)
        held.append(place)
        held_bytes += len(row.fields) + len(place.line or b"")
        characters += place.asked * (ROW_CHARACTERS + len(row.text) + len(row.pair or ""))
        enough = characters >= most_characters() and not bad
        if enough or len(held) >= WINDOW_ROWS or held_bytes >= WINDOW_BYTES:
            yield Window(held, computed, characters, share_read())
            if ends:
                return
            held, computed, held_bytes, characters = [], [], 0, 0
    if held:
        yield Window(held, computed, characters, share_read())


def answered(found: Iterable[Window], ask: Ask, ahead: int = 0) -> Iterator[Window]:
    """The windows with their outcomes; `ahead` more are read and asked about before those of the first are waited for."""
    waiting: deque[tuple[Window, Callable[[], Sequence[Outcome]]]] = deque()

    def first() -> Window:
        window, outcomes = waiting.popleft()
        window.outcomes = [
            Failure("bad_row", place.row.fault) if place.asked and place.row.fault is not None else None
            for place in window.places
        ]
        for index, outcome in zip(window.computed, outcomes(), strict=True):
            window.outcomes[index] = outcome
        return window

    for window in found:
        waiting.append((window, ask([window.places[index].row for index in window.computed])))
        if len(waiting) > ahead:
            yield first()
    while waiting:
        yield first()


def outcomes_of(results: Iterable[bytes | StillroomError], *, skips: bool) -> list[Outcome]:
    """The outcomes of texts that were answered together. Where bad rows are skipped, so are texts on which the model fails.

    But not where it fails on all of them; of a single text nothing is known.
    """
    results = list(results)
    ours = [isinstance(result, StillroomError) and result.fault != "caller" for result in results]
    passes = skips and (len(ours) == 1 or not all(ours))
    return [
        Failure(result.code, result.message, mine and not passes) if isinstance(result, StillroomError) else result
        for result, mine in zip(results, ours, strict=True)
    ]
