"""Processes that work for this one, and end with it."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")

SPAWN = multiprocessing.get_context("spawn")  # a copy of this process would have its threads' locks


class ChildProcesses(ProcessPoolExecutor):
    """A pool whose processes end at once when `end` is called, or this process ends, however that comes about.

    They never see Ctrl-C, which a terminal sends to all processes: this one ends them.

    Args:
        begin: if given, called with `arguments` in each process before its first task.
        tasks_a_process: after which a process is replaced; None: never.
    """

    def __init__(
        self,
        processes: int,
        begin: Callable[..., None] | None = None,
        arguments: tuple[Any, ...] = (),
        tasks_a_process: int | None = None,
    ) -> None:
        # Only this process can write to the pipe, so whoever reads from it notices when it is closed here, or this process is gone.
        reader, self._lifeline = SPAWN.Pipe(duplex=False)
        super().__init__(processes, SPAWN, _begin, (reader, begin, arguments), max_tasks_per_child=tasks_a_process)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """As `ProcessPoolExecutor.submit`."""
        # A process that starts now would first run the user's program again, which may lack `if __name__ == "__main__"`.
        program = vars(sys.modules["__main__"]).pop("__file__", None)
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            if program is not None:
                vars(sys.modules["__main__"])["__file__"] = program

    def end(self, *, wait: bool = True) -> None:
        """Ends the processes at once, whatever they do; with `wait`, returns when they have ended."""
        self._lifeline.close()
        self.shutdown(wait=wait, cancel_futures=True)


def _begin(lifeline: Connection, begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    if begin:
        begin(*arguments)


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
