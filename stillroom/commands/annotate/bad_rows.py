"""The rows of one input that cannot be answered, as a message lists them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from serve.errors import StillroomError
from stillroom.commands.annotate.rows import NOT_JSON

# Faults in the message, and rows named for each; with --bad-rows skip the output has all of them.
SHOWN_FAULTS, SHOWN_LINES = 20, 5


def fails_on_some(results: Iterable[object]) -> bool:
    """Whether a model that failed on some of the texts with these `results` did not on all; of one text nothing is known."""
    ours = [isinstance(result, StillroomError) and result.fault != "caller" for result in results]
    return len(ours) == 1 or not all(ours)


@dataclass
class _Alike:
    """Rows with the same fault."""

    fault: str
    lines: list[int] = field(default_factory=list)
    """The first SHOWN_LINES of them."""
    count: int = 0

    def add(self, line: int) -> None:
        self.count += 1
        if len(self.lines) < SHOWN_LINES:
            self.lines.append(line)


@dataclass
class BadRows:
    """How many rows of an input were bad, and the first of them."""

    count: int = 0
    faults: dict[str, _Alike] = field(default_factory=dict)

    def add(self, line: int, fault: str) -> None:
        """Counts the bad row at `line`."""
        self.count += 1
        kind = NOT_JSON if fault.startswith(NOT_JSON) else fault
        if kind in self.faults or len(self.faults) < SHOWN_FAULTS:
            self.faults.setdefault(kind, _Alike(fault)).add(line)

    def as_lines(self, places: Callable[[Sequence[int], int], str]) -> str:
        """A line per fault; `places` names the file and some rows of it, as `InputFile.places`."""
        shown = [f"  {places(each.lines, each.count)}: {each.fault}" for each in self.faults.values()]
        more = self.count - sum(each.count for each in self.faults.values())
        return "\n".join([*shown, *([f"  ... and {more:,} more"] if more else [])])
