"""One model of a server, in the threads of this process."""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coroutines import asynchronous
from lookup_bundles import city_table, write_bundle
from patience import PATIENCE_S

from serve.errors import BundleError, InternalError, Overloaded, Unavailable
from serve.model.pipeline import Pipeline
from serve.model.session import Row, Session
from serve.observe.metrics import Metrics
from serve.observe.request_context import RequestContext
from serve.settings import Limits
from serve.text.answers import AnswerOptions
from serve.text.inputs import TextWork
from serve.workers import model_threads, served_model
from serve.workers.served_model import ServedModel

# 5,000 bytes count as 1,252 tokens, which is more than a batch. It is read in windows of 32 tokens, the most that these models read.
LONG, WINDOW = "rome " * 1000, 32


class Runs:
    """The runs of models in this process. Those that `held` chooses, by the lengths of their rows, wait for `go`."""

    def __init__(self) -> None:
        self.held: Callable[[list[int]], bool] = lambda lengths: False
        self.go = threading.Event()
        self.lengths: list[list[int]] = []
        self.niceness: list[int] = []
        self.error: Exception | None = None
        self.has_begun = threading.Event()

    async def begun(self) -> None:
        """Waits until a held run has begun."""
        assert await asyncio.to_thread(self.has_begun.wait, PATIENCE_S)

    def run(self, session: Session, rows: list[Row], really_run: Callable[..., list[np.ndarray]]) -> list[np.ndarray]:
        self.lengths.append([len(row) for row in rows])
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if self.held(self.lengths[-1]):
            self.has_begun.set()
            assert self.go.wait(PATIENCE_S)
        if self.error:
            raise self.error
        return really_run(session, rows)


@pytest.fixture(autouse=True)
def _one_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one core, so that what is queued is the same on every machine."""
    monkeypatch.setattr(served_model, "MOST_AT_ONCE", 1)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    runs, really_run = Runs(), Session.run
    monkeypatch.setattr(Session, "run", lambda session, rows: runs.run(session, rows, really_run))
    yield runs
    runs.go.set()


@asynccontextmanager
async def started(bundle: Path, **limits: Any) -> AsyncIterator[ServedModel]:
    model = ServedModel(bundle, Limits(**limits), Metrics())
    await model.start()
    try:
        yield model
    finally:
        await model.stop()


def ask(model: ServedModel, *texts: str, context: RequestContext | None = None) -> "asyncio.Task[list[Any]]":
    return asyncio.create_task(model.answers([TextWork(text) for text in texts], context))


def everything(lengths: list[int]) -> bool:
    return True


def windows(lengths: list[int]) -> bool:
    return max(lengths) == WINDOW


@asynchronous
async def test_answers_are_those_of_the_pipeline_in_the_order_of_the_texts(entities_bundle: Path) -> None:
    texts = ["fly to rome", LONG, "😀 from new york", "", "oslo " * 900, "please"]
    pipeline = Pipeline(entities_bundle)
    async with started(entities_bundle) as model:
        together = [json.loads(answer) for answer in await ask(model, *texts)]
        alone = [json.loads((await ask(model, text))[0]) for text in texts]
        assert await ask(model) == []
    assert together == alone == json.loads(json.dumps([pipeline(text) for text in texts]))


@asynchronous
async def test_a_text_that_fails_fails_alone(broken_bundle: Path, runs: Runs) -> None:
    async with started(broken_bundle) as model:
        before = len(runs.lengths)
        contexts = [RequestContext() for _ in range(3)]
        asked = [("fly", "rome"), ("oslo", "refund", "oslo"), ("paris",)]
        outcomes = await asyncio.gather(
            *(ask(model, *texts, context=context) for texts, context in zip(asked, contexts, strict=True)),
            return_exceptions=True,
        )
        assert sorted(runs.lengths[before]) == [3] * 6  # all six were in one run
    assert [type(outcome) for outcome in outcomes] == [list, InternalError, list]
    assert b"paris" in outcomes[2][0]  # type: ignore[index]
    assert [context.failed_texts for context in contexts] == [[], [1], []]


@asynchronous
async def test_texts_of_an_abandoned_request_are_dropped_before_the_next_run(entities_bundle: Path, runs: Runs) -> None:
    async with started(entities_bundle) as model:
        warm = len(runs.lengths)
        runs.held = everything
        context = RequestContext()
        staying, leaving = ask(model, "rome"), ask(model, "fly to rome " * 6, "oslo", context=context)
        await runs.begun()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        runs.go.set()
        assert b"rome" in (await staying)[0]
        assert b"oslo" in (await ask(model, "fly to oslo"))[0]
        assert runs.lengths[warm:] == [[3, 3], [5]]  # the row of 20 tokens did not run
        assert not context.when_abandoned


@asynchronous
async def test_a_long_text_does_not_hold_up_a_short_one(entities_bundle: Path, runs: Runs) -> None:
    async with started(entities_bundle) as model:
        warm = len(runs.lengths)
        runs.held = windows
        long = ask(model, LONG)
        await runs.begun()
        assert b"oslo" in (await ask(model, "fly to oslo"))[0]
        assert not long.done()
        runs.go.set()
        assert (await long)[0].count(b"rome") == 1000
    if sys.platform == "linux":  # where a thread has a priority of its own
        here = os.getpriority(os.PRIO_PROCESS, 0)
        of_short, of_long = runs.niceness[warm + 1], runs.niceness[warm]
        assert (of_short, of_long) == (min(19, here + 5), min(19, here + 10))


@asynchronous
async def test_a_request_of_short_and_long_texts_ends_at_the_first_error(broken_bundle: Path, runs: Runs) -> None:
    async with started(broken_bundle) as model:
        warm = len(runs.lengths)
        await ask(model, LONG)
        of_long = runs.lengths[warm:]
        # The short text fails once the long one is in its first run.
        runs.held = lambda lengths: windows(lengths) or not runs.has_begun.wait(PATIENCE_S)
        with pytest.raises(InternalError):
            await ask(model, LONG, "refund")
        ran = len(runs.lengths)
        runs.go.set()
        assert (await ask(model, LONG))[0].count(b"rome") == 1000
        assert runs.lengths[ran:] == of_long  # the rest of the failed request did not run


@asynchronous
async def test_a_request_of_short_and_long_texts_ends_when_its_client_disconnects(
    entities_bundle: Path, runs: Runs
) -> None:
    async with started(entities_bundle) as model:
        runs.held = everything
        ahead = [ask(model, "rome"), ask(model, LONG)]
        await runs.begun()
        answered = asyncio.get_running_loop().create_future()
        mixed = asyncio.create_task(model.answers([TextWork("oslo"), TextWork(LONG)], None, answered))
        while [batcher.waiting for batcher in model.batchers] != [1, 1]:
            await asyncio.sleep(0)
        answered.set_exception(ConnectionResetError("gone"))
        with pytest.raises(ConnectionResetError, match="gone"):
            await mixed
        assert [batcher.waiting for batcher in model.batchers] == [0, 0]
        runs.go.set()
        await asyncio.gather(*ahead)


def batches_given(model: ServedModel) -> list[str]:
    return [line for line in model._metrics.text().decode().splitlines() if line.startswith("stillroom_batches")]


@asynchronous
async def test_a_request_of_short_and_long_texts_is_refused_whole_where_one_queue_is_full(
    entities_bundle: Path, runs: Runs
) -> None:
    async with started(entities_bundle, queued_texts=1, queue_s=1e9) as model:
        runs.held = windows
        long = [ask(model, LONG)]
        await runs.begun()
        long.append(ask(model, "oslo " * 900))
        while not model.batchers[1].waiting:
            await asyncio.sleep(0)
        batches = batches_given(model)
        with pytest.raises(Overloaded):
            await ask(model, "rome", LONG)
        assert batches
        assert batches_given(model) == batches
        assert model.batchers[0].waiting == 0
        assert model.full_s == 0
        assert b"rome" in (await ask(model, "rome"))[0]  # a request of short texts has room
        runs.go.set()
        await asyncio.gather(*long)


@pytest.mark.parametrize("fault", ["it failed", "it gave no answer within"])
@asynchronous
async def test_requests_of_a_broken_model_get_unavailable_and_its_owner_is_told(
    entities_bundle: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(served_model, "UNWANTED_S", 0.1)
    reasons: list[str] = []
    async with started(entities_bundle, batch_tokens=10) as model:
        model.on_broken = reasons.append
        if fault == "it failed":
            runs.held = windows
            long = ask(model, LONG)
            await runs.begun()
            model._running[0]._pipeline.session.device = "cuda"  # where an error lasts as long as the process
            runs.error = RuntimeError("CUDA error")
        else:
            monkeypatch.setattr(model_threads, "HUNG_S", 0.2)
            runs.held = everything
            long = ask(model, LONG)
        computed, waits = ask(model, "rome"), ask(model, "fly from oslo to paris i")  # too long for the same batch
        for each in (computed, waits, long):  # `long` is computed by the other thread, which cannot be ended either
            with pytest.raises(Unavailable, match=fault):
                await each
        assert not model.ready
        with pytest.raises(Unavailable, match=fault):
            await ask(model, "rome")
        assert len(reasons) == 1
        assert reasons[0].startswith(fault)


@asynchronous
async def test_the_next_batch_is_computed_while_the_callers_of_the_last_go_on(
    entities_bundle: Path, runs: Runs
) -> None:
    async with started(entities_bundle, batch_tokens=10) as model:
        runs.held = everything
        waiting: list[int] = []

        async def first() -> None:
            await model.answers([TextWork("rome")])
            waiting.append(model.batchers[0].waiting)

        asked = [asyncio.create_task(first())]
        await runs.begun()
        asked.append(ask(model, "fly to oslo from paris"))
        while not model.batchers[0].waiting:
            await asyncio.sleep(0)
        runs.go.set()
        await asyncio.gather(*asked)
        assert waiting == [0]


@asynchronous
async def test_the_stages_of_a_request_fit_its_time(entities_bundle: Path) -> None:
    async with started(entities_bundle) as model:
        context, began_s = RequestContext(), time.perf_counter()
        await ask(model, *["fly to rome", "please " * 20] * 10, context=context)
        took_s = time.perf_counter() - began_s
        assert list(context.stage_seconds()) == ["queue", "tokenise", "run", "decode"]
        assert 0 < sum(context.stage_seconds().values()) <= took_s
        assert (context.model, context.variant, context.texts) == ("cities", "fp32", 20)


@asynchronous
async def test_stop_waits_for_requests_that_hold_the_model(entities_bundle: Path, runs: Runs) -> None:
    async with started(entities_bundle) as model:
        runs.held = everything
        model.retain()
        asked = ask(model, "rome")
        await runs.begun()
        stopping = asyncio.create_task(model.stop())
        await asyncio.sleep(0.01)
        assert not stopping.done()
        assert model.ready
        runs.go.set()
        assert b"rome" in (await asked)[0]
        model.release()
        await stopping
        assert not model.ready
        with pytest.raises(Unavailable):
            await ask(model, "rome")


@asynchronous
async def test_stop_does_not_wait_for_a_run_that_does_not_end(
    entities_bundle: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "UNWANTED_S", 0.1)
    async with started(entities_bundle) as model:
        runs.held = everything
        asked = ask(model, "rome")
        await runs.begun()
        asked.cancel()
        async with asyncio.timeout(PATIENCE_S / 2):
            await model.stop()
        assert not runs.go.is_set()


@asynchronous
async def test_a_bundle_that_cannot_be_opened_raises_its_error(tmp_path: Path) -> None:
    model = ServedModel(write_bundle(tmp_path / "wrong", city_table()[:, :2]), Limits(), Metrics())
    with pytest.raises(BundleError, match="gives logits of shape"):
        await model.start()
    assert not model.ready
    await model.stop()


@asynchronous
async def test_a_model_that_takes_too_long_to_open_is_unavailable(
    entities_bundle: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "HUNG_S", 0.1)
    runs.held = everything
    model = ServedModel(entities_bundle, Limits(), Metrics())
    with pytest.raises(Unavailable, match=r"'cities' could not be opened: .* 0\.1 s"):
        await model.start()
    assert not model.ready


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
    model = ServedModel(entities_bundle, Limits(), Metrics())
    tokens = model.task.estimated_tokens(work, model.manifest.max_length)
    assert 32 < tokens < 2_000 if cut else tokens > 25_000
