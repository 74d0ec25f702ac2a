"""The workers of a bulk annotation that die or do not start, and Ctrl-C at a moment at which Python drops it."""

import os
import signal
import sys
import weakref
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from patience import PATIENCE_S

from serve.text.answers import AnswerOptions
from stillroom.child_process import ProcessDied
from stillroom.verbs.annotate import workers
from stillroom.verbs.annotate.parts import Job
from stillroom.verbs.annotate.rows import Columns
from stillroom.verbs.annotate.workers import LocalWorker, WorkerGroup, ctrl_c_kept


def test_a_worker_whose_process_died_is_started_again_and_ended(tmp_path: Path) -> None:
    job = Job("", "", "", 1, "cpu", Columns(), AnswerOptions(), None, "stop", 5, str(tmp_path))
    worker = LocalWorker(job)
    try:
        died = worker.start().result(PATIENCE_S).pid
        os.kill(died, signal.SIGKILL)
        with pytest.raises(ProcessDied):
            worker.submit("ready", None).result(PATIENCE_S)
        now = worker.start().result(PATIENCE_S).pid
        assert now != died
    finally:
        worker.end()
    assert not psutil.pid_exists(now)


class StartsLate:
    """A worker that dies with its first item, and starts again when `ready` gets a result."""

    def __init__(self) -> None:
        self.ready: Future[Any] = Future()
        self.ready.set_result("ready")

    def start(self) -> "Future[Any]":
        return self.ready

    def submit(self, method: str, item: Any) -> "Future[Any]":
        answer: Future[Any] = Future()
        if self.ready.done() and self.ready.result() == "ready":
            self.ready = Future()
            answer.set_exception(MemoryError())
        else:
            answer.set_result(f"{method} {item}")
        return answer

    def died(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def end(self) -> None:
        pass


def test_the_user_is_told_while_no_worker_starts_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "PATIENCE_S", 0.0)
    monkeypatch.setattr(workers, "LOOK_EVERY_S", 0.01)
    worker, looks = StartsLate(), list[str]()

    def look() -> None:
        looks.append("")
        if len(looks) > 5 and not worker.ready.done():
            worker.ready.set_result("ready again")

    with WorkerGroup([worker]) as group:
        capsys.readouterr()
        assert list(group.results("annotate", ["part"], look)) == [("part", "annotate part")]
    said = capsys.readouterr().err.splitlines()
    # Once before the first start, and once after the death.
    assert said == ["still waiting for one of 1 workers to start; perhaps no core is free"] * 2


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
