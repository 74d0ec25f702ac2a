"""Batches items of many callers for one function that computes one batch at a time. It is independent of HTTP and of models.

There is no timer: where nothing is computed, waiting items are given at once. While a batch is computed, items wait, so batches grow
exactly under load.

The order is fair between callers, not between items: start-time fair queueing (Goyal, Vin and Cheng 1996, section 2). The items of a
caller are cut into packets of about half a batch. Each packet is stamped with the virtual time at which it would start if every
caller had an equal share of tokens. The lowest stamp goes first; of equal stamps, the earlier packet. So a caller of a thousand
items delays a caller of one item by about one batch, not by a thousand items. Callers of one packet are served in order of arrival,
since taking turns among them would delay all of them.

Virtual time advances by the computed tokens divided by the number of waiting callers (as in fair queueing itself, section 2 there).
Otherwise an endless stream of new callers, all with the same stamp, would hold back the second packet of a large caller for ever. An
item larger than a batch advances it by one batch only; otherwise all packets of a large caller would come before the next caller.
"""

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Awaitable, Callable, MutableSequence, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from serve.errors import Overloaded, Unavailable

Item = TypeVar("Item")
Result = TypeVar("Result")

Done = Callable[[int, Result | Exception], None]
# Computes a batch: calls `Done` for each item by its index in the batch, in any order; what it returns is done once all are. An
# exception, raised or returned, becomes the result of the items that are not done yet.
Run = Callable[[list[Item], Done[Result]], Awaitable[None]]
# What a caller waits for.
Wait = asyncio.Future[None]
# Why a batch was released. idle: nothing was computed. After another batch: full, when others had to stay behind; freed, when it took
# all waiting items.
Reason = Literal["idle", "full", "freed"]

CLOSING = "the model is being closed; try again in a second"

# Weight of the newest batch in the running estimate of the speed.
SPEED_SMOOTHING = 0.2
# Seconds for a token until a batch has been measured: those of a small encoder on one core.
UNMEASURED_S_PER_TOKEN = 50e-6
# A further batch is given beside others where no core is free if at least this many tokens wait. With fewer, a larger batch a little
# later is better.
WORTH_ANOTHER = 256
# A batch is picked, by similar length, from the first items in fair order: from as many as fill this many batches.
CHOICE = 4
PACKETS_A_BATCH = 2


class _Caller(Generic[Result]):
    """One caller: its results so far, and the future that ends its wait."""

    __slots__ = ("answered", "gone", "left", "passed_over_s", "queued", "results")

    def __init__(self, items: int, answered: Wait) -> None:
        self.results: list[Result | None] = [None] * items
        self.left = items
        self.passed_over_s = [math.inf] * items
        """When each item was first passed over for others with a better length."""
        self.answered = answered
        self.queued: dict[float, list[int]] = {}
        """Number and tokens of its items in the queue, by their virtual time."""
        self.gone = False
        """Whether it no longer waits. Its items are dropped when they are reached."""

    def take(self, place: int, result: Result | Exception) -> None:
        """Stores a result. An error ends the wait at once."""
        if self.answered.done():
            return
        if isinstance(result, Exception):
            self.answered.set_exception(result)
            return
        self.results[place] = result
        self.left -= 1
        if not self.left:
            self.answered.set_result(None)


class _Waiting(NamedTuple, Generic[Item, Result]):
    """An item in the queue, a heap ordered by `start`, then by the unique `number`."""

    start: float  # virtual time
    number: int
    item: Item
    tokens: int
    caller: _Caller[Result]
    place: int


class _Batch(NamedTuple, Generic[Item, Result]):
    """A batch under way."""

    running: asyncio.Future[None]
    items: list[_Waiting[Item, Result]]
    tokens: int
    given_s: float


class Cores:
    """The cores that batches take, of all batchers that share this, also in other processes.

    Args:
        taken: the batches under way in each process, in memory that the processes share.
        number: of this process there.
        most: how many batches have a core.
    """

    def __init__(self, taken: MutableSequence[int] | memoryview, number: int, most: int) -> None:
        self._taken, self._number, self._most = taken, number, most

    def take(self) -> None:
        """A batch begins."""
        self._taken[self._number] += 1

    def give_back(self) -> None:
        """A batch has ended."""
        self._taken[self._number] -= 1

    def one_is_free(self) -> bool:
        """Whether another batch would have a core."""
        return sum(self._taken) < self._most


class Batcher(Generic[Item, Result]):
    """Gives batches of the items of callers to the function of `open`; until that is called, items wait.

    A batch has at most `batch_tokens` tokens, or one item. Items of similar length share a batch, but an item is passed over for
    better lengths for at most `max_wait_ms`; 0 keeps strict order. A caller is refused if more than `max_texts` items or `max_tokens`
    tokens would wait, or if, at the recent speed, the tokens before the turn of its last item take longer than about `max_queue_s`.
    Tokens under way count where they are more than a batch, as those of a long item are: any caller may wait for one batch. An empty
    queue accepts any number, unless such an item is computed. `released` is called for each batch with the reason and the number of
    items; `clock` replaces that of the system. `cores` counts the batches under way: while one is free, waiting items need not wait for
    the batch before them.
    """

    def __init__(
        self,
        *,
        batch_tokens: int = 512,
        max_texts: int = 4096,
        max_tokens: int = 262_144,
        max_queue_s: float = 0.5,
        max_wait_ms: float = 20.0,
        clock: Callable[[], float] | None = None,
        released: Callable[[Reason, int], None] = lambda reason, items: None,
        cores: Cores | None = None,
    ) -> None:
        self._batch_tokens = batch_tokens
        self._max_texts = max_texts
        self._max_tokens = max_tokens
        self._max_queue_s = max_queue_s
        self._max_wait_s = max_wait_ms / 1000
        self._clock = clock or time.perf_counter
        self._released = released
        self._cores = cores or Cores([0], 0, 1)
        self._queue: list[_Waiting[Item, Result]] = []  # those of callers that have gone included
        self._waiting = self._queued_tokens = 0  # without these
        self._run: Run[Item, Result] | None = None
        self._at_once = 1  # batches under way at most
        self._under_way: list[_Batch[Item, Result]] = []
        self._after_another = False  # whether a batch has just ended
        self._feeding = False  # whether `_feed` is to be called in the next iteration of the loop
        self._packet_tokens = batch_tokens / PACKETS_A_BATCH
        self._virtual_now = 0.0
        self._not_in_virtual_now = 0  # tokens taken since virtual time last advanced
        # Tokens that are served before a new caller of one packet; None: to be counted.
        self._counted_before: int | None = 0
        self._callers = 0  # callers that wait for an answer
        self._numbers = itertools.count()
        self._s_per_token: float | None = None
        self._closing = False
        self._refusal: str | None = None

    @property
    def waiting(self) -> int:
        """Items that wait for their turn."""
        return self._waiting

    async def results(self, items: Sequence[Item], tokens: Sequence[int], answered: Wait | None = None) -> list[Any]:
        """The results of `items`, in order; `tokens` is the length of each.

        Raises Overloaded if the queue has no room, Unavailable if nothing will be computed, and the error of the first item that fails.
        If the caller is cancelled, its items that have not started are dropped. An error that is set on `answered`, a future of this
        loop that is done when the results are, ends the wait in the same way.
        """
        if not items:
            return []
        self.refuse_if_full(len(items), sum(tokens))
        loop = asyncio.get_running_loop()
        caller: _Caller[Result] = _Caller(len(items), answered or loop.create_future())
        start, packet_tokens = self._virtual_now, 0
        for place, (item, length) in enumerate(zip(items, tokens, strict=True)):
            self._push(_Waiting(start, next(self._numbers), item, length, caller, place))
            if self._counted_before is not None and start <= self._virtual_now:
                self._counted_before += length
            packet_tokens += length
            if packet_tokens >= self._packet_tokens:
                start, packet_tokens = start + packet_tokens, 0
        self._callers += 1
        self._feed_soon(loop)
        try:
            await caller.answered
        finally:
            self._callers -= 1
            if caller.left:
                if not caller.answered.cancel() and not caller.answered.cancelled():
                    caller.answered.exception()  # read, so that asyncio does not report it: a cancelled caller does not
                self._drop(caller)
        return caller.results

    def refuse_if_full(self, items: int, tokens: int = 0) -> None:
        """Overloaded if `items` more with `tokens` tokens in all do not fit the queue; Unavailable if nothing will be computed."""
        if self._closing or self._refusal:
            raise Unavailable(self._refusal or CLOSING)
        too_long_s = self._too_long_s(tokens)
        no_room = self.waiting + items > self._max_texts or self._queued_tokens + tokens > self._max_tokens
        if too_long_s or (self._waiting and no_room):
            retry_s = too_long_s or self.wait_s
            raise Overloaded(
                f"the queue is full (texts waiting: {self.waiting:,}, new: {items:,}); try again in {retry_s:.1f} s"
                if self._waiting
                else f"the model is busy with long texts; try again in {retry_s:.1f} s",
                retry_after_s=retry_s,
            )

    @property
    def full_s(self) -> float:
        """Estimated seconds until there is room for one more item; 0 if there is room."""
        return self._too_long_s(0) or (self.wait_s if self.waiting >= self._max_texts else 0.0)

    def _too_long_s(self, tokens: int) -> float:
        """Estimated seconds that a caller of `tokens` would wait, if that is above `max_queue_s`; else 0."""
        held_s = self._held_s()
        if self._turn_s(self._queued_tokens, held_s) <= self._max_queue_s:
            return 0.0
        # Tokens served before the caller's last item. They are counted on demand, which is only in a long queue.
        if tokens > self._packet_tokens:
            before = self._tokens_until(self._virtual_now + tokens)
        else:
            if self._counted_before is None:
                self._counted_before = self._tokens_until(self._virtual_now)
            before = self._counted_before
        wait_s = self._turn_s(before, held_s)
        return wait_s if wait_s > self._max_queue_s else 0.0

    def _turn_s(self, tokens: int, held_s: float) -> float:
        """Estimated seconds until the first `tokens` of the queue are computed, which begins in `held_s`, by all batches at once.

        Until a speed is measured, the queue counts nothing: until then the limits of texts and tokens bound it.
        """
        return held_s + tokens * (self._s_per_token or 0.0) / self._at_once

    def _held_s(self) -> float:
        """Estimated seconds before another batch is given, or what is left of one under way is as long as a batch."""
        if len(self._under_way) < self._at_once:
            return 0.0
        s_per_token = self._s_per_token or UNMEASURED_S_PER_TOKEN
        held_s = []
        for tokens, given_s in ((each.tokens, each.given_s) for each in self._under_way):
            took_s = self._clock() - given_s
            left_s = tokens * s_per_token - took_s
            # What is late may be late as long again; what nothing is known of may take as long again as it has taken.
            left_s = max(left_s, -left_s if self._s_per_token else took_s)
            held_s.append(max(0.0, left_s - self._batch_tokens * s_per_token) if tokens > self._batch_tokens else 0.0)
        return min(held_s)

    def _tokens_until(self, start: float) -> int:
        return sum(each.tokens for each in self._queue if each.start <= start and not each.caller.gone)

    @property
    def wait_s(self) -> float:
        """Estimated seconds to compute all waiting items; 1 s while no speed is known."""
        if not self._waiting:
            return 0.0
        if self._s_per_token is None:
            return 1.0
        return self._queued_tokens * self._s_per_token / self._at_once

    def open(self, run: "Run[Item, Result]", at_once: int = 1) -> None:
        """Computes with `run` from now on, which is given up to `at_once` batches at a time: one, and in a longer queue others."""
        self._refusal = None
        self._run, self._at_once = run, at_once
        self._feed_soon(asyncio.get_running_loop())

    def give_up(self, reason: str) -> None:
        """Fails all items, those under way and new ones too, with Unavailable and `reason`, until the batcher is opened again."""
        self._refusal = reason
        for each in itertools.chain.from_iterable(batch.items for batch in self._under_way):
            each.caller.take(each.place, Unavailable(reason))
        waiting, self._queue, self._waiting, self._queued_tokens, self._counted_before = self._queue, [], 0, 0, 0
        for each in waiting:
            each.caller.queued.clear()
            each.caller.take(each.place, Unavailable(reason))

    async def close(self) -> None:
        """Refuses new items, and waits until all accepted ones are answered."""
        self._closing = True
        self._feed()
        while self._under_way:
            await asyncio.wait([batch.running for batch in self._under_way])
            await asyncio.sleep(0)  # the next batch is given in the next iteration of the loop
        if self._waiting:  # nothing will compute these
            self.give_up(CLOSING)
        self._run = None  # with the model behind it

    def _feed_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives a batch in the next iteration of the loop, so that items which come in this one share it."""
        if not self._feeding:
            self._feeding = True
            loop.call_soon(self._feed)

    def _feed(self) -> None:
        """Gives batches while items wait: one if none is under way, and others if many tokens wait."""
        self._feeding = False
        while self._run and self._waiting and len(self._under_way) < self._at_once:
            if self._under_way and self._queued_tokens < WORTH_ANOTHER and not self._cores.one_is_free():
                break
            self._give(self._run)

    def _give(self, run: "Run[Item, Result]") -> None:
        given_s = self._clock()
        batch, full = self._take()
        tokens = sum(each.tokens for each in batch)
        self._released("idle" if not self._after_another else "full" if full else "freed", len(batch))
        undone = set(range(len(batch)))

        def done(place: int, result: Result | Exception) -> None:
            undone.discard(place)
            batch[place].caller.take(batch[place].place, result)

        def ended(running: asyncio.Future[None]) -> None:
            error = asyncio.CancelledError() if running.cancelled() else running.exception()
            outcome: Exception = Unavailable("the model gave no answer to this text; try again")
            if error is not None:
                outcome = error if isinstance(error, Exception) else Unavailable("the server is stopping")
            for place in list(undone):
                done(place, outcome)
            self._under_way = [each for each in self._under_way if each.running is not running]
            self._cores.give_back()
            if error is None:
                self._note_speed(tokens, self._clock() - given_s)
            self._after_another = True
            self._feed()
            self._after_another = bool(self._under_way)

        try:
            running: asyncio.Future[None] = asyncio.ensure_future(run([each.item for each in batch], done))
        except Exception as error:
            running = asyncio.get_running_loop().create_future()
            running.set_exception(error)
        self._under_way.append(_Batch(running, batch, tokens, given_s))
        self._cores.take()
        running.add_done_callback(ended)

    def _note_speed(self, tokens: int, seconds: float) -> None:
        if self._s_per_token is None and tokens < self._batch_tokens // 4:
            return
        # Times are averaged, not speeds: if the ends of two batches are noticed together, the second seems to take no time, and only the
        # average of times is right.
        now = seconds / max(1, tokens)
        before = self._s_per_token or now
        # A small batch weighs less, since its speed is not that of a long queue.
        weight = SPEED_SMOOTHING * min(1.0, tokens / self._batch_tokens)
        self._s_per_token = before + weight * (now - before)

    def _take(self) -> tuple[list[_Waiting[Item, Result]], bool]:
        """Takes the next batch out of the queue; also returns whether items are left. The queue must not be empty."""
        if self._waiting == 1:
            only = self._pop()
            self._advance(only.start, only.tokens)
            return [only], False
        batch_tokens = self._batch_tokens
        choice: list[_Waiting[Item, Result]] = []
        waited_long: list[bool] = []
        tokens, patient = 0, False
        now_s = asyncio.get_running_loop().time()
        # If no item may be passed over any longer, one batch of items is enough to choose from.
        while self._waiting and tokens < (CHOICE if patient else 1) * batch_tokens:
            each = self._pop()
            choice.append(each)
            waited_long.append(not self._max_wait_s or now_s - each.caller.passed_over_s[each.place] > self._max_wait_s)
            patient = patient or not waited_long[-1]
            tokens += each.tokens
        taken = set(picked([each.tokens for each in choice], waited_long, batch_tokens))
        last = max(taken)
        for place, each in enumerate(choice):
            if place not in taken:
                if place < last:
                    each.caller.passed_over_s[each.place] = min(now_s, each.caller.passed_over_s[each.place])
                self._push(each)
        batch = [choice[place] for place in sorted(taken)]
        self._advance(choice[0].start, sum(each.tokens for each in batch))
        return batch, self._waiting > 0

    def _advance(self, start: float, tokens: int) -> None:
        """Moves virtual time on as a batch of `tokens` is taken, the first of which may start at `start`.

        The tokens of this batch advance it with the next one: callers that arrive meanwhile count as from its start.
        """
        self._virtual_now += min(self._not_in_virtual_now, self._batch_tokens) / max(1, self._callers)
        self._virtual_now = max(self._virtual_now, start)
        self._not_in_virtual_now = tokens
        self._counted_before = None

    def _push(self, each: _Waiting[Item, Result]) -> None:
        heapq.heappush(self._queue, each)
        self._count(each, 1)

    def _pop(self) -> _Waiting[Item, Result]:
        """The next item of a caller that still waits; there must be one."""
        while (each := heapq.heappop(self._queue)).caller.gone:
            pass
        self._count(each, -1)
        return each

    def _count(self, each: _Waiting[Item, Result], change: int) -> None:
        queued = each.caller.queued.setdefault(each.start, [0, 0])
        queued[0] += change
        queued[1] += change * each.tokens
        self._waiting += change
        self._queued_tokens += change * each.tokens

    def _drop(self, caller: _Caller[Result]) -> None:
        """Takes the items of a caller that no longer waits out of all counts.

        They stay in the queue until they are reached, or are half of it: so that a caller costs its own items and not the queue's.
        """
        caller.gone = True
        for start, (items, tokens) in caller.queued.items():
            self._waiting -= items
            self._queued_tokens -= tokens
            if self._counted_before is not None and start <= self._virtual_now:
                self._counted_before -= tokens
        caller.queued.clear()
        if len(self._queue) > 2 * self._waiting:
            self._queue = [each for each in self._queue if not each.caller.gone]
            heapq.heapify(self._queue)


def picked(tokens: Sequence[int], waited_long: Sequence[bool], batch_tokens: int) -> list[int]:
    """Indices of the candidates, given in fair order, that make the next batch; the first candidate is always among them.

    The first goes in, whatever its length. If some have waited long, all candidates up to the last of these go in next, in order (not
    only those that waited long, or they would pass others that are before them). Then come those nearest in length to the first. The
    batch ends before the candidate with which it would have more than `batch_tokens` tokens.
    """
    in_order = max((place for place, long in enumerate(waited_long) if long), default=0) + 1
    nearest = sorted(range(in_order, len(tokens)), key=lambda place: abs(tokens[place] - tokens[0]))
    chosen, total = [0], tokens[0]
    for place in (*range(1, in_order), *nearest):
        if total + tokens[place] > batch_tokens:
            break
        chosen.append(place)
        total += tokens[place]
    return chosen
