"""Hands parts to workers, one to each, and gives back what they made. A worker that dies is replaced, and its part is made again."""

import contextlib
import re
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import FrameType
from typing import Any, Protocol

from serve.bundle.cpu import settle_threads
from serve.errors import BadInput, InternalError, StillroomError
from stillroom.child_process import ChildProcesses, ProcessDied
from stillroom.console import say
from stillroom.verbs.annotate.annotator import Annotator, Ready
from stillroom.verbs.annotate.parts import Job, Part

# Items that were given to workers this often, and each of them died, are given up. So are workers that die so often at their start.
MOST_DEATHS = 3
# After this time without any worker the user is told.
PATIENCE_S = 30.0
# How often Ctrl-C is looked for while no worker answers.
LOOK_EVERY_S = 1.0


class Worker(Protocol):
    """A process that has an `Annotator`. The futures give what that gives, or the StillroomError that it raised."""

    def start(self) -> "Future[Any]":
        """Starts the process, or another one after it died. The future gives its `Ready`."""

    def submit(self, method: str, item: Any) -> "Future[Any]":
        """Calls a method of the `Annotator`."""

    def died(self, error: Exception) -> bool:
        """Whether the exception of a future says that its process died. Another one is a bug."""

    def end(self) -> None:
        """Ends the process at once."""


class WorkerGroup:
    """Workers, started when the first item comes; a context manager. `check` is called with each `Ready`, and may raise."""

    def __init__(self, workers: Sequence[Worker], check: Callable[[Ready], None] = lambda ready: None) -> None:
        self.workers, self._check = workers, check
        self._busy: dict[Future[Any], tuple[Worker, str, Any]] = {}
        self._idle: list[Worker] = []
        self._start_deaths = 0
        self._began_s: float | None = None  # when the wait for a first worker began; None while there is one

    def __enter__(self) -> "WorkerGroup":
        self._began_s = time.monotonic()
        for worker in self.workers:
            self._busy[worker.start()] = (worker, "", None)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()

    def results(
        self, method: str, items: Iterable[Any], waiting_for: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Any, Any]]:
        """Calls `method` with each item, one at a time in each worker. Yields each item with its result, as they come.

        After the first StillroomError no more items are begun; those under way are yielded before it is raised. `waiting_for` is called
        about every second.

        Raises:
            StillroomError: the first one of a worker.
            BadInput: workers died repeatedly at their start.
            InternalError: workers died repeatedly with the same item; or there is a bug.
        """
        left, deaths, fault = deque(items), Counter[Any](), None
        while (left and fault is None) or any(each for _, each, _ in self._busy.values()):
            while self._idle and left and fault is None:
                worker, item = self._idle.pop(), left.popleft()
                self._busy[worker.submit(method, item)] = (worker, method, item)
            done, _ = wait(self._busy, LOOK_EVERY_S, FIRST_COMPLETED)
            waiting_for()
            if self._began_s and time.monotonic() - self._began_s > PATIENCE_S:
                say(f"still waiting for one of {len(self.workers)} workers to start; perhaps no core is free")
                self._began_s = None
            for future in done:
                worker, asked, item = self._busy.pop(future)
                try:
                    result = future.result()
                except Exception as error:
                    self._replace(worker, error)
                    if asked:
                        left.appendleft(item)
                        deaths[item] += 1
                    else:
                        self._start_deaths += 1
                    if max(deaths[item] if asked else 0, self._start_deaths) >= MOST_DEATHS:
                        raise _too_many_deaths(item, error) from error
                    continue
                if isinstance(result, StillroomError):
                    fault = fault or result
                elif asked:
                    yield item, result
                else:
                    self._check(result)
                    self._start_deaths, self._began_s = 0, None
                self._idle.append(worker)
        if fault is not None:
            raise fault

    def _replace(self, worker: Worker, error: Exception) -> None:
        """Starts the process of a worker again, if it died. Another error is raised."""
        if not worker.died(error):
            raise error
        self._busy[worker.start()] = (worker, "", None)
        if not self._idle and not any(asked for _, asked, _ in self._busy.values()):
            self._began_s = self._began_s or time.monotonic()


def _too_many_deaths(item: Any, error: Exception) -> StillroomError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Of an exception in an actor of Ray the last line says what it was.
    why = lines[-1] if re.match(r"[\w.]+Error: ", lines[-1]) else lines[0]
    died, remedy = f"worker processes died {MOST_DEATHS} times", "give fewer --processes or more memory"
    if item is None:
        return BadInput(
            f"{died} at their start, perhaps for lack of memory ({why}). What they printed, if anything, is above; {remedy}"
        )
    what = f"file ({item.name})"
    if isinstance(item, Part):
        what = f"rows ({item.source.name}, {item.start.row + 1:,} to {item.end:,})"
    return InternalError(f"{died} with the same {what}, perhaps for lack of memory; {remedy} ({why})")


class LocalWorker:
    """A process on this machine."""

    def __init__(self, job: Job) -> None:
        self._process = ChildProcesses(1, _begin, (job,))

    def start(self) -> "Future[Any]":
        """Starts the process, or another one after it died."""
        return self.submit("ready", None)

    def submit(self, method: str, item: Any) -> "Future[Any]":
        """Calls a method of the process's `Annotator`."""
        return self._process.submit(_called, method, item)

    def died(self, error: Exception) -> bool:
        """Whether it says that the process died."""
        return isinstance(error, ProcessDied)

    def end(self) -> None:
        """Ends the process at once."""
        self._process.end()


_annotator: Annotator | None = None  # of a worker process


def _begin(job: Job) -> None:
    """Makes the `Annotator` of a worker process."""
    global _annotator  # noqa: PLW0603 - a pool has no other place for the state of a process
    settle_threads(job.threads)
    _annotator = Annotator(job, lambda: job.bundle)


def _called(method: str, item: Any) -> Any:
    assert _annotator is not None
    return _annotator.call(method, item)


@contextlib.contextmanager
def ctrl_c_kept() -> Iterator[Callable[[], None]]:
    """Gives a function that raises KeyboardInterrupt once Ctrl-C was pressed. Call it now and then.

    Python raises KeyboardInterrupt wherever the main thread is. Where that is the callback of a weak reference, Python prints and
    drops it; work that frees thousands of tasks is there for much of its time. Here it is kept, and not printed. A handler of the
    caller's own stays as it is. Nor is it taken for another error: Python's locks raise RuntimeError where it cuts a wait short.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: None
        return
    pressed = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    told_before = sys.unraisablehook

    def tell(dropped: "sys.UnraisableHookArgs") -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            told_before(dropped)

    signal.signal(signal.SIGINT, handle)
    sys.unraisablehook = tell
    try:
        yield check
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = told_before
