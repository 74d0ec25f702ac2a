import threading

import pytest
import torch
from patience import PATIENCE_S

from compress.data.batches import Batch
from compress.training.metrics import Prefetcher


def numbered(step: int) -> Batch:
    ids = torch.tensor([[step]])
    return Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.zeros(0), torch.zeros(0))


def test_the_next_batch_is_made_before_it_is_asked_for_and_none_beyond_the_last() -> None:
    made: list[int] = []
    second = threading.Event()

    def make(step: int) -> Batch:
        made.append(step)
        if step == 4:
            second.set()
        return numbered(step)

    batches = Prefetcher(make, 5)
    for step in (3, 3, 4, 4):  # as from a checkpoint, a batch in two parts
        assert batches.at(step).inputs["input_ids"].item() == step
        assert second.wait(timeout=PATIENCE_S)
    batches.close()
    assert made == [3, 4]
    assert batches.waited_s > 0


def test_what_goes_wrong_while_a_batch_is_made_is_said_when_it_is_asked_for() -> None:
    def make(step: int) -> Batch:
        if step == 1:
            raise OSError("the file is gone")
        return numbered(step)

    batches = Prefetcher(make, 3)
    batches.at(0)
    with pytest.raises(OSError, match="the file is gone"):
        batches.at(1)
    batches.close()


def test_padding_is_counted_once_a_step() -> None:
    def make(step: int) -> Batch:
        mask = torch.ones(2, 4 + step, dtype=torch.long)
        mask[1, 3:] = 0
        return Batch({"attention_mask": mask}, torch.zeros(0), torch.zeros(0))

    batches = Prefetcher(make, 2)
    for step in (0, 0, 1):
        batches.at(step)
    batches.close()
    assert (batches.tokens, batches.positions) == (4 + 3 + 5 + 3, 8 + 10)
