"""Runs many small computations in parallel, each on its own core.

Torch divides every operation among the cores. An operation on a tile takes 0.1 ms, and dividing it takes about as long, so
two cores are hardly faster than one.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def on_cores(work: Callable[[Item], Answer], items: Iterable[Item]) -> list[Answer]:
    """`work(item)` for each of `items`, in their order, on as many cores as torch may use; without gradients.

    One thread on one core computes each, so its bits do not depend on the number of cores.
    """
    items, cores = list(items), torch.get_num_threads()

    def alone(item: Item) -> Answer:
        with torch.no_grad():
            return work(item)

    if cores == 1:
        return [alone(item) for item in items]
    return list(_workers(cores).map(alone, items))


@cache
def _workers(cores: int) -> ThreadPoolExecutor:
    everyone = Barrier(cores)

    def begin() -> None:
        # In each thread torch's first call adopts the process's number; make it now, so that it cannot override ours later.
        torch.get_num_threads()
        torch.set_num_threads(1)
        everyone.wait()

    workers = ThreadPoolExecutor(cores, "core", initializer=begin)
    for _ in range(cores):
        workers.submit(lambda: None)  # each call starts one more worker, as none is idle until all have begun
    assert workers.submit(torch.get_num_threads).result() == 1
    torch.set_num_threads(cores)  # threads that torch starts later take the number that was set last
    return workers
