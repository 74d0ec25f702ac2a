"""Ctrl-C that cannot be lost."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


@contextmanager
def ctrl_c_kept() -> Iterator[Callable[[], None]]:
    """Gives a function that raises KeyboardInterrupt once Ctrl-C was pressed. Call it now and then.

    Python raises KeyboardInterrupt wherever the main thread is. Where that is the callback of a weak reference, Python prints and
    drops it; work that frees thousands of tasks is there for much of its time. Here it is kept, and not printed. A handler of the
    caller's own stays as it is.
    """
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
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
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = told_before
