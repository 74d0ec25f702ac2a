"""A call that is interrupted once, as by Ctrl-C."""

from collections.abc import Callable
from typing import Any


def interrupted_at(call: int, real: Callable[..., Any], sizes: list[int]) -> Callable[..., Any]:
    """`real` (model, texts, ...), but its call of that number, from 1, raises KeyboardInterrupt; `sizes` gets the texts of each call."""

    def called(model: Any, texts: Any, *more: Any) -> Any:
        sizes.append(len(texts))
        if len(sizes) == call:
            raise KeyboardInterrupt
        return real(model, texts, *more)

    return called
