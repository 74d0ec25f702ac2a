import asyncio
import contextlib
import functools
import heapq
import math
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_loop import VirtualLoop

from serve.errors import BadInput, Overloaded, Unavailable
from serve.workers.batcher import Batcher, Done, picked

# In these tests an item is a number, its length in tokens is the number, and a slot adds 1000.


Found = TypeVar("Found")


class Computer:
    """A slot that adds 1000 and remembers its batches; `gate` holds it up until set."""

    def __init__(self, *, held: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        if not held:
            self.gate.set()

    async def __call__(self, items: list[int], done: Done[int]) -> None:
        self.batches.append(list(items))
        self.begun.set()
        await self.gate.wait()
        await asyncio.sleep(0)
        for place, item in enumerate(items):
            done(place, BadInput("thirteen") if item == 13 else item + 1000)


def ask(batcher: Batcher[int, int], *items: int) -> "asyncio.Task[list[int]]":
    return asyncio.create_task(batcher.results(items, items))


def loop_in_time() -> VirtualLoop:
    """What a busy machine does to the batcher's estimates is not seen in it."""
    return VirtualLoop(turn_s=1e-6)


def run(scenario: Callable[[], Coroutine[Any, Any, Found]]) -> Found:
    with pytest.MonkeyPatch.context() as patched, asyncio.Runner(loop_factory=loop_in_time) as runner:
        clock = SimpleNamespace(perf_counter=runner.get_loop().time)
        patched.setattr("serve.workers.batcher.time", clock)
        return runner.run(scenario())


def paced(
    *, tokens_per_s: float = math.inf, fixed_s: float = 0.0, one_at_a_time: bool = False, told_every_s: float = 0.0
) -> Callable[[list[int], Done[int]], Awaitable[None]]:
    """A slot that takes a time for its tokens and one for each batch, and gives back what it was given.

    It may compute one batch at a time, although it has several, and tell of them at certain times only.
    """
    turn = asyncio.Semaphore(1 if one_at_a_time else 1000)

    async def compute(items: list[int], done: Done[int]) -> None:
        async with turn:
            await asyncio.sleep(fixed_s + sum(items) / tokens_per_s)
        if told_every_s:
            await asyncio.sleep(told_every_s - asyncio.get_running_loop().time() % told_every_s)
        for place, item in enumerate(items):
            done(place, item)

    return compute


_made: list[Batcher[int, int]] = []


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a test of a coroutine, and closes what `batching` made in it."""

    @functools.wraps(test)
    def run_test(*arguments: Any, **named: Any) -> None:
        async def scenario() -> None:
            _made.clear()
            await test(*arguments, **named)
            for batcher in _made:
                await batcher.close()

        run(scenario)

    return run_test


def made(*slots: Callable[[list[int], Done[int]], Awaitable[None]], **settings: Any) -> Batcher[int, int]:
    """A batcher with these slots."""
    batcher = Batcher[int, int](**settings)
    for slot in slots:
        batcher.add_slot(slot)
    _made.append(batcher)
    return batcher


async def batching(*, slots: int = 1, held: bool = False, **settings: Any) -> tuple[Any, ...]:
    """A batcher, and its slots, which are idle."""
    computers = [Computer(held=held) for _ in range(slots)]
    batcher = made(*computers, **settings)
    await turns()
    return batcher, *computers


async def turns(count: int = 10) -> None:
    """Lets what is under way go on."""
    for _ in range(count):
        await asyncio.sleep(0)


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(st.lists(st.integers(14, 60), max_size=8), max_size=12),
    batch_tokens=st.integers(1, 200),
    slots=st.integers(1, 3),
)
@in_virtual_time
async def test_callers_get_their_results_in_order(requests: list[list[int]], batch_tokens: int, slots: int) -> None:
    batcher = made(batch_tokens=batch_tokens)
    computers = [Computer() for _ in range(slots)]
    for computer in computers:
        batcher.add_slot(computer)
    answers = await asyncio.gather(*(batcher.results(items, items) for items in requests))
    assert answers == [[item + 1000 for item in items] for items in requests]
    assert batcher.waiting == 0
    await batcher.close()
    batches = [batch for computer in computers for batch in computer.batches]
    assert sorted(item for batch in batches for item in batch) == sorted(item for items in requests for item in items)
    assert all(len(batch) == 1 or sum(batch) <= batch_tokens for batch in batches)


@settings(max_examples=200, deadline=None)
@given(
    candidates=st.lists(st.tuples(st.integers(1, 512), st.booleans()), min_size=1, max_size=40),
    batch_tokens=st.integers(1, 4096),
)
def test_a_batch_holds_the_first_and_those_due_and_neighbours_in_length(
    candidates: list[tuple[int, bool]], batch_tokens: int
) -> None:
    tokens, waited_long = [each[0] for each in candidates], [each[1] for each in candidates]
    chosen = picked(tokens, waited_long, batch_tokens)
    assert len(set(chosen)) == len(chosen)
    assert 0 in chosen
    assert len(chosen) == 1 or sum(tokens[place] for place in chosen) <= batch_tokens
    left = [place for place in range(len(tokens)) if place not in chosen]
    in_order = max((place for place, long in enumerate(waited_long) if long), default=0) + 1
    if (
        min(left, default=in_order) < in_order
    ):  # nobody is preferred to one that may not be passed over, nor to those before it
        assert chosen == list(range(len(chosen)))
    else:
        neighbours = [abs(tokens[place] - tokens[0]) for place in chosen if place >= in_order]
        assert all(abs(tokens[place] - tokens[0]) >= max(neighbours, default=0) for place in left)


@in_virtual_time
async def test_an_idle_lane_gets_a_text_at_once_and_a_busy_one_what_gathers() -> None:
    reasons: list[tuple[str, int]] = []
    batcher, computer = await batching(
        batch_tokens=20, released=lambda why, items: reasons.append((why, items)), held=True
    )
    first = ask(batcher, 1)
    await turns()
    assert computer.batches == [[1]]
    others = [ask(batcher, item) for item in (5, 7, 6, 9)]
    await turns()
    assert batcher.waiting == 4
    computer.gate.set()
    assert await first == [1001]
    assert [await other for other in others] == [[1005], [1007], [1006], [1009]]
    assert computer.batches == [[1], [5, 7, 6], [9]]
    assert reasons == [("idle", 1), ("full", 3), ("freed", 1)]


@in_virtual_time
async def test_one_caller_of_many_texts_does_not_hold_up_a_caller_of_one() -> None:
    batcher, computer = await batching(batch_tokens=100, max_wait_ms=0, held=True)
    many = ask(batcher, *[10] * 1000)
    await turns()
    single = ask(batcher, 11)
    await turns()
    computer.gate.set()
    assert await single == [1011]
    # It was in the batch that came next, though 990 texts had come before it.
    assert [11 in batch for batch in computer.batches[:3]].count(True) == 1
    assert not many.done()
    assert await many == [1010] * 1000


@in_virtual_time
async def test_two_callers_of_many_texts_share_the_lane_evenly() -> None:
    batcher, computer = await batching(batch_tokens=100, held=True)
    early, late = ask(batcher, *[20] * 200), ask(batcher, *[21] * 200)
    await turns()
    computer.gate.set()
    assert (await early, await late) == ([1020] * 200, [1021] * 200)
    half = [item for batch in computer.batches for item in batch][:200]
    assert 80 <= half.count(20) <= 120


@in_virtual_time
async def test_callers_of_a_few_texts_are_served_in_their_order_and_not_all_late_together() -> None:
    batcher, computer = await batching(batch_tokens=100, max_wait_ms=0, held=True)
    first = ask(batcher, 100)
    await turns()
    callers = [ask(batcher, 5, 5, 5, 5) for _ in range(5)] + [ask(batcher, 2, 6, 6, 6) for _ in range(5)]
    await turns()
    computer.gate.set()
    await asyncio.gather(first, *callers)
    await batcher.close()
    assert computer.batches == [[100], [5] * 20, [2, 6, 6, 6] * 5]


@in_virtual_time
async def test_a_large_request_gets_its_share_of_a_server_that_small_ones_fill() -> None:
    batcher, computer = await batching(batch_tokens=100)

    async def without_end() -> None:
        while True:
            await batcher.results([20], [20])

    streams = [asyncio.create_task(without_end()) for _ in range(50)]
    await turns()
    async with asyncio.timeout(20):
        await batcher.results([21] * 20, [21] * 20)
    # A 51st of the slot is two tokens of a batch of 100; it brought 420.
    assert len(computer.batches) <= 300
    for stream in streams:
        stream.cancel()
    await asyncio.wait(streams)


def test_a_large_request_that_has_waited_long_takes_no_more_than_its_share() -> None:
    async def small_ones_answered(max_wait_ms: float) -> int:
        """How many, while one large request is, by callers of one text who ask again and again."""
        batcher = made(batch_tokens=100, max_wait_ms=max_wait_ms)

        batcher.add_slot(paced(fixed_s=0.003))
        large = ask(batcher, *[10] * 100)
        answered = 0

        async def small() -> None:
            nonlocal answered
            while not large.done():
                await batcher.results([12], [12])
                answered += 1

        await asyncio.gather(large, *(small() for _ in range(30)))
        await batcher.close()
        return answered

    in_strict_order = run(lambda: small_ones_answered(0))
    assert run(lambda: small_ones_answered(2)) > 0.8 * in_strict_order


def test_a_text_is_passed_over_for_texts_of_like_length_no_longer_than_allowed() -> None:
    async def scenario(max_wait_ms: float) -> list[list[int]]:
        batcher, computer = await batching(batch_tokens=100, max_wait_ms=max_wait_ms, held=True)
        asked = [ask(batcher, 1)]
        await turns()
        asked += [ask(batcher, item) for item in (20, 30, 70, 20, 20, 20, 30, 30)]
        await asyncio.sleep(0.03)  # that all waited so long, behind others, is no reason to mix lengths
        computer.gate.set()
        computer.gate.clear()  # one batch goes on, the next is held
        await asyncio.sleep(0.03)  # some were passed over for so long
        computer.gate.set()
        await asyncio.gather(*asked)
        await batcher.close()
        return computer.batches[1:3]

    assert run(lambda: scenario(max_wait_ms=10_000)) == [[20, 20, 20, 20], [30, 30, 30]]
    assert run(lambda: scenario(max_wait_ms=10)) == [[20, 20, 20, 20], [30, 70]]
    assert run(lambda: scenario(max_wait_ms=0)) == [[20, 30], [70, 20]]


@in_virtual_time
async def test_a_text_whose_turn_has_not_come_was_not_passed_over() -> None:
    batcher, computer = await batching(batch_tokens=100, max_wait_ms=10, held=True)
    asked = [ask(batcher, 1)]
    await turns()
    asked += [ask(batcher, item) for item in (50, 50, 20, 70, 20, 20, 20)]
    await turns()
    computer.gate.set()
    computer.gate.clear()
    await asyncio.sleep(0.03)  # behind the two that came first
    computer.gate.set()
    await asyncio.gather(*asked)
    await batcher.close()
    assert computer.batches[1:3] == [[50, 50], [20, 20, 20, 20]]


@in_virtual_time
async def test_idle_lanes_share_one_large_request() -> None:
    batcher = made(batch_tokens=100_000)
    computers = [Computer(), Computer()]
    for computer in computers:
        batcher.add_slot(computer)
    await turns()
    await ask(batcher, *[20] * 100)
    assert [sum(map(sum, computer.batches)) for computer in computers] == [1000, 1000]
    # A small one is not worth dividing.
    await ask(batcher, 20, 20)
    assert [batch for computer in computers for batch in computer.batches if len(batch) == 2] == [[20, 20]]


@in_virtual_time
async def test_short_items_do_not_wait_behind_one_that_is_far_longer_than_a_batch() -> None:
    batcher = made(batch_tokens=512)
    long, short = Computer(held=True), Computer()
    batcher.add_slot(long)
    await turns()
    first = ask(batcher, 5000)
    await long.begun.wait()
    waiting = [ask(batcher, 10) for _ in range(60)]
    await turns()
    assert batcher.waiting == 60  # and not given ahead
    batcher.add_slot(short)
    assert [await each for each in waiting] == [[1010]] * 60
    assert long.batches == [[5000]]
    long.gate.set()
    assert await first == [6000]


@in_virtual_time
async def test_a_cancelled_caller_takes_its_items_out_of_the_queue() -> None:
    batcher, computer = await batching(max_texts=3, max_tokens=30, held=True)
    first = ask(batcher, 1)
    await computer.begun.wait()
    leaving, staying = ask(batcher, 5, 6), ask(batcher, 7)
    await turns()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert batcher.waiting == 1
    others = ask(batcher, 20)  # it takes no more room, neither in texts nor in tokens
    await turns()
    assert batcher.waiting == 2
    computer.gate.set()
    assert (await staying, await first, await others) == ([1007], [1001], [1020])
    assert computer.batches == [[1], [7, 20]]


@in_virtual_time
async def test_callers_that_leave_cost_no_pass_over_the_whole_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    monkeypatch.setattr(
        heapq, "heapify", lambda queue, heapify=heapq.heapify: passes.append(len(queue)) or heapify(queue)
    )
    batcher, computer = await batching(max_texts=10_000, max_tokens=100_000, held=True)
    first = ask(batcher, 1)
    await computer.begun.wait()
    leaving = [ask(batcher, 5, 6) for _ in range(1000)]
    staying = [ask(batcher, n) for n in (7, 8)]
    await turns()
    for each in leaving:
        each.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    assert batcher.waiting == 2
    assert sum(passes) <= 2002  # what is left each time the queue is halved
    computer.gate.set()
    assert [await each for each in (first, *staying)] == [[1001], [1007], [1008]]
    # One batch was given ahead; of the others only those that stayed are computed.
    assert [len(computer.batches), computer.batches[-1]] == [3, [7, 8]]
    assert batcher.wait_s == 0


@in_virtual_time
async def test_a_caller_that_leaves_during_its_batch_does_not_hurt_the_others() -> None:
    batcher, computer = await batching(held=True)
    leaving = ask(batcher, 1)
    await computer.begun.wait()
    leaving.cancel()
    staying = ask(batcher, 2)
    computer.gate.set()
    assert await staying == [1002]


@pytest.mark.parametrize("limits", [{"max_texts": 2}, {"max_tokens": 20}], ids=["too-many-texts", "too-many-tokens"])
@in_virtual_time
async def test_a_full_queue_refuses_and_says_when_to_come_again(limits: dict[str, int]) -> None:
    batcher, computer = await batching(**limits, held=True)
    first = ask(batcher, 1)
    await computer.begun.wait()
    waiting = ask(batcher, 9, 8)
    await turns()
    with pytest.raises(Overloaded) as caught:
        await batcher.results([5], [5])
    assert caught.value.retry_after_s > 0
    assert "texts waiting: 2" in caught.value.message
    computer.gate.set()
    assert (await waiting, await first) == ([1009, 1008], [1001])
    # The queue has room again, and takes even a request that is larger than its bound.
    assert await batcher.results([30, 30, 30], [30, 30, 30]) == [1030, 1030, 1030]


@in_virtual_time
async def test_a_queue_that_would_take_too_long_is_full() -> None:
    batcher = made(paced(fixed_s=0.05), batch_tokens=10, max_queue_s=0.2)
    await batcher.results([10], [10])  # 200 tokens a second are known now
    under_way = [ask(batcher, 10) for _ in range(20)]
    answers = await asyncio.gather(*under_way, return_exceptions=True)
    refused = [each for each in answers if isinstance(each, Overloaded)]
    assert 10 < len(refused) < 19  # about four fit into 0.2 s
    assert all(0.1 < each.retry_after_s < 0.6 for each in refused)


@in_virtual_time
async def test_batches_that_are_heard_of_together_do_not_make_the_queue_seem_quick() -> None:
    batcher = made(paced(tokens_per_s=5000, one_at_a_time=True, told_every_s=0.05), batch_tokens=100, max_queue_s=100)
    await batcher.results([20] * 250, [20] * 250)
    waiting = ask(batcher, *[20] * 250)
    await turns()
    assert 0.5 < batcher.wait_s < 2  # 5000 tokens, 5000 a second
    waiting.cancel()
    await asyncio.wait([waiting])


@in_virtual_time
async def test_a_large_request_makes_the_queue_too_long_for_others_like_it_and_not_for_smaller_ones() -> None:
    batcher = made(paced(tokens_per_s=5000, one_at_a_time=True), batch_tokens=100, max_queue_s=0.2)
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
    assert 100 < len(refused) < 170  # about 50 fit into 0.2 s; what they wait for is one another
    assert await large == [20] * 200


@in_virtual_time
async def test_a_long_text_does_not_lift_the_rest_of_a_large_request_above_who_comes_next() -> None:
    batcher, computer = await batching(batch_tokens=100)
    large = ask(batcher, *[20] * 1000)
    await turns()
    await batcher.results([5000], [5000])
    before = len(computer.batches)
    await batcher.results([12], [12])
    assert len(computer.batches) - before <= 4
    assert not large.done()
    await large


@in_virtual_time
async def test_one_bad_text_fails_alone() -> None:
    batcher = made(Computer())
    good, bad, also_good = await asyncio.gather(
        *(batcher.results([item], [item]) for item in (12, 13, 14)), return_exceptions=True
    )
    assert (good, also_good) == ([1012], [1014])
    assert isinstance(bad, BadInput)


@in_virtual_time
async def test_the_rest_of_a_request_that_failed_is_not_run() -> None:
    batcher, computer = await batching(batch_tokens=1)
    items = [13, *range(100, 200)]
    with pytest.raises(BadInput, match="thirteen"):
        await batcher.results(items, items)
    await batcher.close()
    # One or two may have begun before the failure was heard of.
    assert len(computer.batches) < 5


def dying_at(fatal: int, others: Computer) -> Callable[[list[int], Done[int]], Awaitable[None]]:
    async def slot(items: list[int], done: Done[int]) -> None:
        if fatal in items:
            done(0, 5)
            raise Unavailable("the process died")
        await others(items, done)

    return slot


@in_virtual_time
async def test_a_lane_that_dies_fails_only_what_it_had_and_the_rest_waits_for_another() -> None:
    batcher = made(batch_tokens=20)
    dying = batcher.add_slot(dying_at(7, Computer()))
    await turns()
    told, lost, waiting = ask(batcher, 7), ask(batcher, 8), ask(batcher, 15)
    await turns()
    assert await told == [5]  # it was done before the end
    with pytest.raises(Unavailable, match="died"):
        await lost
    with pytest.raises(Unavailable, match="died"):
        dying.ended.result()
    assert (batcher.slots, batcher.waiting) == (0, 1)
    later = ask(batcher, 3)
    await turns()
    batcher.add_slot(Computer())
    assert (await waiting, await later) == ([1015], [1003])


@in_virtual_time
async def test_without_a_lane_to_come_everything_is_refused_until_there_is_one() -> None:
    batcher = made()
    waiting = ask(batcher, 3)
    await turns()
    batcher.give_up("it cannot be started")
    with pytest.raises(Unavailable, match="it cannot be started"):
        await waiting
    with pytest.raises(Unavailable, match="it cannot be started"):
        await batcher.results([3], [3])
    batcher.add_slot(Computer())
    assert await batcher.results([3], [3]) == [1003]


@pytest.mark.parametrize("items", [[1], [1, 2]], ids=["alone", "in-company"])
@in_virtual_time
async def test_a_lane_that_loses_a_result_is_found_out(items: list[int]) -> None:
    async def forgetful(items: list[int], done: Done[int]) -> None:
        for place in range(1, len(items)):
            done(place, 0)

    batcher = made(forgetful)
    with pytest.raises(Unavailable, match="no answer to this text"):
        await batcher.results(items, items)


@in_virtual_time
async def test_closing_waits_for_what_was_accepted_and_refuses_what_comes() -> None:
    batcher, computer = await batching(batch_tokens=5, held=True)
    first, queued = ask(batcher, 1), ask(batcher, 5, 5)
    await computer.begun.wait()
    closing = asyncio.create_task(batcher.close())
    await turns()
    assert not closing.done()
    with pytest.raises(Unavailable, match="being closed"):
        await batcher.results([2], [2])
    computer.gate.set()
    await closing
    assert (await first, await queued) == ([1001], [1005, 1005])


@in_virtual_time
async def test_closing_with_no_lane_left_leaves_nobody_waiting() -> None:
    batcher = made()
    waiting = ask(batcher, 1)
    await turns()
    await batcher.close()
    with pytest.raises(Unavailable, match="being closed"):
        await waiting


@in_virtual_time
async def test_a_lane_that_is_removed_ends_its_batch_and_takes_no_other() -> None:
    batcher = made(batch_tokens=5)
    old = Computer(held=True)
    slot = batcher.add_slot(old)
    first, queued = ask(batcher, 1), ask(batcher, 5)
    await old.begun.wait()
    removing = asyncio.create_task(batcher.remove_slot(slot))
    await turns()
    assert not removing.done()
    old.gate.set()
    await removing
    batcher.add_slot(Computer())
    assert (await first, await queued) == ([1001], [1005])
    assert old.batches == [[1]]


@in_virtual_time
async def test_a_busy_lane_gets_a_batch_ahead_when_much_waits_and_no_lane_is_idle() -> None:
    batcher, busy, idle = await batching(batch_tokens=200, max_wait_ms=0, slots=2, held=True)
    little = []
    for _ in range(3):  # one for each slot, one that is too little to be given beforehand
        little.append(ask(batcher, 20))
        await turns()
    assert [len(computer.batches) for computer in (busy, idle)] == [1, 1]
    assert batcher.waiting == 1
    much = [ask(batcher, 100) for _ in range(20)]
    await turns()
    # Each has one that it computes and one beside it; what is left waits for both alike.
    assert [len(computer.batches) for computer in (busy, idle)] == [2, 2]
    assert batcher.waiting > 10
    busy.gate.set()
    idle.gate.set()
    assert await asyncio.gather(*little, *much) == [[1020]] * 3 + [[1100]] * 20


@in_virtual_time
async def test_the_first_callers_wait_for_the_first_lane_however_many_they_are() -> None:
    batcher = made(max_queue_s=0.1)
    early = [ask(batcher, 20) for _ in range(50)]
    await turns()
    assert batcher.full_s == 0
    batcher.add_slot(Computer())
    assert await asyncio.gather(*early) == [[1020]] * 50


@in_virtual_time
async def test_small_batches_do_not_make_the_queue_seem_slow() -> None:
    batcher = made(paced(fixed_s=0.002), batch_tokens=1000, max_queue_s=0.1)
    await batcher.results([100] * 100, [100] * 100)
    for _ in range(50):
        await batcher.results([1], [1])
    # Ten full batches take 20 ms: there is room behind them.
    many, one = ask(batcher, *[100] * 100), ask(batcher, 1)
    assert (await many, await one) == ([100] * 100, [1])


@in_virtual_time
async def test_a_busy_lane_is_given_little_beforehand() -> None:
    batcher, computer = await batching(batch_tokens=512, held=True)
    asked = [asyncio.create_task(batcher.results([20] * 200, [20] * 200))]
    await turns()
    assert [sum(batch) for batch in computer.batches] == [500, 140]
    asked.append(ask(batcher, 19))
    computer.gate.set()
    await asyncio.gather(*asked)
    assert 19 in computer.batches[2]
    assert all(sum(batch) <= 512 for batch in computer.batches)


@in_virtual_time
async def test_a_lane_that_raises_at_once_fails_only_what_it_had() -> None:
    batcher = made()

    def raises(items: list[int], done: Done[int]) -> Awaitable[None]:
        raise ValueError("cannot be written")

    slot = batcher.add_slot(raises)
    with pytest.raises(ValueError, match="cannot be written"):
        await batcher.results([7], [7])
    with pytest.raises(ValueError, match="cannot be written"):
        await slot.ended
    assert batcher.slots == 0
    batcher.add_slot(Computer())
    assert await batcher.results([7], [7]) == [1007]


@in_virtual_time
async def test_closing_ends_a_lane_that_was_shut_although_others_wait() -> None:
    batcher = made()
    slot = batcher.add_slot(Computer())
    slot.open = False  # as its process dies
    waits = ask(batcher, 5)
    await turns()
    await batcher.close()
    with pytest.raises(Unavailable):
        await waits
    assert slot.ended.done()


@in_virtual_time
async def test_an_item_far_longer_than_a_batch_goes_to_the_lane_that_is_free_first() -> None:
    batcher, first, second = await batching(batch_tokens=512, max_wait_ms=0, slots=2, held=True)
    asked = [ask(batcher, 500), ask(batcher, 500)]
    await turns()
    asked += [ask(batcher, 5000)]
    await turns()
    assert [len(computer.batches) for computer in (first, second)] == [1, 1]
    second.gate.set()
    await turns()
    assert second.batches[1] == [5000]
    first.gate.set()
    await asyncio.gather(*asked)


@in_virtual_time
async def test_of_busy_lanes_the_one_with_the_least_to_compute_gets_the_next_batch() -> None:
    batcher, long, short = await batching(batch_tokens=512, max_wait_ms=0, slots=2, held=True)
    asked = [ask(batcher, 500)]
    await turns()
    asked += [ask(batcher, 300)]
    await turns()
    busy, free = (long, short) if long.batches == [[500]] else (short, long)
    assert free.batches == [[300]]
    asked += [ask(batcher, 130), ask(batcher, 130)]
    await turns()
    assert free.batches[1:] == [[130, 130]]
    assert len(busy.batches) == 1
    long.gate.set()
    short.gate.set()
    await asyncio.gather(*asked)


@in_virtual_time
async def test_where_nobody_waits_batches_are_of_one_size() -> None:
    batcher, computer = await batching(batch_tokens=1000, ahead_tokens=1000, max_wait_ms=0)
    await batcher.results([100] * 60, [100] * 60)
    assert [sum(batch) for batch in computer.batches] == [1000] * 6


@pytest.mark.parametrize("measured", [True, False], ids=["at-a-known-speed", "in-a-fresh-server"])
@in_virtual_time
async def test_a_short_text_is_refused_while_long_ones_hold_every_slot_until_their_end(measured: bool) -> None:
    batcher = made(paced(tokens_per_s=5000), paced(tokens_per_s=5000), max_queue_s=0.5)
    if measured:
        await asyncio.gather(*(batcher.results([500], [500]) for _ in range(2)))
    first = ask(batcher, 50_000)  # 10 s
    await turns()
    assert await batcher.results([10], [10]) == [10]  # by the other slot
    second = ask(batcher, 50_000)
    await asyncio.sleep(3)
    for tokens in (10, 50_000):
        with pytest.raises(Overloaded, match="busy with long texts") as refused:
            await batcher.results([tokens], [tokens])
    assert batcher.full_s > 0
    if measured:
        assert 6 < refused.value.retry_after_s < 7
        await asyncio.sleep(6.5)
        assert batcher.full_s == 0
        began_s = asyncio.get_running_loop().time()
        assert await batcher.results([10], [10]) == [10]
        assert asyncio.get_running_loop().time() - began_s < 0.6
    assert (await first, await second) == ([50_000], [50_000])
    assert await batcher.results([10], [10]) == [10]


@in_virtual_time
async def test_a_text_waits_for_the_batch_of_a_slow_model() -> None:
    batcher = made(paced(tokens_per_s=5000), max_queue_s=0.05)  # half of what a batch takes
    await batcher.results([500], [500])
    under_way = ask(batcher, 500)
    await turns()
    assert await batcher.results([10], [10]) == [10]
    await under_way


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from([0.0, 0.01, 0.1, 1.0]), st.sampled_from([5, 50, 250, 3000, 20_000])),
        min_size=5,
        max_size=40,
    ),
    slots=st.integers(1, 3),
)
@in_virtual_time
async def test_no_short_text_waits_far_longer_than_allowed(arrivals: list[tuple[float, int]], slots: int) -> None:
    batcher = made(*(paced(tokens_per_s=5000) for _ in range(slots)), max_queue_s=0.5)
    await asyncio.gather(*(batcher.results([500], [500]) for _ in range(slots)))
    waits_s: list[float] = []

    async def ask_once(tokens: int) -> None:
        began_s = asyncio.get_running_loop().time()
        with contextlib.suppress(Overloaded):
            await batcher.results([tokens], [tokens])
            if tokens <= 250:
                waits_s.append(asyncio.get_running_loop().time() - began_s)

    asked = []
    for pause_s, tokens in arrivals:
        await asyncio.sleep(pause_s)
        asked.append(asyncio.create_task(ask_once(tokens)))
    await asyncio.gather(*asked)
    await batcher.close()
    # Beyond the half second: the batch that it waits for, and the one that it is in.
    assert max(waits_s, default=0.0) < 0.5 + 3 * 512 / 5000, waits_s
