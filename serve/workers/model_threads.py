"""Threads that run the model: batches of works in, their answers to the event loop out, run by run.

Tokenizer and runtime release Python's lock while they compute, so the event loop goes on meanwhile.
"""

import asyncio
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from serve.errors import InternalError, StillroomError
from serve.observe.request_context import RequestContext, Stages
from serve.text.answers import Logits, Parts, TextFacts
from serve.text.inputs import Work
from serve.workers.batcher import Done

if TYPE_CHECKING:
    from serve.model.pipeline import Pipeline

log = logging.getLogger("serve")

# Longest time from one run of the model to the next, and for opening a model. A model that takes longer counts as hung.
HUNG_S = 120.0

WorkOutput = bytes | Logits
Result = TypeVar("Result")


class WorkRequest(NamedTuple):
    """A work item, the context of its request, its index there, and the key under which its answer is kept, if it is."""

    work: Work
    context: RequestContext
    place: int = 0
    key: bytes | None = None


class _Batch:
    """A batch that is computed or waits for the thread."""

    def __init__(self, requests: list[WorkRequest], done: Done[WorkOutput], loop: asyncio.AbstractEventLoop) -> None:
        self.requests, self.done = requests, done
        self.stages = Stages(time.perf_counter(), 0.0, 0.0, 0.0)
        self.ended: asyncio.Future[None] = loop.create_future()
        self.watch: asyncio.TimerHandle | None = None
        self._unwanted: list[int] = []
        for each in requests:
            each.context.when_abandoned.add(self.drop)

    def drop(self, context: RequestContext) -> None:
        """Nobody waits for the items of this request any longer."""
        self._unwanted = [*self._unwanted, *(i for i, each in enumerate(self.requests) if each.context is context)]

    def unwanted(self) -> list[int]:
        """The indices of the items that nobody waits for; called by the thread before each run."""
        return self._unwanted

    def end_watch(self, _ended: object = None) -> None:
        """Waits for no more answers."""
        if self.watch:
            self.watch.cancel()

    def end(self, error: Exception | None) -> None:
        """Ends the wait for the batch, with `error` if there is one."""
        for each in self.requests:
            each.context.when_abandoned.discard(self.drop)
        if self.ended.done():  # cancelled
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class ModelThreads:
    """Threads that compute batches, each one at a time; `run` is a function for `Batcher.open`.

    `niceness` is what they yield to others of this machine (Linux has one for each thread). `observe` gets the times of each
    run, and `keep` each answer that has a key. `on_broken` is called with the reason when a GPU fails, or no run ends for `HUNG_S`: such
    a thread cannot be ended, only its process.
    """

    def __init__(
        self,
        pipeline: "Pipeline",
        observe: Callable[[Parts], None],
        keep: Callable[[bytes, bytes, TextFacts], None],
        on_broken: Callable[[str], None],
        *,
        count: int,
        niceness: int,
    ) -> None:
        self._pipeline, self._observe, self._keep, self._on_broken = pipeline, observe, keep, on_broken
        self._loop = asyncio.get_running_loop()
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._compute, args=(niceness,), name="model", daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, requests: list[WorkRequest], done: Done[WorkOutput]) -> asyncio.Future[None]:
        """Computes a batch. Its answers go to `done`, with their times in each item's context; the future is done after the last.

        Items whose request is abandoned are dropped before the next run of the model.
        """
        batch = _Batch(requests, done, self._loop)
        self._watch(batch)
        batch.ended.add_done_callback(batch.end_watch)
        self._batches.put(batch)
        return batch.ended

    def _watch(self, batch: _Batch) -> None:
        """From now on the next answers of `batch` are waited for, unless it has ended."""
        batch.end_watch()
        if not batch.ended.done():
            batch.watch = self._loop.call_later(HUNG_S, self._on_broken, f"it gave no answer within {HUNG_S:g} s")

    async def end(self, within_s: float) -> None:
        """Ends the threads after their batches; returns at the latest after `within_s`."""
        for _ in self._threads:
            self._batches.put(None)
        with suppress(TimeoutError):
            await in_a_thread(self._join, within_s)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _compute(self, niceness: int) -> None:
        renice(niceness)
        while (batch := self._batches.get()) is not None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any longer
                self._answer(batch)
            del batch  # with its requests, which would stay in memory until the next one

    def _answer(self, batch: _Batch) -> None:
        tell = self._loop.call_soon_threadsafe
        encode = msgspec.json.Encoder().encode
        left = len(batch.requests)
        error: InternalError | None = None
        try:
            for answers, parts in self._pipeline.answered([each.work for each in batch.requests], None, batch.unwanted):
                outputs: list[tuple[int, WorkOutput | StillroomError]] = []
                for place, answer in answers:
                    if isinstance(answer, StillroomError):
                        # They refer to frames, which would keep the request in memory until the next garbage collection.
                        answer.__traceback__ = answer.__context__ = answer.__cause__ = None
                    outputs.append((place, answer if isinstance(answer, StillroomError | Logits) else encode(answer)))
                left -= len(outputs)
                tell(self._deliver, batch, outputs, parts, not left)
        except InternalError as failure:  # on a GPU, which may not recover before the process ends
            error = failure
            # Before the batch ends, so that no other one is given to this thread.
            tell(self._on_broken, f"it failed ({error})")
        except Exception:
            log.exception("the model %r failed", self._pipeline.manifest.name)
            error = InternalError("the model failed")
        if left:  # dropped, or the model failed
            tell(batch.end, error)

    def _deliver(
        self, batch: _Batch, answers: list[tuple[int, WorkOutput | StillroomError]], parts: Parts, last: bool
    ) -> None:
        """Passes on the answers of one run, in the event loop."""
        self._watch(batch)
        batch.stages = batch.stages.after(parts.tokenise_s, parts.run_s, parts.decode_s)
        if last:
            # Before the answers are passed on: their callers wake after the next batch is given, so that the thread does not wait for all
            # of them to be written.
            batch.end(None)
        for place, answer in answers:
            request = batch.requests[place]
            request.context.stages = batch.stages
            if isinstance(answer, StillroomError) and answer.fault == "ours":
                request.context.failed_texts.append(request.place)
            if request.key and isinstance(answer, bytes):
                self._keep(request.key, answer, parts.completed[place])
            batch.done(place, answer)
        self._observe(parts)


def renice(niceness: int) -> None:
    """Has this thread, and those that it starts, yield to others by `niceness` more; only on Linux, where each has its own."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + niceness)


async def in_a_thread(call: Callable[[], Result], limit_s: float) -> Result:
    """What `call` returns or raises, a TimeoutError of its own too. TimeoutError after `limit_s`; then nobody waits for it any longer.

    Unlike with asyncio.to_thread, the program may end before it does: a download may take long.
    """
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="aside", daemon=True).start()
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await asyncio.wrap_future(outcome)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"it took longer than {limit_s:g} s") from error
