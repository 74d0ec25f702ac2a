"""Model processes for a program that has more work than they can do at once: windows of texts in, their answers out.

The server's `Batcher` is fair between callers, refuses what is too much and never waits. Here there is one caller who wants
everything: a window is sorted by length, cut into chunks and given to whichever process is free, each of which always has
the next chunk at hand. No process is given up for being slow: a program that is stopped may go on much later. The processes are spoken
to in a thread of their own, so that the caller may read and write meanwhile.
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

# Tokens that a process is given at once: enough that the model's runs in it are full, few enough that the processes end
# nearly together.
CHUNK_TOKENS = 4096
# Chunks that a process has been given and has not answered: one that it computes, one that it begins without waiting.
CHUNKS_AHEAD = 2
# How many processes may die of one chunk before it is given up.
MOST_DEATHS = 2

Result = Answered | StillroomError
Value = TypeVar("Value")


@dataclass
class _Window:
    """Works that were submitted together, and what is known of them."""

    results: list[Result | None]
    chunks_left: int
    future: Future[list[Result]] = field(default_factory=Future)


@dataclass
class _Chunk:
    """Part of a window; `places` says where in the window each work stands."""

    window: _Window
    places: list[int]
    works: list[Work]
    deaths: int = 0

    def done(self, place: int, result: Answered | Exception) -> None:
        """Notes the result of one work."""
        if isinstance(result, Exception) and not isinstance(result, StillroomError):
            result = InternalError(str(result))
        self.window.results[self.places[place]] = result

    def finish(self) -> None:
        """Notes that all are done."""
        self.window.chunks_left -= 1
        if self.window.chunks_left == 0 and not self.window.future.done():
            lost = InternalError("the model gave no answer to this text")
            self.window.future.set_result([lost if each is None else each for each in self.window.results])


class OfflinePool:
    """A bundle's model processes at work together, within a `with` block.

    `variant` and `threads` are as in `serve.workers.supervisor.ServedModel` (threads of one process: 1 unless given), `processes` as many
    as fit the cores unless given. BundleError when the bundle is damaged, or its variant cannot run here; on entry, when a
    process cannot open it.
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
        self._opening = Opening(str(bundle_path), self.manifest.digest, choice.variant, self.threads, whole=True)
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
        """Has `works` answered; the future's results stand in their order, each an answer or the error of that work alone.

        The future raises InternalError when processes die of these works again and again, and what a process says that
        is started in the place of another and cannot.
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
            if not future.done():  # as that of no works is
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
        """Has `process` compute; when it dies, another in its place; until cancelled."""
        asked: deque[_Chunk] = deque()
        try:
            while True:
                try:
                    await self._feed(process, asked)
                except Unavailable:
                    await process.kill()
                    log.error(
                        "a process of model %r died (%s); starting another",
                        self.manifest.name,
                        process.process.returncode,
                    )
                    self._take_back(asked)
                    process = await ModelProcess.started(self._opening, _unobserved)
        except Exception as error:
            self._give_up(error)
        finally:
            # Chunks under way are of no use to anybody once this ends.
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
        """Puts what a dead process was asked back in the queue, unless its first chunk is what kills."""
        if asked:
            asked[0].deaths += 1
            if asked[0].deaths >= MOST_DEATHS:
                raise InternalError(
                    f"{MOST_DEATHS} processes of model {self.manifest.name!r} died one after another of the same "
                    f"{len(asked[0].works)} texts; the last may have had too little memory"
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
    """Places of `tokens`, the longest first, in chunks of at most `chunk_tokens` tokens in all, or one text.

    The longest first, so that the last chunks, which one process may compute while others have nothing left, are quick to
    pad and hold no surprise.
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
    """The pool counts rows, not runs of the model."""
