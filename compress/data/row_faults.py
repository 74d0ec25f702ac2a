"""What is wrong with rows: each with its file, line and reason, all of them in one error."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve.errors import BadInput

SHOWN_FAULTS = 20
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
    """Every fault found in the data, in one error."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        shown = [f"  {fault}" for fault in faults[:SHOWN_FAULTS]]
        if len(faults) > SHOWN_FAULTS:
            shown.append(f"  ... and {len(faults) - SHOWN_FAULTS} more")
        count, these = ("1 fault", "it") if len(faults) == 1 else (f"{len(faults)} faults", "these")
        super().__init__(f"The data has {count}; nothing was done. Mend {these} and run again:\n" + "\n".join(shown))


class NotText(BadRows):
    """A file that is not UTF-8, told of its first line that is not: what comes after it cannot be read either."""


def note(faults: list[Fault], fault: Fault) -> None:
    """Keep `fault` for the end of the file, or give the file up: one larger than memory may have a fault in every row."""
    faults.append(fault)
    if len(faults) == MOST_FAULTS:
        raise BadRows(
            [Fault(fault.file, None, f"was read no further than line {fault.line}, its {MOST_FAULTS}th fault"), *faults]
        )
