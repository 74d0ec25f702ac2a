"""The standard streams of a command: also where one of them was closed before it began, or loses its reader."""

import os
import select
import sys
from typing import TextIO


def open_closed_streams() -> None:
    """Opens the null device in place of each standard stream that was closed at the start.

    Otherwise Python has none, and the next file or connection that is opened gets its number, to which libraries still write.
    """
    without_output = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)  # a process that this one starts writes to that number, too
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115 - open as long as this process is
    if without_output:
        sys.stderr.write("stillroom: standard output is closed; what would be printed there is lost\n")


def reader_gone(stream: TextIO) -> bool:
    """Whether what is written to `stream` cannot be read any more, since the other end of its pipe or connection is closed."""
    polled = select.poll()
    try:
        polled.register(stream.fileno(), 0)
    except (OSError, ValueError):  # it has no file, or that is closed
        return False
    return bool(polled.poll(0))  # asked for nothing, it tells errors and hang-ups


def drop_unwritten(stream: TextIO) -> None:
    """Puts the null device in place of the file of `stream`, whose reader has gone, so that its last flush at the exit does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
