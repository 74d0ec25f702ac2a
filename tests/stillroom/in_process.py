"""The command of this process: loading torch again in another takes seconds."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from stillroom.cli.main import app, guarded
from stillroom.console import console


class Ended(NamedTuple):
    """What a command ended in."""

    code: int
    out: str
    said: str  # on stderr, as one line


def command(*arguments: object) -> Ended:
    """What `stillroom ARGUMENTS` ends in."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    argv = patch.object(sys, "argv", ["stillroom", *map(str, arguments)])
    with redirect_stdout(out), redirect_stderr(err), argv, patch.object(console, "quiet", False):
        code = guarded(app)
    printed, said = (text_of(stream) for stream in (out, err))
    assert "Traceback" not in said
    return Ended(code, printed, " ".join(said.split()))


def text_of(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
