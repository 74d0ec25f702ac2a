import threading

import numpy as np
import pytest
import torch

from compress.ahead import Ahead
from compress.order import Order
from compress.tasks import Batch

ORDER = Order(np.array([2, 3, 4, 5]), 2, 0)


def numbered(step: int) -> Batch:
    return Batch({"input_ids": torch.tensor([[step]])}, torch.zeros(0), torch.zeros(0))


def test_the_next_batch_is_made_before_it_is_asked_for_and_none_beyond_the_last() -> None:
    made: list[int] = []
    second = threading.Event()

    def make(step: int) -> Batch:
        made.append(step)
        if step == 4:
            second.set()
        return numbered(step)

    batches = Ahead(make, ORDER, 5)
    for step in (3, 3, 4, 4):  # as from a checkpoint, a batch in two parts
        assert batches.at(step).inputs["input_ids"].item() == step
        assert second.wait(timeout=30)
    batches.close()
    assert made == [3, 4]
    assert batches.waited_s > 0


def test_what_goes_wrong_while_a_batch_is_made_is_said_when_it_is_asked_for() -> None:
    def make(step: int) -> Batch:
        if step == 1:
            raise OSError("the file is gone")
        return numbered(step)

    batches = Ahead(make, ORDER, 3)
    batches.at(0)
    with pytest.raises(OSError, match="the file is gone"):
        batches.at(1)
    batches.close()


def test_padding_is_counted() -> None:
    for step in range(ORDER.steps_per_epoch):
        lengths = ORDER.lengths[ORDER.at(step)]
        assert sorted(lengths) in ([2, 3], [4, 5])
        assert ORDER.tokens_at(step) == lengths.sum()
        assert ORDER.positions_at(step) == 2 * lengths.max()
