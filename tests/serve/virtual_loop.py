"""An event loop whose clock does not wait, so that a test of the batcher does not depend on the machine."""

import asyncio
import selectors


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock does not wait: what is due next is due at once. Each turn of it takes `turn_s` seconds more.

    RuntimeError where nothing is due and nothing can become due: such a loop would wait for ever.
    """

    def __init__(self, turn_s: float = 0.0) -> None:
        self._clock = _Clock(turn_s)
        super().__init__(self._clock)

    def time(self) -> float:
        """Seconds that have passed in this loop."""
        return self._clock.now_s


class _Clock(selectors.DefaultSelector):
    def __init__(self, turn_s: float) -> None:
        super().__init__()
        self.turn_s, self.now_s = turn_s, 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is due in this loop, so it would wait for ever")
        self.now_s += timeout if timeout > 0 else self.turn_s
        return super().select(0)
