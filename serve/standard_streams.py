"""The standard streams of a command: also where one of them was closed before it began, or loses its reader."""

import os
import sys
from typing import TextIO


def open_closed_streams() -> None:
    """Opens the null device in place of each standard stream that was closed at the start.

    Otherwise Python has none, and the next file or connection that is opened gets its number, to which libraries still write.
    """
    without_output = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))  # noqa: SIM115 - open as long as this process is
    if without_output:
        sys.stderr.write("stillroom: standard output is closed; what would be printed there is lost\n")


def drop_unwritten(stream: TextIO) -> None:
    """Puts the null device in place of the file of `stream`, whose reader has gone, so that its last flush at the exit does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
