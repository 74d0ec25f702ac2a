"""The peak memory of tensors, counted at their creation: the same on every machine."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """`bytes` is the peak memory of tensors created within it, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (key := id_of(leaf)) not in self._seen | given:
                storage = leaf.untyped_storage()
                self._seen.add(key)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._left, key, storage.nbytes())
        self.bytes = max(self.bytes, self._now)
        return result

    def _left(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._now -= size


def id_of(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)
