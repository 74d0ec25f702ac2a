"""Processes that work for this one, and end with it."""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

T = TypeVar("T")

LEAVE_S = 10.0  # in which a process that has made its calls ends by itself

SPAWN = multiprocessing.get_context("spawn")  # a copy of this process would have its threads' locks
_starting = threading.Lock()  # for all pools: a start changes the main module for a moment

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
        self._ended = False
        # Only this process can write to the pipe, so whoever reads from it notices when it is closed here, or this process is gone.
        self._lifeline_end, self._lifeline = SPAWN.Pipe(duplex=False)
        atexit.register(self._lifeline.close)  # before `multiprocessing` waits for its processes

    def __enter__(self) -> "ChildProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Has a process call `function`. The future raises what that raises, or ProcessDied; it is cancelled by `end`, or after it."""
        future: Future[T] = Future()
        if self._ended:
            future.cancel()
            return future
        try:
            self._idle.get_nowait()
        except queue.Empty:
            if self._threads < self._most:
                threading.Thread(target=self._make_calls, daemon=True).start()
                self._threads += 1
        self._calls.put((future, function, arguments))
        return future

    def end(self, *, wait: bool = True) -> None:
        """Ends the processes at once, whatever they do; with `wait`, returns when they have ended."""
        self._ended = True
        atexit.unregister(self._lifeline.close)
        self._lifeline.close()
        with contextlib.suppress(queue.Empty):
            while call := self._calls.get_nowait():
                call[0].cancel()
        for _ in range(self._threads):
            self._calls.put(None)
        with _starting:
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
            lost = False
            try:
                child = child or self._start()
                child[1].send(what)
                error, result = child[1].recv()
            except (EOFError, OSError) as why:
                lost, result = True, None
                error = ProcessDied(f"it ended without an answer ({str(why) or 'its pipe is closed'})")
            except Exception as unsendable:
                error, result = unsendable, None
            made += 1
            if child and (lost or made == self._calls_a_process):
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
        main = sys.modules["__main__"]
        with _starting:
            if self._ended:
                raise EOFError("the pool has ended")
            # Else the process would run the user's program again, which may lack `if __name__ == "__main__"`.
            spec, main.__spec__ = getattr(main, "__spec__", None), ModuleSpec("__main__", None)
            try:
                child.start()
            finally:
                main.__spec__ = spec
            self._children.add(child)
        theirs.close()  # so that reading from `ours` ends when the process does
        return child, ours

    def _discard(self, child: SpawnProcess, connection: Connection) -> None:
        connection.close()  # which ends it
        child.join(LEAVE_S)
        child.kill()
        child.join()
        with _starting:
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
            call = connection.recv_bytes()
        except (EOFError, OSError):
            return
        answer: tuple[BaseException | None, Any]
        try:
            function, given = pickle.loads(call)  # noqa: S301 - from the process that started this one
            answer = None, function(*given)
        except BaseException as error:
            answer = _sendable(error), None
        try:
            connection.send(answer)
        except OSError:
            return
        except Exception as error:  # the result cannot be pickled
            connection.send((_sendable(error), None))


def _sendable(error: BaseException) -> BaseException:
    """`error` with its traceback as a note; or where it cannot be sent, another one that says all that it says."""
    said = "".join(traceback.format_exception(error))
    try:
        error.add_note(said)
        pickle.loads(pickle.dumps(error))  # noqa: S301 - of this process's own making
    except Exception:
        return RuntimeError(said)
    return error


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
