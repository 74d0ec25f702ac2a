"""Ends waits for answers whose time is up, with one timer for all of them."""

import asyncio

# A wait ends at most this long after its time.
TICK_S = 0.005


class Deadlines:
    """Futures of one event loop, each with the time until which it may be waited for."""

    def __init__(self) -> None:
        self._waits: dict[int, set[asyncio.Future[None]]] = {}  # by the tick in which they end
        self._timer: asyncio.TimerHandle | None = None
        self._fires = 0  # the tick

    def add(self, wait: asyncio.Future[None], allowed_s: float) -> int:
        """Sets TimeoutError on `wait` after about `allowed_s` seconds, unless it is done or removed. Returns what `remove` asks for."""
        loop = wait.get_loop()
        tick = int((loop.time() + allowed_s) / TICK_S) + 1
        waits = self._waits.get(tick)
        if waits is None:
            self._waits[tick] = {wait}
            if self._timer is None or tick < self._fires:
                self._fire_at(tick, loop)
        else:
            waits.add(wait)
        return tick

    def remove(self, wait: asyncio.Future[None], tick: int) -> None:
        """Forgets `wait`, which `add` gave `tick`."""
        if waits := self._waits.get(tick):
            waits.discard(wait)
            if not waits:
                del self._waits[tick]

    def _fire_at(self, tick: int, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires = tick
        self._timer = loop.call_at(tick * TICK_S, self._fire, loop)

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        # A clock of whole milliseconds may be a little behind its own timer.
        now = max(self._fires, int(loop.time() / TICK_S))
        for tick in sorted(tick for tick in self._waits if tick <= now):
            for wait in self._waits.pop(tick):
                if not wait.done():
                    wait.set_exception(TimeoutError())
        if self._waits:
            self._fire_at(min(self._waits), loop)
