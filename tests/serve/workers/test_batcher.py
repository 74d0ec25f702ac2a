import asyncio
import contextlib
import functools
import heapq
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_loop import VirtualLoop

from serve.errors import BadInput, Overloaded, Unavailable
from serve.workers.batcher import Batcher, Cores, Done, Run, picked

# In these tests an item is a number, its length in tokens is the number, and a `Computer` adds 1000.


class Computer:
    """Adds 1000 and keeps its batches; `held`, it waits until `gate` is set. 13 is a bad item."""

    def __init__(self, *, held: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        if not held:
            self.gate.set()

    async def __call__(self, items: list[int], done: Done[int]) -> None:
        self.batches.append(list(items))
        await self.gate.wait()
        await asyncio.sleep(0)
        for place, item in enumerate(items):
            done(place, BadInput("thirteen") if item == 13 else item + 1000)


def paced(*, tokens_per_s: float = math.inf, fixed_s: float = 0.0) -> Run[int, int]:
    """Takes a time for its tokens and one for each batch; the result of an item is the item."""

    async def compute(items: list[int], done: Done[int]) -> None:
        await asyncio.sleep(fixed_s + sum(items) / tokens_per_s)
        for place, item in enumerate(items):
            done(place, item)

    return compute


_made: list[Batcher[int, int]] = []


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a test of a coroutine, and closes the batchers that it makes. A busy machine does not change their estimates."""

    @functools.wraps(test)
    def run_test(*arguments: Any, **named: Any) -> None:
        async def scenario() -> None:
            _made.clear()
            await test(*arguments, **named)
            for batcher in _made:
                await batcher.close()

        with asyncio.Runner(loop_factory=lambda: VirtualLoop(turn_s=1e-6)) as runner:
            runner.run(scenario())

    return run_test


def make(compute: Run[int, int] | None = None, **limits: Any) -> Batcher[int, int]:
    """A batcher that computes with `compute`; without it, one that is not open."""
    batcher = Batcher[int, int](clock=asyncio.get_running_loop().time, **limits)
    if compute:
        batcher.open(compute)
    _made.append(batcher)
    return batcher


def ask(batcher: Batcher[int, int], *items: int) -> "asyncio.Task[list[int]]":
    return asyncio.create_task(batcher.results(items, items))


async def turns(count: int = 10) -> None:
    """Lets what is under way go on."""
    for _ in range(count):
        await asyncio.sleep(0)


@settings(max_examples=80)
@given(
    requests=st.lists(st.lists(st.integers(14, 60), max_size=8), max_size=12),
    batch_tokens=st.integers(1, 200),
)
@in_virtual_time
async def test_callers_get_their_results_in_order(requests: list[list[int]], batch_tokens: int) -> None:
    computer = Computer()
    batcher = make(computer, batch_tokens=batch_tokens)
    answers = await asyncio.gather(*(batcher.results(items, items) for items in requests))
    assert answers == [[item + 1000 for item in items] for items in requests]
    assert (batcher.waiting, batcher.wait_s) == (0, 0)
    computed = [item for batch in computer.batches for item in batch]
    assert sorted(computed) == sorted(item for items in requests for item in items)
    assert all(len(batch) == 1 or sum(batch) <= batch_tokens for batch in computer.batches)


@settings(max_examples=200)
@given(
    candidates=st.lists(st.tuples(st.integers(1, 512), st.booleans()), min_size=1, max_size=40),
    batch_tokens=st.integers(1, 4096),
)
def test_a_batch_has_the_first_item_then_those_that_waited_long_then_those_of_similar_length(
    candidates: list[tuple[int, bool]], batch_tokens: int
) -> None:
    tokens, waited_long = [each[0] for each in candidates], [each[1] for each in candidates]
    chosen = picked(tokens, waited_long, batch_tokens)
    assert len(set(chosen)) == len(chosen)
    assert 0 in chosen
    assert len(chosen) == 1 or sum(tokens[place] for place in chosen) <= batch_tokens
    left = [place for place in range(len(tokens)) if place not in chosen]
    in_order = max((place for place, long in enumerate(waited_long) if long), default=0) + 1
    if min(left, default=in_order) < in_order:  # none passes one that waited long, nor those before it
        assert chosen == list(range(len(chosen)))
    else:
        farthest = max((abs(tokens[place] - tokens[0]) for place in chosen if place >= in_order), default=0)
        assert all(abs(tokens[place] - tokens[0]) >= farthest for place in left)


@in_virtual_time
async def test_an_idle_model_gets_an_item_at_once_and_a_busy_one_gets_batches() -> None:
    reasons: list[tuple[str, int]] = []
    computer = Computer(held=True)
    batcher = make(computer, batch_tokens=20, released=lambda why, items: reasons.append((why, items)))
    first = ask(batcher, 1)
    await turns()
    assert computer.batches == [[1]]
    others = [ask(batcher, item) for item in (5, 7, 6, 9)]
    await turns()
    assert (batcher.waiting, len(computer.batches)) == (4, 1)
    computer.gate.set()
    assert await first == [1001]
    assert [await other for other in others] == [[1005], [1007], [1006], [1009]]
    assert computer.batches == [[1], [5, 7, 6], [9]]
    await turns()
    assert await ask(batcher, 2) == [1002]
    assert reasons == [("idle", 1), ("full", 3), ("freed", 1), ("idle", 1)]


@in_virtual_time
async def test_an_item_waits_for_the_batch_before_it_only_while_no_core_is_free() -> None:
    taken, computer = [0, 1], Computer(held=True)  # the other process computes a batch
    batcher = make(cores=Cores(taken, number=0, most=2))
    batcher.open(computer, at_once=2)
    items = [ask(batcher, 1)]
    await turns()
    items.append(ask(batcher, 2))
    await turns()
    assert (computer.batches, taken) == ([[1]], [1, 1])
    taken[1] = 0
    items.append(ask(batcher, 3))
    await turns()
    assert (computer.batches, taken) == ([[1], [2, 3]], [2, 0])
    computer.gate.set()
    assert await asyncio.gather(*items) == [[1001], [1002], [1003]]
    await turns()
    assert taken == [0, 0]


@in_virtual_time
async def test_a_caller_of_many_items_delays_a_caller_of_one_by_one_batch() -> None:
    computer = Computer(held=True)
    batcher = make(computer, batch_tokens=100, max_wait_ms=0)
    many = ask(batcher, *[10] * 1000)
    await turns()
    single = ask(batcher, 11)
    await turns()
    computer.gate.set()
    assert await single == [1011]
    assert [11 in batch for batch in computer.batches[:3]].count(True) == 1
    assert not many.done()
    assert await many == [1010] * 1000


@in_virtual_time
async def test_two_callers_of_many_items_share_the_model_evenly() -> None:
    computer = Computer(held=True)
    batcher = make(computer, batch_tokens=100)
    early, late = ask(batcher, *[20] * 200), ask(batcher, *[21] * 200)
    await turns()
    computer.gate.set()
    assert (await early, await late) == ([1020] * 200, [1021] * 200)
    half = [item for batch in computer.batches for item in batch][:200]
    assert 80 <= half.count(20) <= 120


@in_virtual_time
async def test_callers_of_a_few_items_are_served_in_order_of_arrival() -> None:
    computer = Computer(held=True)
    batcher = make(computer, batch_tokens=100, max_wait_ms=0)
    first = ask(batcher, 100)
    await turns()
    callers = [ask(batcher, 5, 5, 5, 5) for _ in range(5)] + [ask(batcher, 2, 6, 6, 6) for _ in range(5)]
    await turns()
    computer.gate.set()
    await asyncio.gather(first, *callers)
    assert computer.batches == [[100], [5] * 20, [2, 6, 6, 6] * 5]


@in_virtual_time
async def test_a_large_request_gets_its_share_among_endless_small_ones() -> None:
    computer = Computer()
    batcher = make(computer, batch_tokens=100)

    async def without_end() -> None:
        while True:
            await batcher.results([20], [20])

    streams = [asyncio.create_task(without_end()) for _ in range(50)]
    await turns()
    async with asyncio.timeout(20):
        await batcher.results([21] * 20, [21] * 20)
    # Its share, one of 51, is two tokens of each batch of 100; it has 420.
    assert len(computer.batches) <= 300
    for stream in streams:
        stream.cancel()
    await asyncio.wait(streams)


@in_virtual_time
async def test_a_large_request_that_waited_long_gets_no_more_than_its_share() -> None:
    async def small_requests_answered(max_wait_ms: float) -> int:
        """How many during a large one, of callers who send one item again and again."""
        batcher = make(paced(fixed_s=0.003), batch_tokens=100, max_wait_ms=max_wait_ms)
        large = ask(batcher, *[10] * 100)
        answered = 0

        async def small() -> None:
            nonlocal answered
            while not large.done():
                await batcher.results([12], [12])
                answered += 1

        await asyncio.gather(large, *(small() for _ in range(30)))
        return answered

    in_strict_order = await small_requests_answered(0)
    assert await small_requests_answered(2) > 0.8 * in_strict_order


@pytest.mark.parametrize(
    ("max_wait_ms", "items", "batches"),
    [
        (10_000, (20, 30, 70, 20, 20, 20, 30, 30), [[20, 20, 20, 20], [30, 30, 30]]),
        (10, (20, 30, 70, 20, 20, 20, 30, 30), [[20, 20, 20, 20], [30, 70]]),
        (0, (20, 30, 70, 20, 20, 20, 30, 30), [[20, 30], [70, 20]]),
        # 70 waits behind the two that came first, which is not to be passed over.
        (10, (50, 50, 20, 70, 20, 20, 20), [[50, 50], [20, 20, 20, 20]]),
    ],
)
@in_virtual_time
async def test_an_item_is_passed_over_for_similar_lengths_until_max_wait_ms(
    max_wait_ms: float, items: tuple[int, ...], batches: list[list[int]]
) -> None:
    computer = Computer(held=True)
    batcher = make(computer, batch_tokens=100, max_wait_ms=max_wait_ms)
    asked = [ask(batcher, 1)]
    await turns()
    asked += [ask(batcher, item) for item in items]
    await asyncio.sleep(0.03)  # behind the first batch
    computer.gate.set()
    computer.gate.clear()  # one batch goes on, the next is held
    await asyncio.sleep(0.03)  # some were passed over for so long
    computer.gate.set()
    await asyncio.gather(*asked)
    assert computer.batches[1:3] == batches


@in_virtual_time
async def test_a_cancelled_caller_takes_its_items_out_of_the_queue() -> None:
    computer = Computer(held=True)
    batcher = make(computer, max_texts=3, max_tokens=30)
    first = ask(batcher, 1)
    await turns()
    leaving, staying = ask(batcher, 5, 6), ask(batcher, 7)
    await turns()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert batcher.waiting == 1
    others = ask(batcher, 20)  # there is room again for its item and its tokens
    await turns()
    assert batcher.waiting == 2
    computer.gate.set()
    assert (await staying, await first, await others) == ([1007], [1001], [1020])
    assert computer.batches == [[1], [7, 20]]


@in_virtual_time
async def test_each_cancelled_caller_costs_its_own_items_and_not_the_whole_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rebuilt: list[int] = []
    monkeypatch.setattr(
        heapq, "heapify", lambda queue, heapify=heapq.heapify: rebuilt.append(len(queue)) or heapify(queue)
    )
    computer = Computer(held=True)
    batcher = make(computer, max_texts=10_000, max_tokens=100_000)
    first = ask(batcher, 1)
    await turns()
    leaving = [ask(batcher, 5, 6) for _ in range(1000)]
    staying = [ask(batcher, n) for n in (7, 8)]
    await turns()
    for each in leaving:
        each.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    assert batcher.waiting == 2
    assert sum(rebuilt) <= 2002  # what is left each time the queue is halved
    computer.gate.set()
    assert [await each for each in (first, *staying)] == [[1001], [1007], [1008]]
    assert computer.batches == [[1], [7, 8]]
    assert batcher.wait_s == 0


@in_virtual_time
async def test_a_caller_cancelled_during_its_batch_does_not_affect_the_others() -> None:
    computer = Computer(held=True)
    batcher = make(computer)
    leaving, beside = ask(batcher, 1), ask(batcher, 3)
    await turns()
    leaving.cancel()
    after = ask(batcher, 2)
    computer.gate.set()
    assert (await beside, await after) == ([1003], [1002])


@in_virtual_time
async def test_an_error_set_on_the_future_of_a_caller_ends_its_wait_and_drops_its_items() -> None:
    computer = Computer(held=True)
    batcher = make(computer, batch_tokens=5)
    answered = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(batcher.results([5, 6], [5, 6], answered))
    await turns()
    answered.set_exception(TimeoutError())
    with pytest.raises(TimeoutError):
        await waiting
    assert batcher.waiting == 0
    computer.gate.set()
    assert await ask(batcher, 2) == [1002]
    assert computer.batches == [[5], [2]]


@pytest.mark.parametrize("limits", [{"max_texts": 2}, {"max_tokens": 20}], ids=["too-many-texts", "too-many-tokens"])
@in_virtual_time
async def test_a_full_queue_refuses_and_says_when_to_try_again(limits: dict[str, int]) -> None:
    computer = Computer(held=True)
    batcher = make(computer, **limits)
    first = ask(batcher, 1)
    await turns()
    waiting = ask(batcher, 9, 8)
    await turns()
    with pytest.raises(Overloaded) as refused:
        await batcher.results([5], [5])
    assert refused.value.retry_after_s > 0
    assert "texts waiting: 2" in refused.value.message
    computer.gate.set()
    assert (await waiting, await first) == ([1009, 1008], [1001])
    # An empty queue takes also a request that is larger than its limit.
    assert await batcher.results([30, 30, 30], [30, 30, 30]) == [1030, 1030, 1030]


@in_virtual_time
async def test_a_queue_that_would_take_longer_than_max_queue_s_is_full() -> None:
    batcher = make(paced(fixed_s=0.05), batch_tokens=10, max_queue_s=0.2)
    await batcher.results([10], [10])  # 200 tokens a second are known now
    answers = await asyncio.gather(*(ask(batcher, 10) for _ in range(20)), return_exceptions=True)
    refused = [each for each in answers if isinstance(each, Overloaded)]
    assert 10 < len(refused) < 19  # about four fit into 0.2 s
    assert all(0.1 < each.retry_after_s < 0.6 for each in refused)


@in_virtual_time
async def test_a_large_request_fills_the_queue_for_others_like_it_and_not_for_smaller_ones() -> None:
    batcher = make(paced(tokens_per_s=5000), batch_tokens=100, max_queue_s=0.2)
    for _ in range(15):
        await batcher.results([100], [100])  # 5000 tokens a second are known now
    large = ask(batcher, *[20] * 200)  # 0.8 s
    await turns()
    with pytest.raises(Overloaded) as refused_like_it:
        await batcher.results([20] * 200, [20] * 200)
    assert refused_like_it.value.retry_after_s > 0.5
    assert batcher.full_s == 0
    assert await batcher.results([20] * 10, [20] * 10) == [20] * 10  # four packets
    for _ in range(5):
        assert await batcher.results([12], [12]) == [12]
    assert not large.done()
    small = await asyncio.gather(*(batcher.results([20], [20]) for _ in range(200)), return_exceptions=True)
    refused = [each for each in small if isinstance(each, Overloaded)]
    assert 100 < len(refused) < 170  # about 50 fit into 0.2 s; they wait for one another
    assert await large == [20] * 200


@in_virtual_time
async def test_long_items_do_not_put_the_rest_of_a_large_request_before_the_next_caller() -> None:
    computer = Computer()
    batcher = make(computer, batch_tokens=100)
    large = ask(batcher, *[20] * 1000)
    await turns()
    for _ in range(3):
        await batcher.results([5000], [5000])
    before = len(computer.batches)
    await batcher.results([12], [12])
    assert len(computer.batches) - before <= 4
    assert not large.done()
    await large


@in_virtual_time
async def test_small_batches_do_not_make_the_queue_seem_slow() -> None:
    batcher = make(paced(fixed_s=0.002), batch_tokens=1000, max_queue_s=0.1)
    await batcher.results([100] * 100, [100] * 100)
    for _ in range(50):
        await batcher.results([1], [1])
    # Ten full batches take 20 ms: there is room behind them.
    many, one = ask(batcher, *[100] * 100), ask(batcher, 1)
    assert (await many, await one) == ([100] * 100, [1])


@pytest.mark.parametrize("measured", [True, False], ids=["at-a-known-speed", "at-an-unknown-speed"])
@in_virtual_time
async def test_an_item_is_refused_while_a_long_one_computes_for_longer_than_max_queue_s(measured: bool) -> None:
    batcher = make(paced(tokens_per_s=5000), max_queue_s=0.5)
    if measured:
        await batcher.results([500], [500])
    long = ask(batcher, 50_000)  # 10 s
    await asyncio.sleep(3)
    for tokens in (10, 50_000):
        with pytest.raises(Overloaded, match="busy with long texts") as refused:
            await batcher.results([tokens], [tokens])
    assert batcher.full_s > 0
    if measured:
        assert 6 < refused.value.retry_after_s < 7
        await asyncio.sleep(6.5)
        assert batcher.full_s == 0
        assert await batcher.results([10], [10]) == [10]
    assert await long == [50_000]
    assert await batcher.results([10], [10]) == [10]


@in_virtual_time
async def test_an_item_may_wait_for_one_batch_however_slow_the_model_is() -> None:
    batcher = make(paced(tokens_per_s=5000), max_queue_s=0.05)  # half of what a batch takes
    await batcher.results([500], [500])
    under_way = ask(batcher, 500)
    await turns()
    assert await batcher.results([10], [10]) == [10]
    await under_way


@settings(max_examples=60)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from([0.0, 0.01, 0.1, 1.0]), st.sampled_from([5, 50, 250, 3000, 20_000])),
        min_size=5,
        max_size=40,
    )
)
@in_virtual_time
async def test_no_short_item_waits_much_longer_than_max_queue_s(arrivals: list[tuple[float, int]]) -> None:
    batcher = make(paced(tokens_per_s=5000), max_queue_s=0.5)
    await batcher.results([500], [500])
    waits_s: list[float] = []
    now_s = asyncio.get_running_loop().time

    async def ask_once(tokens: int) -> None:
        began_s = now_s()
        with contextlib.suppress(Overloaded):
            await batcher.results([tokens], [tokens])
            if tokens <= 250:
                waits_s.append(now_s() - began_s)

    asked = []
    for pause_s, tokens in arrivals:
        await asyncio.sleep(pause_s)
        asked.append(asyncio.create_task(ask_once(tokens)))
    await asyncio.gather(*asked)
    # Beyond the half second: the batch that it waits for, and its own.
    assert max(waits_s, default=0.0) < 0.5 + 3 * 512 / 5000, waits_s


@in_virtual_time
async def test_a_bad_item_fails_alone() -> None:
    batcher = make(Computer())
    good, bad, also_good = await asyncio.gather(
        *(batcher.results([item], [item]) for item in (12, 13, 14)), return_exceptions=True
    )
    assert (good, also_good) == ([1012], [1014])
    assert isinstance(bad, BadInput)


@in_virtual_time
async def test_the_rest_of_a_failed_request_is_not_computed() -> None:
    computer = Computer()
    batcher = make(computer, batch_tokens=1)
    items = [13, *range(100, 200)]
    with pytest.raises(BadInput, match="thirteen"):
        await batcher.results(items, items)
    await batcher.close()
    assert len(computer.batches) < 5  # one or two may begin before the failure is known


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "after-a-result"])
@in_virtual_time
async def test_a_batch_that_raises_fails_the_items_without_a_result_and_no_other_batch(at_once: bool) -> None:
    computer = Computer()

    async def fail_later(items: list[int], done: Done[int]) -> None:
        done(0, items[0] + 1000)
        raise ValueError("seven")

    def compute(items: list[int], done: Done[int]) -> Awaitable[None]:
        if at_once and 7 in items:
            raise ValueError("seven")
        return fail_later(items, done) if 7 in items else computer(items, done)

    batcher = make(compute, batch_tokens=20)
    six, seven, other = await asyncio.gather(*(ask(batcher, item) for item in (6, 7, 15)), return_exceptions=True)
    assert (str(six), str(seven), other) == ("seven" if at_once else "[1006]", "seven", [1015])


@pytest.mark.parametrize("items", [[1], [1, 2]], ids=["alone", "beside-another"])
@in_virtual_time
async def test_an_item_that_gets_no_result_fails(items: list[int]) -> None:
    async def forgetful(items: list[int], done: Done[int]) -> None:
        for place in range(1, len(items)):
            done(place, 0)

    batcher = make(forgetful)
    with pytest.raises(Unavailable, match="no answer to this text"):
        await batcher.results(items, items)


@in_virtual_time
async def test_items_wait_until_the_batcher_is_open_however_many_they_are() -> None:
    batcher = make(max_queue_s=0.1)
    early = [ask(batcher, 20) for _ in range(50)]
    await turns()
    assert (batcher.waiting, batcher.full_s) == (50, 0)
    batcher.open(Computer())
    assert await asyncio.gather(*early) == [[1020]] * 50


@in_virtual_time
async def test_after_give_up_all_items_fail_until_the_batcher_is_opened_again() -> None:
    stuck = Computer(held=True)
    batcher = make(stuck, batch_tokens=5)
    asked = [ask(batcher, 3), ask(batcher, 4)]  # one is computed, one waits
    await turns()
    batcher.give_up("the model is broken")
    for each in (*asked, ask(batcher, 3)):
        with pytest.raises(Unavailable, match="the model is broken"):
            await each
    assert (batcher.waiting, stuck.batches) == (0, [[3]])
    batcher.open(Computer())
    again = ask(batcher, 3)
    stuck.gate.set()
    assert await again == [1003]
    assert stuck.batches == [[3]]


@in_virtual_time
async def test_closing_waits_for_accepted_items_and_refuses_new_ones() -> None:
    computer = Computer(held=True)
    batcher = make(computer, batch_tokens=5)
    first, queued = ask(batcher, 1), ask(batcher, 5, 5)
    await turns()
    closing = asyncio.create_task(batcher.close())
    await turns()
    assert not closing.done()
    with pytest.raises(Unavailable, match="being closed"):
        await batcher.results([2], [2])
    computer.gate.set()
    await closing
    assert (first.result(), queued.result()) == ([1001], [1005, 1005])


@in_virtual_time
async def test_closing_a_batcher_that_was_never_open_fails_its_items() -> None:
    batcher = make()
    waiting = ask(batcher, 1)
    await turns()
    await batcher.close()
    with pytest.raises(Unavailable, match="being closed"):
        await waiting
