"""The command `stillroom`, as its user types it."""

import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from stillroom.cli.main import app, guarded

Done = subprocess.CompletedProcess[str]


def stillroom(*arguments: str | Path, **kwargs: object) -> Done:
    """The command in a process of its own, which takes seconds to load: for tests of what a process does."""
    command = [sys.executable, "-m", "stillroom", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)  # type: ignore[call-overload,no-any-return]


def here(*arguments: str | Path) -> Done:
    """The command in this process."""
    command = ["stillroom", *map(str, arguments)]
    with patch.object(sys, "argv", command), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = guarded(app)
    return Done(command, code, out.getvalue(), err.getvalue())
