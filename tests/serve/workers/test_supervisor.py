"""One model in the server: what becomes of work and of processes when a process dies."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from coroutines import asynchronous
from patience import PATIENCE_S

from serve.observe.metrics import Metrics
from serve.settings import Limits
from serve.text.answers import AnswerOptions
from serve.text.inputs import TextWork
from serve.workers.process import ModelProcess
from serve.workers.supervisor import ServedModel


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_what_comes_as_an_idle_process_is_buried_is_answered_by_another(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    really_kill = ModelProcess.kill
    answers: list[object] = []

    async def scenario() -> None:
        model = ServedModel(entities_bundle, Limits(), Metrics(), processes=2)
        await model.start()

        async def kill_while_texts_come(process: ModelProcess) -> None:
            asked = [asyncio.ensure_future(model.answers([TextWork("fly to rome")])) for _ in range(10)]
            await really_kill(process)
            answers.extend(await asyncio.gather(*asked, return_exceptions=True))

        assert await model.answers([TextWork("rome")])
        monkeypatch.setattr(ModelProcess, "kill", kill_while_texts_come)
        os.kill(next(iter(model._running)).pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while len(answers) < 10:
                await asyncio.sleep(0.01)
        monkeypatch.undo()
        await model.stop()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(scenario())
    assert [each for each in answers if not (isinstance(each, list) and b'"Rome"' in each[0].title())] == []


@asynchronous
async def test_a_text_that_comes_as_a_process_is_buried_wakes_another(entities_bundle: Path) -> None:
    """The dead one had computed last, and so would be given the text first."""
    model = ServedModel(entities_bundle, Limits(), Metrics(), processes=2)
    await model.start()
    for _ in range(4):
        await model.answers([TextWork("rome")])
    slot = max(model.batcher._slots, key=lambda slot: slot.ended_s)
    slot.open = False
    async with asyncio.timeout(PATIENCE_S):
        assert await model.answers([TextWork("rome")])
    slot.open = True
    await model.stop()


def test_a_process_that_dies_whenever_it_is_ready_is_replaced_less_and_less_often(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses_s: list[float] = []
    really_sleep = asyncio.sleep

    async def sleep(delay_s: float, result: object = None) -> object:
        if sys._getframe(1).f_code is ServedModel._supervise.__code__:
            pauses_s.append(delay_s)
            delay_s = 0
        return await really_sleep(delay_s, result)

    async def scenario() -> None:
        model = ServedModel(entities_bundle, Limits(), Metrics(), processes=1)
        await model.start()
        killed: set[int] = set()
        while len(pauses_s) < 4:
            for process in list(model._running):
                if process.pid not in killed:
                    killed.add(process.pid)
                    os.kill(process.pid, signal.SIGKILL)
            await really_sleep(0.01)
        await model.stop()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with caplog.at_level(logging.CRITICAL, logger="serve"):
        asyncio.run(scenario())
    assert pauses_s[:4] == [0.2, 0.4, 0.8, 1.6]


@pytest.mark.parametrize(
    ("work", "cut"),
    [
        (TextWork("rome " * 20_000), False),
        (TextWork("rome " * 20_000, None, AnswerOptions(truncate=True)), True),
        (TextWork("rome " * 20_000, "rome"), True),
    ],
    ids=["in-windows", "cut", "pair"],
)
def test_the_queue_counts_of_a_long_text_what_is_computed(entities_bundle: Path, work: TextWork, cut: bool) -> None:
    model = ServedModel(entities_bundle, Limits(), Metrics(), processes=1)
    tokens = model.task.estimated_tokens(work, model.manifest.max_length)
    assert 32 < tokens < 2_000 if cut else tokens > 25_000
