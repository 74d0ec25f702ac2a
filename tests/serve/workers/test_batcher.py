import asyncio
import contextlib
import heapq
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
def test_every_caller_gets_its_own_results_in_its_order(
    requests: list[list[int]], batch_tokens: int, slots: int
) -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=batch_tokens)
        computers = [Computer() for _ in range(slots)]
        for computer in computers:
            batcher.add_slot(computer)
        answers = await asyncio.gather(*(batcher.results(items, items) for items in requests))
        assert answers == [[item + 1000 for item in items] for items in requests]
        assert batcher.waiting == 0
        await batcher.close()
        batches = [batch for computer in computers for batch in computer.batches]
        assert sorted(item for batch in batches for item in batch) == sorted(
            item for items in requests for item in items
        )
        assert all(len(batch) == 1 or sum(batch) <= batch_tokens for batch in batches)

    run(scenario)


@settings(max_examples=200, deadline=None)
@given(
    candidates=st.lists(st.tuples(st.integers(1, 512), st.booleans()), min_size=1, max_size=40),
    batch_tokens=st.integers(1, 4096),
)
def test_a_batch_holds_the_first_then_all_up_to_one_that_waited_long_then_its_neighbours_in_length(
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


def test_an_idle_lane_gets_what_comes_at_once_and_a_busy_one_what_gathers_meanwhile() -> None:
    reasons: list[tuple[str, int]] = []

    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=20, released=lambda why, items: reasons.append((why, items)))
        computer = Computer(held=True)
        batcher.add_slot(computer)
        await turns()
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
        await batcher.close()

    run(scenario)
    assert reasons == [("idle", 1), ("full", 3), ("freed", 1)]


def test_one_caller_of_many_texts_does_not_hold_up_a_caller_of_one() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=100, max_wait_ms=0)
        computer = Computer(held=True)
        batcher.add_slot(computer)
        await turns()
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
        await batcher.close()

    run(scenario)


def test_two_callers_of_many_texts_share_the_lane_evenly() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=100)
        computer = Computer(held=True)
        batcher.add_slot(computer)
        await turns()
        early, late = ask(batcher, *[20] * 200), ask(batcher, *[21] * 200)
        await turns()
        computer.gate.set()
        assert (await early, await late) == ([1020] * 200, [1021] * 200)
        half = [item for batch in computer.batches for item in batch][:200]
        assert 80 <= half.count(20) <= 120
        await batcher.close()

    run(scenario)


def test_callers_of_a_few_texts_are_served_in_their_order_and_not_all_late_together() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=100, max_wait_ms=0)
        computer = Computer(held=True)
        batcher.add_slot(computer)
        await turns()
        first = ask(batcher, 100)
        await turns()
        callers = [ask(batcher, 5, 5, 5, 5) for _ in range(5)] + [ask(batcher, 2, 6, 6, 6) for _ in range(5)]
        await turns()
        computer.gate.set()
        await asyncio.gather(first, *callers)
        await batcher.close()
        assert computer.batches == [[100], [5] * 20, [2, 6, 6, 6] * 5]

    run(scenario)


def test_a_large_request_gets_its_share_of_a_server_that_small_ones_fill() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=100)
        computer = Computer()
        batcher.add_slot(computer)

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
        await batcher.close()

    run(scenario)


def test_a_large_request_that_has_waited_long_takes_no_more_than_its_share() -> None:
    async def small_ones_answered(max_wait_ms: float) -> int:
        """How many, while one large request is, by callers of one text who ask again and again."""
        batcher = Batcher[int, int](batch_tokens=100, max_wait_ms=max_wait_ms)

        async def compute(items: list[int], done: Done[int]) -> None:
            await asyncio.sleep(0.003)
            for place, item in enumerate(items):
                done(place, item)

        batcher.add_slot(compute)
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
        batcher = Batcher[int, int](batch_tokens=100, max_wait_ms=max_wait_ms)
        computer = Computer(held=True)
        batcher.add_slot(computer)
        await turns()
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


def test_whose_turn_has_not_come_was_not_passed_over() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=100, max_wait_ms=10)
        computer = Computer(held=True)
        batcher.add_slot(computer)
        await turns()
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

    run(scenario)


def test_idle_lanes_share_one_large_request() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=100_000)
        computers = [Computer(), Computer()]
        for computer in computers:
            batcher.add_slot(computer)
        await turns()
        await ask(batcher, *[20] * 100)
        assert [sum(map(sum, computer.batches)) for computer in computers] == [1000, 1000]
        # A small one is not worth dividing.
        await ask(batcher, 20, 20)
        assert [batch for computer in computers for batch in computer.batches if len(batch) == 2] == [[20, 20]]
        await batcher.close()

    run(scenario)


def test_short_items_do_not_wait_behind_one_that_is_far_longer_than_a_batch() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=512)
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
        await batcher.close()

    run(scenario)


def test_a_cancelled_caller_takes_its_items_out_of_the_queue() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](max_texts=3, max_tokens=30)
        computer = Computer(held=True)
        batcher.add_slot(computer)
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
        await batcher.close()

    run(scenario)


def test_callers_that_leave_cost_no_pass_over_the_whole_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    monkeypatch.setattr(
        heapq, "heapify", lambda queue, heapify=heapq.heapify: passes.append(len(queue)) or heapify(queue)
    )

    async def scenario() -> None:
        batcher = Batcher[int, int](max_texts=10_000, max_tokens=100_000)
        computer = Computer(held=True)
        batcher.add_slot(computer)
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
        await batcher.close()

    run(scenario)


def test_a_caller_that_leaves_during_its_batch_does_not_hurt_the_others() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int]()
        computer = Computer(held=True)
        batcher.add_slot(computer)
        leaving = ask(batcher, 1)
        await computer.begun.wait()
        leaving.cancel()
        staying = ask(batcher, 2)
        computer.gate.set()
        assert await staying == [1002]
        await batcher.close()

    run(scenario)


@pytest.mark.parametrize("limits", [{"max_texts": 2}, {"max_tokens": 20}], ids=["too-many-texts", "too-many-tokens"])
def test_a_full_queue_refuses_and_says_when_to_come_again(limits: dict[str, int]) -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](**limits)
        computer = Computer(held=True)
        batcher.add_slot(computer)
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
        await batcher.close()

    run(scenario)


def test_a_queue_that_would_take_too_long_is_full() -> None:
    async def scenario() -> None:
        async def slow(items: list[int], done: Done[int]) -> None:
            await asyncio.sleep(0.05)
            for place, item in enumerate(items):
                done(place, item)

        batcher = Batcher[int, int](batch_tokens=10, max_queue_s=0.2)
        batcher.add_slot(slow)
        await batcher.results([10], [10])  # 200 tokens a second are known now
        under_way = [ask(batcher, 10) for _ in range(20)]
        answers = await asyncio.gather(*under_way, return_exceptions=True)
        refused = [each for each in answers if isinstance(each, Overloaded)]
        assert 10 < len(refused) < 19  # about four fit into 0.2 s
        assert all(0.1 < each.retry_after_s < 0.6 for each in refused)
        await batcher.close()

    run(scenario)


def test_batches_that_are_heard_of_together_do_not_make_the_queue_seem_quick() -> None:
    async def scenario() -> None:
        one_at_a_time, told_s = asyncio.Lock(), 0.05

        async def told_of_late(items: list[int], done: Done[int]) -> None:
            async with one_at_a_time:
                await asyncio.sleep(sum(items) / 5000)
            now_s = asyncio.get_running_loop().time()
            await asyncio.sleep(told_s - now_s % told_s)
            for place, item in enumerate(items):
                done(place, item)

        batcher = Batcher[int, int](batch_tokens=100, max_queue_s=100)
        batcher.add_slot(told_of_late)
        await batcher.results([20] * 250, [20] * 250)
        waiting = ask(batcher, *[20] * 250)
        await turns()
        assert 0.5 < batcher.wait_s < 2  # 5000 tokens, 5000 a second
        waiting.cancel()
        await asyncio.wait([waiting])
        await batcher.close()

    run(scenario)


def test_a_large_request_makes_the_queue_too_long_for_others_like_it_and_not_for_smaller_ones() -> None:
    async def scenario() -> None:
        one_at_a_time = asyncio.Lock()

        async def slow(items: list[int], done: Done[int]) -> None:
            async with one_at_a_time:
                await asyncio.sleep(sum(items) / 5000)
            for place, item in enumerate(items):
                done(place, item)

        batcher = Batcher[int, int](batch_tokens=100, max_queue_s=0.2)
        batcher.add_slot(slow)
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
        await batcher.close()

    run(scenario)


def test_a_long_text_does_not_lift_the_rest_of_a_large_request_above_who_comes_next() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=100)
        computer = Computer()
        batcher.add_slot(computer)
        large = ask(batcher, *[20] * 1000)
        await turns()
        await batcher.results([5000], [5000])
        before = len(computer.batches)
        await batcher.results([12], [12])
        assert len(computer.batches) - before <= 4
        assert not large.done()
        await large
        await batcher.close()

    run(scenario)


def test_one_bad_text_fails_alone() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int]()
        batcher.add_slot(Computer())
        good, bad, also_good = await asyncio.gather(
            *(batcher.results([item], [item]) for item in (12, 13, 14)), return_exceptions=True
        )
        assert (good, also_good) == ([1012], [1014])
        assert isinstance(bad, BadInput)
        await batcher.close()

    run(scenario)


def test_the_rest_of_a_request_that_failed_is_not_run() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=1)
        computer = Computer()
        batcher.add_slot(computer)
        items = [13, *range(100, 200)]
        with pytest.raises(BadInput, match="thirteen"):
            await batcher.results(items, items)
        await batcher.close()
        # One or two may have begun before the failure was heard of.
        assert len(computer.batches) < 5

    run(scenario)


def dying_at(fatal: int, others: Computer) -> Callable[[list[int], Done[int]], Awaitable[None]]:
    async def slot(items: list[int], done: Done[int]) -> None:
        if fatal in items:
            done(0, 5)
            raise Unavailable("the process died")
        await others(items, done)

    return slot


def test_a_lane_that_dies_fails_only_what_it_had_and_the_rest_waits_for_another() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=20)
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
        await batcher.close()

    run(scenario)


def test_once_no_lane_is_to_come_what_waits_and_what_comes_is_refused_until_there_is_one() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int]()
        waiting = ask(batcher, 3)
        await turns()
        batcher.give_up("it cannot be started")
        with pytest.raises(Unavailable, match="it cannot be started"):
            await waiting
        with pytest.raises(Unavailable, match="it cannot be started"):
            await batcher.results([3], [3])
        batcher.add_slot(Computer())
        assert await batcher.results([3], [3]) == [1003]
        await batcher.close()

    run(scenario)


@pytest.mark.parametrize("items", [[1], [1, 2]], ids=["alone", "in-company"])
def test_a_lane_that_loses_a_result_is_found_out(items: list[int]) -> None:
    async def forgetful(items: list[int], done: Done[int]) -> None:
        for place in range(1, len(items)):
            done(place, 0)

    async def scenario() -> None:
        batcher = Batcher[int, int]()
        batcher.add_slot(forgetful)
        with pytest.raises(Unavailable, match="no answer to this text"):
            await batcher.results(items, items)
        await batcher.close()

    run(scenario)


def test_closing_waits_for_what_was_accepted_and_refuses_what_comes() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=5)
        computer = Computer(held=True)
        batcher.add_slot(computer)
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

    run(scenario)


def test_closing_with_no_lane_left_leaves_nobody_waiting() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int]()
        waiting = ask(batcher, 1)
        await turns()
        await batcher.close()
        with pytest.raises(Unavailable, match="being closed"):
            await waiting

    run(scenario)


def test_a_lane_that_is_removed_ends_its_batch_and_takes_no_other() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=5)
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
        await batcher.close()

    run(scenario)


def test_a_busy_lane_is_given_its_next_batch_beforehand_when_much_waits_and_idle_ones_come_first() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=200, max_wait_ms=0)
        busy, idle = Computer(held=True), Computer(held=True)
        batcher.add_slot(busy)
        batcher.add_slot(idle)
        await turns()
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
        await batcher.close()

    run(scenario)


def test_the_first_callers_wait_for_the_first_lane_however_many_they_are() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](max_queue_s=0.1)
        early = [ask(batcher, 20) for _ in range(50)]
        await turns()
        assert batcher.full_s == 0
        batcher.add_slot(Computer())
        assert await asyncio.gather(*early) == [[1020]] * 50
        await batcher.close()

    run(scenario)


def test_small_batches_do_not_make_the_queue_seem_slow() -> None:
    async def scenario() -> None:
        async def fixed_cost(items: list[int], done: Done[int]) -> None:
            await asyncio.sleep(0.002)
            for place, item in enumerate(items):
                done(place, item)

        batcher = Batcher[int, int](batch_tokens=1000, max_queue_s=0.1)
        batcher.add_slot(fixed_cost)
        await batcher.results([100] * 100, [100] * 100)
        for _ in range(50):
            await batcher.results([1], [1])
        # Ten full batches take 20 ms: there is room behind them.
        many, one = ask(batcher, *[100] * 100), ask(batcher, 1)
        assert (await many, await one) == ([100] * 100, [1])
        await batcher.close()

    run(scenario)


def test_what_a_busy_lane_is_given_beforehand_is_short_so_that_who_comes_next_waits_for_less() -> None:
    async def scenario() -> list[list[int]]:
        batcher = Batcher[int, int](batch_tokens=512)
        computer = Computer(held=True)
        batcher.add_slot(computer)
        asked = [asyncio.create_task(batcher.results([20] * 200, [20] * 200))]
        await turns()
        assert [sum(batch) for batch in computer.batches] == [500, 140]
        asked.append(ask(batcher, 19))
        computer.gate.set()
        await asyncio.gather(*asked)
        await batcher.close()
        return computer.batches

    batches = run(scenario)
    assert 19 in batches[2]
    assert all(sum(batch) <= 512 for batch in batches)


def test_a_lane_that_raises_at_once_fails_only_what_it_had() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int]()

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
        await batcher.close()

    run(scenario)


def test_closing_ends_a_lane_that_was_shut_although_others_wait() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int]()
        slot = batcher.add_slot(Computer())
        slot.open = False  # as its process dies
        waits = ask(batcher, 5)
        await turns()
        await batcher.close()
        with pytest.raises(Unavailable):
            await waits
        assert slot.ended.done()

    run(scenario)


def test_an_item_far_longer_than_a_batch_goes_to_the_lane_that_is_free_first() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=512, max_wait_ms=0)
        first, second = Computer(held=True), Computer(held=True)
        batcher.add_slot(first)
        batcher.add_slot(second)
        await turns()
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
        await batcher.close()

    run(scenario)


def test_of_busy_lanes_the_one_with_the_least_to_compute_gets_the_next_batch() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](batch_tokens=512, max_wait_ms=0)
        long, short = Computer(held=True), Computer(held=True)
        batcher.add_slot(long)
        batcher.add_slot(short)
        await turns()
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
        await batcher.close()

    run(scenario)


def test_where_nobody_waits_batches_are_of_one_size() -> None:
    async def scenario() -> list[int]:
        batcher = Batcher[int, int](batch_tokens=1000, ahead_tokens=1000, max_wait_ms=0)
        computer = Computer()
        batcher.add_slot(computer)
        await batcher.results([100] * 60, [100] * 60)
        await batcher.close()
        return [sum(batch) for batch in computer.batches]

    assert run(scenario) == [1000] * 6


async def at_5000_tokens_a_second(items: list[int], done: Done[int]) -> None:
    await asyncio.sleep(sum(items) / 5000)
    for place, item in enumerate(items):
        done(place, item)


@pytest.mark.parametrize("measured", [True, False], ids=["at-a-known-speed", "in-a-fresh-server"])
def test_a_short_text_is_refused_while_a_long_one_holds_every_slot_and_taken_towards_its_end(measured: bool) -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](max_queue_s=0.5)
        for _ in range(2):
            batcher.add_slot(at_5000_tokens_a_second)
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
        await batcher.close()

    run(scenario)


def test_whoever_comes_while_one_batch_of_a_slow_model_is_computed_waits_for_it() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](max_queue_s=0.05)  # half of what a batch takes
        batcher.add_slot(at_5000_tokens_a_second)
        await batcher.results([500], [500])
        under_way = ask(batcher, 500)
        await turns()
        assert await batcher.results([10], [10]) == [10]
        await under_way
        await batcher.close()

    run(scenario)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from([0.0, 0.01, 0.1, 1.0]), st.sampled_from([5, 50, 250, 3000, 20_000])),
        min_size=5,
        max_size=40,
    ),
    slots=st.integers(1, 3),
)
def test_no_short_text_that_is_taken_waits_far_longer_than_the_queue_may_take(
    arrivals: list[tuple[float, int]], slots: int
) -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](max_queue_s=0.5)
        for _ in range(slots):
            batcher.add_slot(at_5000_tokens_a_second)
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

    run(scenario)
