"""Processes that a test starts."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import psutil
from patience import PATIENCE_S


@contextmanager
def started(command: "Sequence[str | PathLike[str]]", **how: Any) -> Iterator["subprocess.Popen[Any]"]:
    """A process, with the arguments of `subprocess.Popen`. At the end of the block, also where the test fails, it has ended.

    If it still runs then, it is killed with all that it has started: otherwise the block would wait for it, or what is left would take
    the cores, ports and files of the tests after it.
    """
    with subprocess.Popen(command, **how) as process:
        try:
            yield process
        finally:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            for each in below:
                each.kill()
            left = psutil.wait_procs(below, timeout=PATIENCE_S)[1]
    assert not left
