"""Worker processes for one caller with many texts, such as `annotate`: windows of texts in, their answers out.

The server's `Batcher` is fair between callers, refuses work beyond its limits and never waits for more. Here there is one caller, and
all its work is accepted: a window is sorted by length and cut into chunks, and each process always has its next chunk ahead. There is
no time limit for a batch, since the program may be paused and continued much later. A thread of its own exchanges messages with the
processes, so that the caller can read and write files meanwhile.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from serve.bundle.cpu_quota import available_cores
from serve.bundle.manifest import open_bundle
from serve.bundle.variant_choice import choose
from serve.errors import InternalError, StillroomError, Unavailable
from serve.model.work_items import Opening, Parts, Work, estimated_tokens
from serve.workers.process import Answered, ModelProcess

log = logging.getLogger("serve")

# Tokens in a chunk: enough to fill the runs of the model, few enough that all processes end at nearly the same time.
CHUNK_TOKENS = 4096
# Chunks that a process has at a time: one that it computes, and the next.
CHUNKS_AHEAD = 2
# After this many processes have died on the same chunk, the pool gives up.
MOST_DEATHS = 2

Result = Answered | StillroomError
Value = TypeVar("Value")


@dataclass
class _Window:
    """Work items that were submitted together, and their results so far."""

    results: list[Result | None]
    chunks_left: int
    future: Future[list[Result]] = field(default_factory=Future)


@dataclass
class _Chunk:
    """Part of a window; `places` are the indices of its work items in the window."""

    window: _Window
    places: list[int]
    works: list[Work]
    deaths: int = 0

    def done(self, place: int, result: Answered | Exception) -> None:
        """Stores the result of one work item."""
        if isinstance(result, Exception) and not isinstance(result, StillroomError):
            result = InternalError(str(result))
        self.window.results[self.places[place]] = result

    def finish(self) -> None:
        """Counts the chunk as done; after the last chunk the window's future gets its results."""
        self.window.chunks_left -= 1
        if self.window.chunks_left == 0 and not self.window.future.done():
            lost = InternalError("the model gave no answer to this text")
            self.window.future.set_result([lost if each is None else each for each in self.window.results])


class OfflinePool:
    """The worker processes of a bundle, within a `with` block.

    `variant`, `threads` and `processes` are as in `serve.workers.supervisor.ServedModel`. BundleError when the bundle is damaged, or
    its variant cannot run here; on entry, when a process cannot open it.
    """

    def __init__(
        self,
        bundle_path: Path | str,
        *,
        variant: str | None = None,
        threads: int | None = None,
        processes: int | None = None,
    ) -> None:
        bundle = open_bundle(bundle_path)
        self.manifest = bundle.manifest
        choice = choose(bundle, variant)
        for note in choice.notes:
            log.warning("%s", note)
        self.variant = choice.variant
        self.threads = threads or 1
        self.processes = processes or max(1, available_cores() // self.threads)
        self._opening = Opening(
            str(bundle_path), self.manifest.digest, choice.variant, self.threads, choice.runtime, whole=True
        )
        self._queue: asyncio.Queue[_Chunk] = asyncio.Queue()
        self._windows: set[Future[list[Result]]] = set()
        self._feeding: list[asyncio.Task[None]] = []
        self._broken: Exception | None = None

    def __enter__(self) -> "OfflinePool":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pool", daemon=True)
        self._thread.start()
        try:
            self._wait_for(self._start())
        except BaseException:
            self._stop_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._wait_for(self._end())
        finally:
            self._stop_loop()

    def submit(self, works: Sequence[Work]) -> Future[list[Result]]:
        """Queues `works`. The future gives their results in order, each an answer or the error of that work item.

        The future raises InternalError if several processes die on the same texts, and the error of a replacement process that
        cannot start.
        """
        window = _Window([None] * len(works), 0)
        chunks = [
            _Chunk(window, places, [works[place] for place in places])
            for places in length_chunks([estimated_tokens(work) for work in works], CHUNK_TOKENS)
        ]
        window.chunks_left = len(chunks)
        if not chunks:
            window.future.set_result([])
        self._loop.call_soon_threadsafe(self._enqueue, window.future, chunks)
        return window.future

    def _enqueue(self, future: "Future[list[Result]]", chunks: list[_Chunk]) -> None:
        if self._broken:
            if not future.done():  # without work items it is done already
                future.set_exception(self._broken)
            return
        self._windows.add(future)
        future.add_done_callback(self._windows.discard)
        for chunk in chunks:
            self._queue.put_nowait(chunk)

    async def _start(self) -> None:
        started = await asyncio.gather(
            *(ModelProcess.started(self._opening, _unobserved) for _ in range(self.processes)), return_exceptions=True
        )
        processes = [each for each in started if isinstance(each, ModelProcess)]
        if failed := [each for each in started if isinstance(each, BaseException)]:
            await asyncio.gather(*(each.kill() for each in processes))
            raise failed[0]
        self._feeding = [asyncio.create_task(self._supervise(process)) for process in processes]

    async def _end(self) -> None:
        for task in self._feeding:
            task.cancel()
        if self._feeding:
            await asyncio.wait(self._feeding)

    async def _supervise(self, process: ModelProcess) -> None:
        """Feeds `process`, and replaces it whenever it dies, until cancelled."""
        asked: deque[_Chunk] = deque()
        try:
            while True:
                try:
                    await self._feed(process, asked)
                except Unavailable:
                    await process.kill()
                    log.error(
                        "a worker process of model %r died with status %s; starting another",
                        self.manifest.name,
                        process.process.returncode,
                    )
                    self._take_back(asked)
                    process = await ModelProcess.started(self._opening, _unobserved)
        except Exception as error:
            self._give_up(error)
        finally:
            # Nobody needs the answers to chunks under way once this ends.
            await (process.kill() if asked else process.end())

    async def _feed(self, process: ModelProcess, asked: deque[_Chunk]) -> None:
        while True:
            while len(asked) < CHUNKS_AHEAD and not (asked and self._queue.empty()):
                chunk = await self._queue.get()
                asked.append(chunk)
                process.send(chunk.works)
            await process.receive(asked[0].done)
            asked.popleft().finish()

    def _take_back(self, asked: deque[_Chunk]) -> None:
        """Puts the chunks of a dead process back in the queue. InternalError if its first chunk has killed several processes."""
        if asked:
            asked[0].deaths += 1
            if asked[0].deaths >= MOST_DEATHS:
                raise InternalError(
                    f"{MOST_DEATHS} worker processes of model {self.manifest.name!r} died one after another on the same texts "
                    f"(count: {len(asked[0].works):,}), perhaps for lack of memory; give fewer processes or more memory"
                )
        while asked:
            self._queue.put_nowait(asked.popleft())

    def _give_up(self, error: Exception) -> None:
        self._broken = error
        for future in list(self._windows):
            if not future.done():
                future.set_exception(error)

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


def _unobserved(parts: Parts) -> None:
    """Ignores the runs of the model: the pool counts rows."""
