"""Ctrl-C at a moment at which Python drops it."""

import signal
import sys
import weakref
from threading import Thread

import pytest

from stillroom.verbs.annotate.workers import ctrl_c_kept


class Freed:
    """Something with a weak reference to it."""


def test_ctrl_c_is_heeded_though_python_dropped_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: dropped.append(told.exc_type))
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)
    with ctrl_c_kept() as stop_if_asked:
        stop_if_asked()
        freed = Freed()
        reference = weakref.ref(freed, lambda _: signal.raise_signal(signal.SIGINT))
        del freed
        assert reference() is None
        assert not dropped  # nor is it printed
        with pytest.raises(KeyboardInterrupt):
            stop_if_asked()
    signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_callers_own_stays() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with ctrl_c_kept() as stop_if_asked:
            signal.raise_signal(signal.SIGINT)
            stop_if_asked()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_in_another_thread_nothing_is_changed() -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with ctrl_c_kept() as stop_if_asked:
            stop_if_asked()
            found.append(signal.getsignal(signal.SIGINT))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]
