"""Events that long work reports to its caller: messages, and the progress of a named piece of work. Nothing here prints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Event:
    """One report: a message, or a piece of work that has started, advanced or finished."""

    kind: Literal["message", "started", "advanced", "finished"]
    text: str  # the message, or the name of the work
    done: int = 0  # units of the work
    total: int | None = None  # None if unknown
    note: str = ""  # further text to show, such as the loss

    def __str__(self) -> str:
        if self.kind != "advanced":
            return self.text if self.kind == "message" else f"{self.text}: {self.kind}"
        counted = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return f"{self.text}: {counted}{', ' + self.note if self.note else ''}"


Notify = Callable[[Event], None]  # `print` is one


def silent(event: Event) -> None:
    """Reports nothing."""


def message(notify: Notify, text: str) -> None:
    """Report one message."""
    notify(Event("message", text))


class Advance:
    """Reports the progress of one piece of work."""

    def __init__(self, notify: Notify, work: str) -> None:
        self._notify, self._work = notify, work

    def __call__(self, done: int, total: int | None, note: str = "") -> None:
        """`done` units of `total` are finished."""
        self._notify(Event("advanced", self._work, done, total, note))

    def step(self, done: int, steps: int, loss: float, tokens_per_s: float | None) -> None:
        """Report a training step; the training loop calls this form."""
        speed = "" if tokens_per_s is None else f", {tokens_per_s:,.0f} tokens/s"
        self(done, steps, f"loss {loss:.4f}{speed}")


@contextmanager
def advancing(notify: Notify, work: str) -> Iterator[Advance]:
    """Report the start of `work`, and its end, even after an error."""
    notify(Event("started", work))
    try:
        yield Advance(notify, work)
    finally:
        notify(Event("finished", work))
