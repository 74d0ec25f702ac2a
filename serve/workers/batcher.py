"""Work of many callers -> batches for the slots that compute. Knows nothing of HTTP and nothing of models.

A slot is one computer of batches (a model's process), busy with one batch at a time. There is no timer: an idle slot gets
what has come at once; while all are busy, what comes waits, so that batches grow by themselves exactly when there is load.

Order is fair between callers, not between items: start-time fair queueing (Goyal, Vin and Cheng 1996, section 2). What a
caller brings is cut into packets of about half a batch. Each is stamped with the virtual time at which it would start if
every caller had an equal share of tokens; the lowest stamp goes first, and of equal ones the earlier. So one caller of a thousand
items delays a caller of one by about a batch, and not by a thousand items; and callers of a few items, each one packet, are served
in the order in which they came, for taking turns among them would make all of them late. Virtual time also goes on by what is
computed, divided by those who wait (as it does in fair queueing itself, section 2 there): or an endless stream of new callers, all
stamped with the same time, would keep back the second packet of a large one for ever. An item larger than a batch counts as one batch
there, for it would lift a large caller's whole backlog above whoever comes next.
"""

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar, cast

from serve.errors import Overloaded, Unavailable

Item = TypeVar("Item")
Result = TypeVar("Result")

Done = Callable[[int, Result | Exception], None]
# Computes a batch: tells `Done` of each item by its place, in any order, and returns once all are done. What it raises goes
# to the items that are not done yet, and ends the slot.
Run = Callable[[list[Item], Done[Result]], Awaitable[None]]
# Why a batch was released: a slot was idle when its first item came, or it was new; a slot became free and the batch was full; or it
# became free and took all that waited.
Reason = Literal["idle", "full", "freed"]

# Weight of the newest batch in the running estimate of the slots' speed.
SPEED_SMOOTHING = 0.2
# Tokens below which a batch is not divided among slots that are idle: a run of the model has a cost of its own.
WORTH_DIVIDING = 256
# Tokens that must wait before a slot is given its next batch while it computes one: with so much to do it should not stand still until
# this process, busy with requests, hears that it has ended. With less, a larger batch a little later is worth more.
WORTH_HURRYING = 256
DISPATCHERS = 2  # batches that a slot has at most: one that it computes, one that waits beside it
# Of how many batches' worth of waiting items, in fair order, those of like length are picked.
CHOICE = 4
PACKETS_A_BATCH = 2


class _Caller(Generic[Result]):
    """One caller: its results so far, and what it waits for."""

    __slots__ = ("answered", "left", "passed_over_s", "results")

    def __init__(self, items: int, loop: asyncio.AbstractEventLoop) -> None:
        self.results: list[Result | None] = [None] * items
        self.left = items
        self.passed_over_s = [math.inf] * items
        """When each was first passed over for others of more fitting length."""
        self.answered: asyncio.Future[None] = loop.create_future()

    def take(self, place: int, result: Result | Exception) -> None:
        """Notes a result; an error ends the waiting at once."""
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
    """An item in the queue, which is a heap of these: ordered by `start`, then by `number`, which is like no other."""

    start: float  # virtual
    number: int
    item: Item
    tokens: int
    caller: _Caller[Result]
    place: int


class WorkerSlot:
    """One computer of batches that a batcher feeds, until it is removed or its function raises."""

    def __init__(self) -> None:
        self.open = True
        self.under_way = 0  # batches that it was given and has not answered
        self.ended_s = 0.0  # when it last ended one
        self.task: asyncio.Task[None]


class Batcher(Generic[Item, Result]):
    """Feeds slots with batches of what callers bring.

    A batch has at most `batch_tokens` tokens in all, or one item. Items of like length share a batch, but none is passed over for such
    company for more than `max_wait_ms`; 0 keeps strict order. At most `max_texts` items and `max_tokens` tokens wait; beyond that callers
    are refused. So is who would wait for longer than about `max_queue_s` at the speed of late, for what is before the turn of the last that
    it brings. An empty queue takes anything.
    `released` is told of each batch: why, and how many items it has.
    """

    def __init__(
        self,
        *,
        batch_tokens: int = 512,
        max_texts: int = 4096,
        max_tokens: int = 262_144,
        max_queue_s: float = 0.5,
        max_wait_ms: float = 20.0,
        released: Callable[[Reason, int], None] = lambda reason, items: None,
    ) -> None:
        self._batch_tokens = batch_tokens
        self._max_texts = max_texts
        self._max_tokens = max_tokens
        self._max_queue_s = max_queue_s
        self._max_wait_s = max_wait_ms / 1000
        self._released = released
        self._queue: list[_Waiting[Item, Result]] = []
        self._queued_tokens = 0
        self._slots: list[WorkerSlot] = []
        self._asleep: list[tuple[WorkerSlot, asyncio.Future[None]]] = []
        self._packet_tokens = batch_tokens / PACKETS_A_BATCH
        self._virtual_now = 0.0
        self._not_in_virtual_now = 0  # tokens taken since it went on
        self._counted_before: int | None = 0  # tokens whose turn is before that of a caller of one packet
        self._callers = 0  # that wait for an answer
        self._numbers = itertools.count()
        self._s_per_token: float | None = None  # of one slot
        self._closing = False
        self._refusal: str | None = None

    @property
    def waiting(self) -> int:
        """Items that wait for a slot."""
        return len(self._queue)

    @property
    def slots(self) -> int:
        """Slots that compute or could."""
        return sum(slot.open for slot in self._slots)

    async def results(self, items: Sequence[Item], tokens: Sequence[int]) -> list[Result]:
        """The results of `items`, in their order; `tokens` is the length of each.

        Raises Overloaded when the queue has no room, Unavailable when no slot is to come, and for the first item that
        failed what its slot said. A caller that is cancelled takes its items with it: those not yet begun are never run.
        """
        if not items:
            return []
        self.refuse_if_full(len(items), sum(tokens))
        caller: _Caller[Result] = _Caller(len(items), asyncio.get_running_loop())
        start, packet_tokens = self._virtual_now, 0
        for place, (item, length) in enumerate(zip(items, tokens, strict=True)):
            heapq.heappush(self._queue, _Waiting(start, next(self._numbers), item, length, caller, place))
            if self._counted_before is not None and start <= self._virtual_now:
                self._counted_before += length
            packet_tokens += length
            if packet_tokens >= self._packet_tokens:
                start, packet_tokens = start + packet_tokens, 0
        self._queued_tokens += sum(tokens)
        self._callers += 1
        self._wake()
        try:
            await caller.answered
        finally:
            self._callers -= 1
            if caller.left:
                if not caller.answered.cancel() and not caller.answered.cancelled():
                    caller.answered.exception()  # looked at: whoever is cancelled as it comes does not hear of it
                self._sweep()
        return cast("list[Result]", caller.results)

    def refuse_if_full(self, items: int, tokens: int = 0) -> None:
        """Overloaded when `items` more of `tokens` in all do not fit the queue; Unavailable once there is no slot to come."""
        if self._closing or self._refusal:
            raise Unavailable(self._refusal or "the model is being closed; try again in a second")
        if not self._queue:
            return
        too_long_s = self._too_long_s(tokens)
        if too_long_s or self.waiting + items > self._max_texts or self._queued_tokens + tokens > self._max_tokens:
            retry_s = too_long_s or self.wait_s
            raise Overloaded(
                f"{self.waiting} texts are waiting, {items} more do not fit; try again in {retry_s:.1f} s",
                retry_after_s=retry_s,
            )

    @property
    def full_s(self) -> float:
        """About how long until there is room for one more; 0 where there is."""
        return self._too_long_s(0) or (self.wait_s if self.waiting >= self._max_texts else 0.0)

    def _too_long_s(self, tokens: int) -> float:
        """About how long a caller of `tokens` would wait, if that is longer than anybody may; else 0."""
        wait_s = self.wait_s
        if not self._speed_is_known or wait_s <= self._max_queue_s:
            return 0.0
        wait_s *= self._tokens_before(tokens) / max(1, self._queued_tokens)
        return wait_s if wait_s > self._max_queue_s else 0.0

    def _tokens_before(self, tokens: int) -> int:
        """Tokens whose turn is before the last of a caller of `tokens` who comes now. Counted when asked for, which is in a long queue."""
        if tokens > self._packet_tokens:
            return self._tokens_until(self._virtual_now + tokens)
        if self._counted_before is None:
            self._counted_before = self._tokens_until(self._virtual_now)
        return self._counted_before

    def _tokens_until(self, start: float) -> int:
        return sum(each.tokens for each in self._queue if each.start <= start)

    @property
    def _speed_is_known(self) -> bool:
        """Whether there is a slot, and it has ended a batch: until then only the numbers of texts and tokens bound the queue."""
        return self._s_per_token is not None and self.slots > 0

    @property
    def wait_s(self) -> float:
        """About how long what waits now will take; a second while no speed is known."""
        if not self._queue:
            return 0.0
        if self._s_per_token is None:
            return 1.0
        return self._queued_tokens * self._s_per_token / max(1, self.slots)

    def add_slot(self, run: "Run[Item, Result]") -> WorkerSlot:
        """Feeds one more slot; its task ends when it is removed, or with what `run` raised."""
        slot = WorkerSlot()
        self._refusal = None
        self._slots.append(slot)
        slot.task = asyncio.get_running_loop().create_task(self._feed(slot, run))
        return slot

    async def remove_slot(self, slot: WorkerSlot) -> None:
        """Ends a slot once the batch under way is done."""
        slot.open = False
        self._wake(everyone=True)
        await asyncio.wait([slot.task])

    def give_up(self, reason: str) -> None:
        """Fails what waits, and refuses what comes, with Unavailable and `reason`: until there is a slot again.

        Without it work waits for the next slot, as it should while a process that died is being replaced.
        """
        self._refusal = reason
        waiting, self._queue, self._queued_tokens, self._counted_before = self._queue, [], 0, 0
        for each in waiting:
            each.caller.take(each.place, Unavailable(reason))

    async def close(self) -> None:
        """Refuses what comes from now on, waits until everything accepted is answered, and ends the slots."""
        self._closing = True
        self._wake(everyone=True)
        if tasks := [slot.task for slot in self._slots]:
            await asyncio.wait(tasks)
        if self._queue:  # no slot is left to compute it
            self.give_up("the model is being closed; try again in a second")

    async def _feed(self, slot: WorkerSlot, run: "Run[Item, Result]") -> None:
        """Keeps a slot fed by dispatchers that each wait for the batch they gave; ends with what the first of them ends with."""
        dispatchers = [asyncio.ensure_future(self._dispatch(slot, run)) for _ in range(DISPATCHERS)]
        try:
            await asyncio.wait(dispatchers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            slot.open = False
            self._slots.remove(slot)
            self._wake(everyone=True)
            ends = await asyncio.gather(*dispatchers, return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end

    async def _dispatch(self, slot: WorkerSlot, run: "Run[Item, Result]") -> None:
        while True:
            began_s, idle = time.perf_counter(), not slot.ended_s and not slot.under_way
            while slot.open and not self._may_take(slot):
                if self._closing and not self._queue:
                    self._wake(everyone=True)
                    return
                self._wake()  # it was woken for what another slot may take
                await self._sleep(slot)
                began_s, idle = time.perf_counter(), not slot.under_way
            if not slot.open:
                return
            slot.under_way += 1
            batch, full = self._take()
            self._released("idle" if idle else "full" if full else "freed", len(batch))
            try:
                await self._compute(batch, run)
            except BaseException:
                slot.open = False  # at once: no other dispatcher may give it more
                raise
            finally:
                slot.under_way -= 1
            # A batch given beforehand begins when the one before it ends.
            now_s = time.perf_counter()
            self._note_speed(sum(each.tokens for each in batch), now_s - max(began_s, slot.ended_s))
            slot.ended_s = now_s

    def _may_take(self, slot: WorkerSlot) -> bool:
        return slot.open and bool(self._queue) and (not slot.under_way or self._queued_tokens >= WORTH_HURRYING)

    async def _sleep(self, slot: WorkerSlot) -> None:
        """Until there may be work for this slot."""
        asleep = (slot, asyncio.get_running_loop().create_future())
        self._asleep.append(asleep)
        try:
            await asleep[1]
        finally:
            if asleep in self._asleep:
                self._asleep.remove(asleep)

    def _wake(self, *, everyone: bool = False) -> None:
        """Wakes a dispatcher that may take what waits, of an idle slot if there is one; or all of them."""
        able = [each for each in self._asleep if everyone or self._may_take(each[0])]
        # Of the idle ones that computed last: its caches are warm.
        for asleep in able if everyone else [min(reversed(able), key=lambda each: each[0].under_way)] if able else []:
            self._asleep.remove(asleep)
            if not asleep[1].done():
                asleep[1].set_result(None)

    async def _compute(self, batch: list[_Waiting[Item, Result]], run: "Run[Item, Result]") -> None:
        undone = set(range(len(batch)))

        def done(place: int, result: Result | Exception) -> None:
            undone.discard(place)
            batch[place].caller.take(batch[place].place, result)

        try:
            await run([each.item for each in batch], done)
        except BaseException as error:
            outcome = error if isinstance(error, Exception) else Unavailable("the server is stopping")
            for place in list(undone):
                done(place, outcome)
            raise
        for place in list(undone):
            done(place, Unavailable("the model gave no answer to this text"))

    def _note_speed(self, tokens: int, seconds: float) -> None:
        if self._s_per_token is None and tokens < self._batch_tokens // 4:
            return
        # Times, not speeds: of two batches heard of together the second seems to take no time, which is right only on the average of times.
        now = seconds / max(1, tokens)
        before = self._s_per_token or now
        # Small batches say little of the speed at which a queue is worked off.
        weight = SPEED_SMOOTHING * min(1.0, tokens / self._batch_tokens)
        self._s_per_token = before + weight * (now - before)

    def _take(self) -> tuple[list[_Waiting[Item, Result]], bool]:
        """The next batch, taken out of the queue, and whether others had to stay behind. Something waits.

        Where other slots are idle, it leaves them their share.
        """
        others = {slot for slot, _ in self._asleep if slot.open and not slot.under_way}
        share = -(-self._queued_tokens // (len(others) + 1))
        batch_tokens = min(self._batch_tokens, max(WORTH_DIVIDING, share))
        choice: list[_Waiting[Item, Result]] = []
        waited_long: list[bool] = []
        tokens, patient = 0, False
        now_s = asyncio.get_running_loop().time()
        # Where nobody can wait for company, there is nothing to choose.
        while self._queue and tokens < (CHOICE if patient else 1) * batch_tokens:
            each = heapq.heappop(self._queue)
            choice.append(each)
            waited_long.append(not self._max_wait_s or now_s - each.caller.passed_over_s[each.place] > self._max_wait_s)
            patient = patient or not waited_long[-1]
            tokens += each.tokens
        # What this batch is worth counts from the next one on: whoever comes while it is computed comes at its start.
        self._virtual_now += min(self._not_in_virtual_now, self._batch_tokens) / max(1, self._callers)
        self._virtual_now = max(self._virtual_now, choice[0].start)
        taken = set(picked([each.tokens for each in choice], waited_long, batch_tokens))
        last = max(taken)
        for place, each in enumerate(choice):
            if place not in taken:
                if place < last:
                    each.caller.passed_over_s[each.place] = min(now_s, each.caller.passed_over_s[each.place])
                heapq.heappush(self._queue, each)
        batch = [choice[place] for place in sorted(taken)]
        self._not_in_virtual_now = sum(each.tokens for each in batch)
        self._queued_tokens -= self._not_in_virtual_now
        self._counted_before = None
        if self._queue:
            self._wake()  # there is more than one slot can take
        return batch, bool(self._queue)

    def _sweep(self) -> None:
        """Takes out of the queue what nobody waits for any more: it must not fill it."""
        self._queue = [each for each in self._queue if not each.caller.answered.done()]
        heapq.heapify(self._queue)
        self._queued_tokens = sum(each.tokens for each in self._queue)
        self._counted_before = None


def picked(tokens: Sequence[int], waited_long: Sequence[bool], batch_tokens: int) -> list[int]:
    """Which of the candidates, in fair order, make the next batch: places, the first among them.

    The first goes in, whatever its length. Where one has waited long, no more are preferred to it: all up to the last such go in first, in
    their order. (Not those that waited long alone, or they would be preferred to others whose turn is before theirs.) Then those nearest in
    length to the first, while all have at most `batch_tokens` tokens.
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
