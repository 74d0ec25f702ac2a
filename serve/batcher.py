"""Texts of many callers -> batches for one model. Knows nothing of HTTP and nothing of models: a function is the model.

There is no timer. An idle model gets what has come at once; while it is busy, what comes waits and is sorted into
batches of like length, so batches grow by themselves exactly when there is load.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from serve.errors import InternalError, Overloaded

Item = TypeVar("Item")
Result = TypeVar("Result")

# Weight of the newest batch in the running estimate of the model's speed.
SPEED_SMOOTHING = 0.2


@dataclass(eq=False)
class _Waiting(Generic[Item, Result]):
    item: Item
    tokens: int
    result: asyncio.Future[Result]


class Batcher(Generic[Item, Result]):
    """Runs `run` on batches of what callers bring, one batch at a time, in a thread of its own.

    `run` takes a list and gives as many results, in the same order. `tokens` is the length of one item. A batch has at
    most `batch_tokens` tokens once padded to its longest item, or one item. At most `max_texts` items and `max_tokens`
    tokens wait; beyond that callers are refused. `observe` is told of each batch: its items, its seconds in the model.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Sequence[Result]],
        tokens: Callable[[Item], int],
        *,
        batch_tokens: int = 4096,
        max_texts: int = 4096,
        max_tokens: int = 262_144,
        observe: Callable[[int, float], None] = lambda items, seconds: None,
    ) -> None:
        self._run = run
        self._tokens = tokens
        self._batch_tokens = batch_tokens
        self._max_texts = max_texts
        self._max_tokens = max_tokens
        self._observe = observe
        self._queue: list[_Waiting[Item, Result]] = []
        self._queued_tokens = 0
        self._tokens_per_s: float | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._runner: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Items that wait for the model, those of the batch that runs not counted."""
        return len(self._queue)

    async def results(self, items: Sequence[Item]) -> list[Result]:
        """The results of `items`, in their order. Raises Overloaded when the queue has no room, and what `run` raises.

        A caller that is cancelled takes its items with it: those not yet begun are never run.
        """
        lengths = [self._tokens(item) for item in items]
        self.refuse_if_full(len(items), sum(lengths))
        loop = asyncio.get_running_loop()
        mine = [
            _Waiting[Item, Result](item, tokens, loop.create_future())
            for item, tokens in zip(items, lengths, strict=True)
        ]
        self._queue.extend(mine)
        self._queued_tokens += sum(lengths)
        if self._runner is None or self._runner.done():
            self._runner = loop.create_task(self._run_until_empty())
        try:
            return await asyncio.gather(*(each.result for each in mine))
        finally:
            for each in mine:  # no-op where there is a result already
                each.result.cancel()

    def refuse_if_full(self, texts: int, tokens: int = 0) -> None:
        """Overloaded when `texts` more items of `tokens` in all do not fit the queue. An empty queue takes anything."""
        if not self._queue:
            return
        if len(self._queue) + texts > self._max_texts or self._queued_tokens + tokens > self._max_tokens:
            wait_s = self._queued_tokens / self._tokens_per_s if self._tokens_per_s else 1.0
            raise Overloaded(
                f"{len(self._queue)} texts are waiting, {texts} more do not fit; try again in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    async def close(self) -> None:
        """Wait until everything that was accepted is answered, then end the thread."""
        if self._runner is not None:
            await self._runner
        self._thread.shutdown()

    async def _run_until_empty(self) -> None:
        while batch := self._take():
            try:
                results = await self._run_in_thread(batch)
            except Exception as error:
                await self._fail(batch, error)
                continue
            for each, result in zip(batch, results, strict=True):
                if not each.result.done():
                    each.result.set_result(result)

    def _take(self) -> list[_Waiting[Item, Result]]:
        """The next batch, taken out of the queue; cancelled items are dropped. Empty when nothing waits."""
        waiting = [each for each in self._queue if not each.result.done()]
        chosen = set(batch_around_oldest([each.tokens for each in waiting], self._batch_tokens))
        self._queue = [each for index, each in enumerate(waiting) if index not in chosen]
        self._queued_tokens = sum(each.tokens for each in self._queue)
        return [waiting[index] for index in sorted(chosen)]

    async def _run_in_thread(self, batch: list[_Waiting[Item, Result]]) -> Sequence[Result]:
        loop = asyncio.get_running_loop()
        began_s = time.perf_counter()
        results = await loop.run_in_executor(self._thread, self._run, [each.item for each in batch])
        seconds = time.perf_counter() - began_s
        if len(results) != len(batch):
            raise InternalError(f"the model gave {len(results)} results for {len(batch)} texts")
        self._observe(len(batch), seconds)
        speed = sum(each.tokens for each in batch) / max(seconds, 1e-9)
        before = self._tokens_per_s or speed
        self._tokens_per_s = before + SPEED_SMOOTHING * (speed - before)
        return results

    async def _fail(self, batch: list[_Waiting[Item, Result]], error: Exception) -> None:
        """Give `error` to a text that failed alone; run each alone otherwise: one bad text must not fail the others."""
        if len(batch) == 1:
            if not batch[0].result.done():
                batch[0].result.set_exception(error)
            return
        for each in batch:
            if each.result.done():
                continue
            try:
                result = (await self._run_in_thread([each]))[0]
            except Exception as own_error:
                await self._fail([each], own_error)
            else:
                if not each.result.done():
                    each.result.set_result(result)


def batch_around_oldest(lengths: Sequence[int], batch_tokens: int) -> list[int]:
    """Which of the waiting items run next: index 0, the oldest, so that nobody starves, and those nearest in length.

    `lengths` are tokens, oldest first. Neighbours are added, the nearer first, while the batch padded to its longest
    item has at most `batch_tokens` tokens. Empty for empty input.
    """
    if not lengths:
        return []
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    sorted_lengths = [lengths[index] for index in by_length]
    oldest = first = last = by_length.index(0)  # the batch is by_length[first : last + 1]
    while True:
        items = last - first + 2
        longer_fits = last + 1 < len(by_length) and sorted_lengths[last + 1] * items <= batch_tokens
        shorter_fits = first > 0 and sorted_lengths[last] * items <= batch_tokens
        if not longer_fits and not shorter_fits:
            return by_length[first : last + 1]
        longer_is_nearer = not shorter_fits or (
            longer_fits
            and sorted_lengths[last + 1] - sorted_lengths[oldest] <= sorted_lengths[oldest] - sorted_lengths[first - 1]
        )
        if longer_is_nearer:
            last += 1
        else:
            first -= 1
