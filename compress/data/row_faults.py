"""Faults of rows: each has a file, a line and a reason, and one error lists all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve.errors import BadInput
from serve.wording import counted

SHOWN_FAULTS = 20
SHOWN_LINES = 5  # per fault
MOST_FAULTS = 1_000  # a file with so many is not read further


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the input: its file, its line, and why it cannot be used."""

    file: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{place}: {self.reason}"


class BadRows(BadInput):
    """Every fault found in the data, in one error; rows of one file with the same fault share one line."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        alike: dict[tuple[str, str], list[Fault]] = {}
        for fault in faults:
            alike.setdefault((fault.file, fault.reason), []).append(fault)
        several = list(alike.values())
        shown = [f"  {_line_of(each)}" for each in several[:SHOWN_FAULTS]]
        if len(several) > SHOWN_FAULTS:
            shown.append(f"  ... and {sum(map(len, several[SHOWN_FAULTS:]))} more")
        these = "it" if len(faults) == 1 else "them"
        super().__init__(
            f"The data has {counted(len(faults), 'fault')}; nothing was done. Correct {these} and run again:\n"
            + "\n".join(shown)
        )


def _line_of(alike: Sequence[Fault]) -> str:
    """One line for faults of one file and one reason."""
    first, lines = alike[0], [fault.line for fault in alike]
    if first.line is None:
        return str(first)
    return faulty_rows(first.file, "line", lines[:SHOWN_LINES], len(alike), first.reason)


def faulty_rows(file: str, unit: str, shown: Sequence[int | None], count: int, reason: str) -> str:
    """One line for `count` rows of `file` with the same fault, each called a `unit`; `shown` are the places of the first."""
    rest = f" and {count - len(shown):,} more" if count > len(shown) else ""
    return f"{file}, {unit}{'s' * (count != 1)} {', '.join(map(str, shown))}{rest}: {reason}"


class UnreadableFrom(BadRows):
    """Reading of a file stopped at the line of its fault: it is not UTF-8 there, a line is too long, or there are too many faults."""


def note(faults: list[Fault], fault: Fault) -> None:
    """Add `fault`, and stop reading the file after `MOST_FAULTS`: a file larger than memory may have a fault in every row.

    Raises:
        UnreadableFrom: the file has too many; the error says only this, and `faults` holds all of them.
    """
    faults.append(fault)
    if len(faults) == MOST_FAULTS:
        reason = f"was read only up to line {fault.line}, which has fault number {MOST_FAULTS:,}"
        raise UnreadableFrom([Fault(fault.file, None, reason)])
