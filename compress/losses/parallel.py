"""Many small computations side by side, each on a core of its own.

Torch divides every single operation among the cores. On a tile an operation takes a tenth of a millisecond, and handing
its parts out takes about as long: two cores are then hardly faster than one.
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
    """What `work` makes of each of `items`, in their order, on as many cores as torch may use; without gradients.

    Each is computed by one thread on one core, so its bits do not depend on how many there are.
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
        # Asked for the first time in a thread torch takes the number of the process, and would do so later over ours.
        torch.get_num_threads()
        torch.set_num_threads(1)
        everyone.wait()

    workers = ThreadPoolExecutor(cores, "core", initializer=begin)
    for _ in range(cores):
        workers.submit(lambda: None)  # each starts one more, since none is idle until all have begun
    assert workers.submit(torch.get_num_threads).result() == 1
    torch.set_num_threads(cores)  # the number last set is also what threads begin with that torch starts later
    return workers
