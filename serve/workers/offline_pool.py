"""A served model for one caller with many texts, such as `annotate`: windows of texts in, their answers out.

Its queue has no limit and its batches no time limit, since the program may be paused and continued much later. An event loop in a
thread of its own runs it, so that the caller can read and write files meanwhile.
"""

import asyncio
import math
import sys
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from serve.bundle.runtimes import Device
from serve.errors import BadInput, InternalError, StillroomError, Unavailable
from serve.model.work_items import TokenWork, Work
from serve.observe.metrics import Metrics
from serve.settings import Limits
from serve.text.inputs import estimated_tokens
from serve.workers.batcher import PACKETS_A_BATCH
from serve.workers.process import WorkOutput
from serve.workers.supervisor import ServedModel

# Tokens in a batch: enough to fill the runs of the model, few enough that all processes end at nearly the same time.
BATCH_TOKENS, GPU_BATCH_TOKENS = 4096, 32_768
# Texts that were given to processes this often, and each of them died, are given up.
MOST_DEATHS = 3

# Windows come in order of length, and `max_wait_ms` 0 keeps that order.
LIMITS = Limits(queued_texts=sys.maxsize, queue_s=math.inf, max_wait_ms=0)

Result = WorkOutput | StillroomError
Value = TypeVar("Value")


class OfflinePool:
    """The worker processes of a bundle, within a `with` block.

    `variant`, `threads`, `processes` and `device` are as in `serve.workers.supervisor.ServedModel`. BundleError when the bundle is
    damaged, or its variant cannot run here; on entry, when a process cannot open it. BadInput on entry when a process dies.
    """

    def __init__(
        self,
        bundle_path: Path | str,
        *,
        variant: str | None = None,
        threads: int | None = None,
        processes: int | None = None,
        device: Device = "cpu",
    ) -> None:
        self._batch_tokens = GPU_BATCH_TOKENS if device == "cuda" else BATCH_TOKENS
        self._model = ServedModel(
            bundle_path,
            replace(LIMITS, batch_tokens=self._batch_tokens),
            Metrics(),
            variant=variant,
            threads=threads,
            processes=processes,
            device=device,
            whole=True,
        )
        self.manifest, self.variant = self._model.manifest, self._model.variant
        self.threads, self.processes = self._model.threads, self._model.processes

    def __enter__(self) -> "OfflinePool":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pool", daemon=True)
        self._thread.start()
        try:
            self._wait_for(self._model.start())
        except BaseException as error:
            self._stop_loop()
            raise self._explained(error) from None
        self._windows: set[Future[list[Result]]] = set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            unwanted = list(self._windows)
            for window in unwanted:
                window.cancel()
            self._wait_for(self._model.stop(at_once=bool(unwanted)))
        finally:
            self._stop_loop()

    def submit(self, works: Sequence[Work]) -> Future[list[Result]]:
        """Queues `works`. The future gives their results in order, each an answer or the error of that work item.

        The future raises InternalError if several processes die on the same texts, and the error of the start if none can be replaced.
        """
        window = asyncio.run_coroutine_threadsafe(self._results(works), self._loop)
        self._windows.add(window)
        window.add_done_callback(self._windows.discard)
        return window

    async def _results(self, works: Sequence[Work]) -> list[Result]:
        results: dict[int, Result] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                # The batcher serves callers of one packet in order of arrival.
                packet = self._batch_tokens // PACKETS_A_BATCH
                tokens = [
                    len(work.input_ids) if isinstance(work, TokenWork) else estimated_tokens(work) for work in works
                ]
                for places in length_chunks(tokens, packet):
                    tasks.create_task(self._chunk({place: works[place] for place in places}, results))
        except ExceptionGroup as errors:
            why_none_runs = None if self._model.ready else self._model.start_error
            raise self._explained(why_none_runs or errors.exceptions[0]) from None
        return [results[place] for place in range(len(works))]

    async def _chunk(self, left: dict[int, Work], results: dict[int, Result]) -> None:
        """Stores the results of the work items in `left`, by their places. Those whose process dies are asked again."""
        for _ in range(MOST_DEATHS):
            answers = await self._model.answers(list(left.values()), keeps_errors=True)
            for place, answer in zip(list(left), answers, strict=True):
                if isinstance(answer, Unavailable):
                    continue
                if isinstance(answer, StillroomError) or not isinstance(answer, Exception):
                    results[place] = answer
                else:
                    results[place] = InternalError(str(answer))
                del left[place]
            if not left:
                return
        raise InternalError(
            f"worker processes of model {self.manifest.name!r} died {MOST_DEATHS} times with the same texts (count: {len(left):,}), "
            "perhaps for lack of memory; give fewer processes or more memory"
        )

    def _explained(self, error: BaseException) -> BaseException:
        """`error`, but BadInput with what to do where a process did not live to be ready."""
        if not isinstance(error, Unavailable):
            return error
        return BadInput(
            f"model {self.manifest.name!r} cannot run: {error.message}, perhaps for lack of memory. What it printed, if anything, is "
            "above; give fewer processes or more memory"
        )

    def _wait_for(self, work: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def length_chunks(tokens: Sequence[int], chunk_tokens: int) -> list[list[int]]:
    """Indices of `tokens`, the longest first, in chunks of at most `chunk_tokens` tokens, or one text.

    The longest come first, so that the last chunks, which one process may compute while others are idle, are short texts.
    """
    chunks: list[list[int]] = []
    held = 0
    for place in sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True):
        if chunks and held + tokens[place] <= chunk_tokens:
            chunks[-1].append(place)
            held += tokens[place]
        else:
            chunks.append([place])
            held = tokens[place]
    return chunks
