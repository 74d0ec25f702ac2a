"""Processes that work for this one, and end with it."""

import atexit
import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

T = TypeVar("T")

SPAWN = multiprocessing.get_context("spawn")  # a copy of this process would have its threads' locks

Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class ProcessDied(Exception):
    """The process that made a call has ended without an answer."""


class ChildProcesses:
    """Processes that make calls, started as they are needed; a context manager.

    One that dies fails the call that it made, and another one makes the next. All end at once when `end` is called, or this process
    ends, however that comes about. They never see Ctrl-C, which a terminal sends to all processes: this one ends them.

    `concurrent.futures` has a pool, but it waits for ever where a process dies while it writes an answer, and where Ctrl-C interrupts
    the main thread with one of the pool's locks. Here each process has a pipe and a thread of its own, which nothing waits for, and
    the main thread takes no lock but that of a `Future`.

    Args:
        begin: if given, called with `arguments` in each process before its first call.
        calls_a_process: after which a process is replaced; None: never.
    """

    def __init__(
        self,
        processes: int,
        begin: Callable[..., None] | None = None,
        arguments: tuple[Any, ...] = (),
        calls_a_process: int | None = None,
    ) -> None:
        self._most, self._begin, self._calls_a_process = processes, (begin, arguments), calls_a_process
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()  # None ends a thread
        self._idle: queue.SimpleQueue[None] = queue.SimpleQueue()  # an item for each thread that waits for a call
        self._threads = 0
        self._children: set[SpawnProcess] = set()
        self._starting = threading.Lock()
        # Only this process can write to the pipe, so whoever reads from it notices when it is closed here, or this process is gone.
        self._lifeline_end, self._lifeline = SPAWN.Pipe(duplex=False)
        atexit.register(self._lifeline.close)  # before `multiprocessing` waits for its processes

    def __enter__(self) -> "ChildProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Has a process call `function`. The future raises what that raises, or ProcessDied; it is cancelled by `end`."""
        future: Future[T] = Future()
        try:
            self._idle.get_nowait()
        except queue.Empty:
            if self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._make_calls, daemon=True).start()
        self._calls.put((future, function, arguments))
        return future

    def end(self, *, wait: bool = True) -> None:
        """Ends the processes at once, whatever they do; with `wait`, returns when they have ended."""
        atexit.unregister(self._lifeline.close)
        self._lifeline.close()
        with contextlib.suppress(queue.Empty):
            while call := self._calls.get_nowait():
                call[0].cancel()
        for _ in range(self._threads):
            self._calls.put(None)
        with self._starting:
            children = list(self._children)
        for child in children:
            child.kill()
        for child in children if wait else ():
            child.join()

    def _make_calls(self) -> None:
        """Has one process after another make the calls that come; in a thread."""
        child: tuple[SpawnProcess, Connection] | None = None
        made = 0
        while call := self._calls.get():
            future, *what = call
            if not future.set_running_or_notify_cancel():
                self._idle.put(None)
                continue
            error: BaseException | None
            try:
                child = child or self._start()
                child[1].send(what)
                error, result = child[1].recv()
            except (EOFError, OSError) as lost:
                error, result = ProcessDied(f"it ended without an answer ({lost or 'its pipe is closed'})"), None
            except Exception as unsendable:
                error, result = unsendable, None
            made += 1
            if child and (isinstance(error, ProcessDied) or made == self._calls_a_process):
                self._discard(*child)
                child, made = None, 0
            self._idle.put(None)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        if child:
            self._discard(*child)

    def _start(self) -> tuple[SpawnProcess, Connection]:
        ours, theirs = SPAWN.Pipe()
        child = SPAWN.Process(target=_answer_calls, args=(self._lifeline_end, theirs, *self._begin))
        with self._starting:
            # A process that starts now would first run the user's program again, which may lack `if __name__ == "__main__"`.
            program = vars(sys.modules["__main__"]).pop("__file__", None)
            try:
                child.start()
            finally:
                if program is not None:
                    vars(sys.modules["__main__"])["__file__"] = program
            self._children.add(child)
        theirs.close()  # so that reading from `ours` ends when the process does
        return child, ours

    def _discard(self, child: SpawnProcess, connection: Connection) -> None:
        connection.close()  # which ends it
        child.join()
        with self._starting:
            self._children.discard(child)


def _answer_calls(
    lifeline: Connection, connection: Connection, begin: Callable[..., None] | None, arguments: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    if begin:
        begin(*arguments)
    while True:
        try:
            function, given = connection.recv()
        except EOFError:
            return
        answer: tuple[BaseException | None, Any]
        try:
            answer = None, function(*given)
        except BaseException as error:
            error.add_note(traceback.format_exc())
            answer = error, None
        try:
            connection.send(answer)
        except OSError:
            return
        except Exception as error:  # it cannot be pickled
            connection.send((error, None))


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
