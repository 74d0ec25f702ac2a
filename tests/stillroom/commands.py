"""The command in a process of its own, as its user types it; and a profile of it that takes a second."""

import subprocess
import sys
from pathlib import Path

QUICK = ("--seconds", "1", "--batches", "1", "--lengths", "8", "--threads", "1")


def stillroom(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What `stillroom ARGUMENTS` ended in."""
    command = [sys.executable, "-m", "stillroom", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
