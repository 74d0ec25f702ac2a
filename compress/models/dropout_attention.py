"""Attention with dropout on a CPU, in tiles.

Torch's fast CPU kernels have no dropout. Its fallback holds several (tokens, tokens) matrices for every head and layer, and
draws their dropout slowly. Here a tile of some queries is computed at a time and recomputed in the backward pass, with dropout
drawn from the same seed, so no (tokens, tokens) matrix is kept.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from compress.losses.outputs import full
from compress.losses.tiled_relations import on_cores

NUMBERS = 1 << 18  # of a tile: a megabyte, which stays in a core's cache
SHORT = 48  # tokens below which torch is faster
DRAWS = 1 << 16  # dropout is drawn in steps of one part of this


# The positional parameters of torch's function, in order; its others are keyword-only.
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class TiledAttention(TorchFunctionMode):
    """Context in which `scaled_dot_product_attention` with dropout is computed in tiles on a CPU; other calls do not change."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `torch.overrides`."""
        if func is functional.scaled_dot_product_attention:
            given = dict(zip(NAMES, args, strict=False)) | (kwargs or {})
            if _in_tiles(given):
                return dropout_attention(
                    given["query"],
                    given["key"],
                    given["value"],
                    given.get("attn_mask"),
                    given["dropout_p"],
                    given.get("scale"),
                )
        return func(*args, **(kwargs or {}))


def _in_tiles(given: dict[str, Any]) -> bool:
    query, mask = given["query"], given.get("attn_mask")
    plain = not given.get("is_causal") and not given.get("enable_gqa") and (mask is None or not mask.requires_grad)
    alike = query.ndim == 4 and query.shape == given["key"].shape == given["value"].shape
    return (
        plain
        and alike
        and query.shape[2] >= SHORT
        and 0 < given.get("dropout_p", 0.0) < 1
        and query.device.type == "cpu"
    )


def dropout_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float | None = None
) -> Tensor:
    """`dropout(softmax(scale query key^T + mask)) value`, in float32, and in memory that grows as tokens times width.

    Args:
        query: (batch, heads, tokens, width).
        key: the same shape.
        value: the same shape.
        mask: broadcastable to (batch, heads, tokens, tokens): numbers that are added, or True for pairs that may attend.
        dropout: the share of the attention that is dropped, below 1; torch's generator draws the seed.
        scale: `1 / sqrt(width)` unless given.

    Returns:
        The same shape and type as `query`.
    """
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    seed = int(torch.randint(2**63 - 1, ()))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # The backward pass runs outside autocast, and must compute the same numbers as the forward pass.
    with torch.autocast("cpu", enabled=False):
        answer: Tensor = _Tiled.apply(query, key, value, mask, dropout, scale, seed)  # type: ignore[no-untyped-call]
    return answer


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        scale: float,
        seed: int,
    ) -> Tensor:
        answer = torch.empty_like(query)
        added = _added(mask)

        def of_heads(part: Heads) -> None:
            i, h, rows = part
            keys, values = full(key[i, h]), full(value[i, h]) / (1 - dropout)
            random = part.random(seed)
            for q in rows:
                shares = _attention(full(query[i, h, q]) * scale, keys, added, (i, h, q))
                shares.mul_(_kept(random, shares.shape, dropout))
                answer[i, h, q] = shares @ values

        on_cores(of_heads, _tiles(query))
        ctx.save_for_backward(query, key, value, mask, answer)
        ctx.settings = dropout, scale, seed
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, answer = ctx.saved_tensors
        dropout, scale, seed = ctx.settings
        slopes = [torch.zeros_like(part) for part in (query, key, value)]
        added = _added(mask)  # recomputed: only the mask, which all layers share, is saved

        def of_heads(part: Heads) -> None:
            i, h, rows = part
            keys, values = full(key[i, h]), full(value[i, h])
            random = part.random(seed)
            for q in rows:
                queries, up = full(query[i, h, q]) * scale, full(slope[i, h, q])
                row = (up * full(answer[i, h, q])).sum(dim=-1, keepdim=True)
                up = up / (1 - dropout)
                shares = _attention(queries, keys, added, (i, h, q))
                kept = _kept(random, shares.shape, dropout)
                scores = (up @ values.transpose(-1, -2)).mul_(kept).sub_(row).mul_(shares)
                slopes[0][i, h, q] = (scores @ keys).mul_(scale)
                slopes[1][i, h] += scores.transpose(-1, -2) @ queries
                slopes[2][i, h] += shares.mul_(kept).transpose(-1, -2) @ up

        on_cores(of_heads, _tiles(query))
        return (*slopes, None, None, None, None)


class Heads(NamedTuple):
    """Some heads of some sequences, and the queries of each of their tiles."""

    texts: slice
    heads: slice
    rows: list[slice]

    def random(self, seed: int) -> np.random.Generator:
        """The generator of their dropout; each part has its own, so the order of computation does not matter."""
        return np.random.Generator(np.random.SFC64([seed, self.texts.start, self.heads.start]))


def _tiles(query: Tensor) -> Iterator[Heads]:
    """The parts that one core computes at a time: short sequences share a tile; a long one gives several tiles a head."""
    batch, heads, tokens, _ = query.shape
    rows = min(tokens, max(1, NUMBERS // tokens))
    some = max(1, NUMBERS // (rows * tokens))
    texts = max(1, some // heads)
    parts = [slice(row, row + rows) for row in range(0, tokens, rows)]
    for i in range(0, batch, texts):
        for head in range(0, heads, some):
            yield Heads(slice(i, i + texts), slice(head, head + some), parts)


def _added(mask: Tensor | None) -> Tensor | None:
    """`mask` as numbers to add to scores, once for all heads that share it: adding is 10 times as fast as filling.

    Masked pairs get the smallest float32, not -inf: a query whose keys are all masked, as in padding, must not give NaN.
    """
    if mask is None:
        return None
    shared = mask[:, :1] if mask.stride(1) == 0 else mask
    least = torch.finfo(torch.float32).min
    if shared.dtype is torch.bool:
        shared = torch.zeros(shared.shape).masked_fill_(~shared, least)
    return full(shared).clamp(min=least).expand(mask.shape)


def _attention(queries: Tensor, keys: Tensor, mask: Tensor | None, tile: tuple[slice, slice, slice]) -> Tensor:
    scores = queries @ keys.transpose(-1, -2)
    if mask is not None:
        scores.add_(mask[tile])
    return torch.softmax(scores, dim=-1)


def _kept(random: np.random.Generator, shape: torch.Size, dropout: float) -> Tensor:
    """1 where the attention is kept, 0 where it is dropped. Drawing 2 bytes by numpy takes a tenth of the time of torch's draw."""
    count = shape.numel()
    drawn = random.bit_generator.random_raw(-(-count // 4)).view(np.uint16)[:count]
    # Float32, because torch multiplies two float32 tensors 10 times as fast as float32 with bool.
    return torch.from_numpy((drawn >= round(dropout * DRAWS)).astype(np.float32)).view(shape)
