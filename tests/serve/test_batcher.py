import asyncio
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.batcher import Batcher, batch_around_oldest
from serve.errors import InternalError, Overloaded

# In these tests an item is a number, its length in tokens is the number, and the model adds 1000.


class Model:
    """Adds 1000; remembers its batches; `gate` holds it up until set."""

    def __init__(self, *, held: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.begun = threading.Event()
        if not held:
            self.gate.set()

    def __call__(self, items: list[int]) -> list[int]:
        self.begun.set()
        assert self.gate.wait(timeout=10)
        self.batches.append(list(items))
        return [item + 1000 for item in items]


def length(item: int) -> int:
    return item


async def busy(batcher: Batcher[int, int], model: Model) -> asyncio.Task[list[int]]:
    """A task whose single item is in the model, which is held."""
    first = asyncio.create_task(batcher.results([1]))
    await asyncio.to_thread(model.begun.wait, 10)
    return first


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(st.lists(st.integers(1, 60), max_size=8), max_size=12), batch_tokens=st.integers(1, 200))
def test_every_caller_gets_its_own_results_in_its_order(requests: list[list[int]], batch_tokens: int) -> None:
    model = Model()

    async def scenario() -> list[list[int]]:
        batcher = Batcher(model, length, batch_tokens=batch_tokens)
        answers = await asyncio.gather(*(batcher.results(items) for items in requests))
        assert batcher.waiting == 0
        await batcher.close()
        return answers

    assert asyncio.run(scenario()) == [[item + 1000 for item in items] for items in requests]
    assert sorted(item for batch in model.batches for item in batch) == sorted(
        item for items in requests for item in items
    )
    assert all(len(batch) == 1 or max(batch) * len(batch) <= batch_tokens for batch in model.batches)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 512), max_size=40), batch_tokens=st.integers(1, 4096))
def test_a_batch_holds_the_oldest_and_neighbours_in_length(lengths: Sequence[int], batch_tokens: int) -> None:
    chosen = batch_around_oldest(lengths, batch_tokens)

    assert len(set(chosen)) == len(chosen)
    if not lengths:
        assert chosen == []
        return
    assert 0 in chosen
    inside = [lengths[index] for index in chosen]
    outside = [lengths[index] for index in range(len(lengths)) if index not in chosen]
    assert len(inside) == 1 or max(inside) * len(inside) <= batch_tokens
    # Nothing left out lies strictly between what was taken.
    assert all(each <= min(inside) or each >= max(inside) for each in outside)
    # It stopped only because one more would not fit, at any end.
    wider = [max([*inside, each]) * (len(inside) + 1) for each in outside]
    assert all(tokens > batch_tokens for tokens in wider)


def test_the_nearer_neighbour_in_length_is_taken_first() -> None:
    assert sorted(batch_around_oldest([10, 7, 12], batch_tokens=24)) == [0, 2]
    assert sorted(batch_around_oldest([10, 8, 13], batch_tokens=26)) == [0, 1]


def test_what_comes_while_the_model_is_busy_shares_the_next_batch() -> None:
    model = Model(held=True)

    async def scenario() -> None:
        batcher = Batcher(model, length)
        first = await busy(batcher, model)
        others = [asyncio.create_task(batcher.results([item])) for item in (5, 7, 6)]
        await asyncio.sleep(0)
        assert batcher.waiting == 3
        model.gate.set()
        assert await first == [1001]
        assert [await other for other in others] == [[1005], [1007], [1006]]
        await batcher.close()

    asyncio.run(scenario())
    assert model.batches == [[1], [5, 7, 6]]


def test_a_cancelled_caller_takes_its_items_out_of_the_queue() -> None:
    model = Model(held=True)

    async def scenario() -> None:
        batcher = Batcher(model, length)
        first = await busy(batcher, model)
        leaving = asyncio.create_task(batcher.results([5, 6]))
        staying = asyncio.create_task(batcher.results([7]))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        model.gate.set()
        assert await staying == [1007]
        await first
        await batcher.close()

    asyncio.run(scenario())
    assert model.batches == [[1], [7]]


def test_a_caller_that_leaves_during_its_batch_does_not_hurt_the_others() -> None:
    model = Model(held=True)

    async def scenario() -> None:
        batcher = Batcher(model, length)
        leaving = await busy(batcher, model)
        leaving.cancel()
        staying = asyncio.create_task(batcher.results([2]))
        model.gate.set()
        assert await staying == [1002]
        await batcher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("limits", "more"),
    [({"max_texts": 2}, [5]), ({"max_tokens": 20}, [5])],
    ids=["too-many-texts", "too-many-tokens"],
)
def test_a_full_queue_refuses_and_says_when_to_come_again(limits: dict[str, int], more: list[int]) -> None:
    model = Model(held=True)

    async def scenario() -> None:
        batcher = Batcher(model, length, **limits)
        first = await busy(batcher, model)
        waiting = asyncio.create_task(batcher.results([9, 8]))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            await batcher.results(more)
        assert caught.value.retry_after_s > 0
        assert "2 texts are waiting" in caught.value.message
        model.gate.set()
        assert await waiting == [1009, 1008]
        await first
        # The queue has room again, and takes even a request that is larger than its bound.
        assert await batcher.results([30, 30, 30]) == [1030, 1030, 1030]
        await batcher.close()

    asyncio.run(scenario())


def test_one_bad_text_fails_alone() -> None:
    def model(items: list[int]) -> list[int]:
        if 13 in items:
            raise InternalError("thirteen")
        return items

    async def scenario() -> list[object]:
        batcher = Batcher(model, length)
        answers = await asyncio.gather(*(batcher.results([item]) for item in (12, 13, 14)), return_exceptions=True)
        await batcher.close()
        return list(answers)

    good, bad, also_good = asyncio.run(scenario())
    assert (good, also_good) == ([12], [14])
    assert isinstance(bad, InternalError)


def test_the_rest_of_a_request_that_failed_is_not_run() -> None:
    seen: list[int] = []

    def model(items: list[int]) -> list[int]:
        seen.extend(items)
        if 13 in items:
            raise InternalError("thirteen")
        return items

    async def scenario() -> None:
        batcher = Batcher(model, length, batch_tokens=1)
        with pytest.raises(InternalError, match="thirteen"):
            await batcher.results([13, 100, 101, 102])
        await batcher.close()

    asyncio.run(scenario())
    # The next one may have begun before the failure was heard of.
    assert set(seen) <= {13, 100}


@pytest.mark.parametrize("items", [[1], [1, 2]], ids=["alone", "in-company"])
def test_a_model_that_loses_a_result_is_found_out(items: list[int]) -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](lambda batch: [], length)
        with pytest.raises(InternalError, match="0 results for"):
            await batcher.results(items)
        await batcher.close()

    asyncio.run(scenario())


def test_closing_waits_for_what_was_accepted() -> None:
    model = Model(held=True)

    async def scenario() -> None:
        batcher = Batcher(model, length)
        first = await busy(batcher, model)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        assert not closing.done()
        model.gate.set()
        await closing
        assert await first == [1001]

    asyncio.run(scenario())


def test_each_batch_is_observed() -> None:
    seen: list[tuple[int, float]] = []

    async def scenario() -> None:
        batcher = Batcher(
            Model(), length, batch_tokens=10, observe=lambda items, seconds: seen.append((items, seconds))
        )
        await batcher.results([5, 5, 9])
        await batcher.close()

    asyncio.run(scenario())
    assert [items for items, _ in seen] == [2, 1]
    assert all(seconds >= 0 for _, seconds in seen)
