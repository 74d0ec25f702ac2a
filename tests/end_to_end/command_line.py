"""The command `stillroom`, as its user types it."""

import subprocess
import sys
from pathlib import Path

import in_process

Done = subprocess.CompletedProcess[str]


def stillroom(*arguments: str | Path, **kwargs: object) -> Done:
    """The command in a process of its own, which takes seconds to load: for tests of what a process does."""
    command = [sys.executable, "-m", "stillroom", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)  # type: ignore[call-overload,no-any-return]


def here(*arguments: str | Path) -> Done:
    """The command in this process; its messages are one line."""
    ended = in_process.command(*arguments)
    return Done(arguments, ended.code, ended.out, ended.said)
