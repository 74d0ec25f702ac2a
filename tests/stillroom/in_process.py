"""The command of this process: loading torch again in another takes seconds."""

import io
import logging
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
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):  # of libraries that were loaded meanwhile
            if isinstance(handler, logging.StreamHandler) and handler.stream is err:
                handler.setStream(sys.stderr)
    printed, said = (text_of(stream) for stream in (out, err))
    assert "Traceback" not in said
    return Ended(code, printed, " ".join(said.split()))


def text_of(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
