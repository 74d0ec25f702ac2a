"""All faults of an input, in one message."""

from collections.abc import Callable
from typing import TypeVar

from serve.errors import BadInput

T = TypeVar("T")


class Faults:
    """Collects the messages of checks that fail, so that a person can fix all of them at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def check(self, call: Callable[[], T]) -> T | None:
        """The result of `call`; None if it raised `BadInput`, whose message is kept."""
        try:
            return call()
        except BadInput as fault:
            self.messages.append(fault.message)
            return None

    def raise_if_any(self) -> None:
        """Raise the faults, if there are any.

        Raises:
            BadInput: one message with all of the faults.
        """
        messages = list(dict.fromkeys(self.messages))  # two checks may find the same fault
        if len(messages) == 1:
            raise BadInput(messages[0])
        if messages:
            listed = "\n".join(f"{i}. {message}" for i, message in enumerate(messages, 1))
            raise BadInput(f"{len(messages)} faults were found; nothing was done.\n{listed}")
