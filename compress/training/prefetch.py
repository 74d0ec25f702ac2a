"""Makes the next batch while the current one trains, and counts waiting and padding."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from compress.data.batches import Batch


class Prefetcher:
    """The batches of a training; a thread makes one batch ahead.

    Args:
        make: gives the batch of a step (from 0); its result depends on the step alone.
        steps: the number of steps; no batch is made beyond them.
    """

    def __init__(self, make: Callable[[int], Batch], steps: int) -> None:
        self.make, self.steps = make, steps
        self.waited_s = 0.0
        self.tokens = self.positions = 0  # of all batches so far: real tokens; with padding
        self._last = -1
        self._maker = ThreadPoolExecutor(1, "batches")
        self._made: dict[int, Future[Batch]] = {}

    def at(self, step: int) -> Batch:
        """The batch of `step`; the batch of the next step is started."""
        for wanted in range(step, min(step + 2, self.steps)):
            if wanted not in self._made:
                self._made[wanted] = self._maker.submit(self.make, wanted)
        began = time.perf_counter()
        batch = self._made[step].result()
        self.waited_s += time.perf_counter() - began
        self._made = {wanted: made for wanted, made in self._made.items() if wanted >= step}
        if step != self._last:  # count a batch once, though each of its shares asks for it
            mask = batch.inputs["attention_mask"]
            self.tokens += int(mask.count_nonzero())
            self.positions += mask.numel()
            self._last = step
        return batch

    def close(self) -> None:
        """Stop making batches."""
        self._maker.shutdown(cancel_futures=True)
