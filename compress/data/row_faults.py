"""What is wrong with rows: each with its file, line and reason, all of them in one error."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve.errors import BadInput

SHOWN_FAULTS = 20
SHOWN_LINES = 5  # of one fault
MOST_FAULTS = 1_000  # after so many in one file it is read no further


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with the input: where it stands and why it cannot be used."""

    file: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{place}: {self.reason}"


class BadRows(BadInput):
    """Every fault found in the data, in one error; rows of one file with the same fault stand in one line of it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        alike: dict[tuple[str, str], list[Fault]] = {}
        for fault in faults:
            alike.setdefault((fault.file, fault.reason), []).append(fault)
        several = list(alike.values())
        shown = [f"  {_told(each)}" for each in several[:SHOWN_FAULTS]]
        if len(several) > SHOWN_FAULTS:
            shown.append(f"  ... and {sum(map(len, several[SHOWN_FAULTS:]))} more")
        count, these = ("1 fault", "it") if len(faults) == 1 else (f"{len(faults)} faults", "these")
        super().__init__(f"The data has {count}; nothing was done. Mend {these} and run again:\n" + "\n".join(shown))


def _told(alike: Sequence[Fault]) -> str:
    """One line for faults of one file and one reason."""
    first, lines = alike[0], [fault.line for fault in alike]
    if len(alike) == 1 or first.line is None:
        return str(first)
    named = ", ".join(map(str, lines[:SHOWN_LINES]))
    rest = f" and {len(lines) - SHOWN_LINES} more" if len(lines) > SHOWN_LINES else ""
    return f"{first.file}, lines {named}{rest}: {first.reason}"


class UnreadableFrom(BadRows):
    """A file that is read no further than the line of its fault: it is not UTF-8 there, or has too many faults."""


def note(faults: list[Fault], fault: Fault) -> None:
    """Keep `fault` for the end of the file, or give the file up: one larger than memory may have a fault in every row.

    Raises:
        UnreadableFrom: the file has too many; `faults` holds them all, and the error says no more than that.
    """
    faults.append(fault)
    if len(faults) == MOST_FAULTS:
        reason = f"was read no further than line {fault.line}, its {MOST_FAULTS}th fault"
        raise UnreadableFrom([Fault(fault.file, None, reason)])
