"""Losses between two attentions that never hold either of them whole.

An attention is the softmax of the scaled products of queries and keys; of 512 tokens and 48 heads it has twelve million
numbers, and a loss on it as it is usually written keeps several of that size for the way back. Here a tile of some heads
and queries is computed over all keys, compared, turned into its part of the gradient of queries and keys, and forgotten:
memory grows as tokens times width (but for a bias by distance, where a family has one: it and its gradient are held once). The
gradient is taken on the way forward, since the loss is a number and the way back can only scale it. Padding is left out before
anything is computed; sequences of the same length share tiles.

`compress.relations` has the same losses as they are written in the papers.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from compress.losses import full
from compress.relations import dot_scores

# Of a tile: queries at most, and numbers in all. On a CPU a quarter of a million, a megabyte, stay in a core's cache (measured from
# 2^15 to 2^22); a GPU wants more at a time.
ROWS, NUMBERS, NUMBERS_ON_GPU = 128, 1 << 18, 1 << 25


class Dots(NamedTuple):
    """What an attention is made from: its scores are `queries keys^T / sqrt(width of a head) + bias`, before masks and softmax."""

    queries: Tensor  # (batch, heads, tokens, width of a head)
    keys: Tensor  # the same shape
    bias: Tensor | None = None  # (heads, tokens, tokens)

    def scores(self) -> Tensor:
        """All of them, (batch, heads, tokens, tokens)."""
        scores = dot_scores(self.queries, self.keys)
        return scores if self.bias is None else scores + self.bias


# The sum of a tile's losses, and their gradient in the student's scores: given the scores of teacher and student, both
# (heads, queries, keys) and free to be written over.
TileLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def tiled_loss(loss: str, teacher: Dots, student: Dots, mask: Tensor) -> Tensor:
    """The loss that `compress.objectives` calls `loss` (kl, squares or mse) of scores, in memory that grows as tokens times width.

    Args:
        loss: `kl`, the divergence of `compress.relations.attention_loss`; `squares`, of `attention_square_loss`; `mse`, of
            `score_loss`.
        teacher: no gradient.
        student: of as many heads; the width of a head may differ.
        mask: (batch, tokens), 1 for a real token and 0 for padding; each sequence has a real token.

    Returns:
        A scalar, 0 when the student's scores are the teacher's.
    """
    parts = [full(part) if part is not None else None for part in (*teacher, *student)]
    if not torch.is_grad_enabled():
        parts = [None if part is None else part.detach() for part in parts]
    value: Tensor = _Tiled.apply(TILE_LOSSES[loss], mask, *parts)  # type: ignore[no-untyped-call]
    return value


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: TileLoss, mask: Tensor, *parts: Tensor | None) -> Tensor:
        teacher, student = Dots(*parts[:3]), Dots(*parts[3:])  # type: ignore[arg-type]
        slopes = _zeros(student) if any(ctx.needs_input_grad) else None
        value = torch.zeros((), dtype=torch.float64, device=mask.device)
        batch, heads = student.queries.shape[:2]
        biased = teacher.bias is not None or student.bias is not None  # one of the two may be of another family
        for some in _of_one_length(mask, alone=biased):
            real = mask[some].nonzero()[:, 1].view(len(some), -1)
            weight = 1 / (batch * heads * real.shape[1])  # of a query of a head
            theirs, ours = _real(teacher, some, real), _real(student, some, real)
            found = _zeros(ours) if slopes else None
            value += weight * _over_tiles(loss, theirs, ours, found, weight)
            if slopes and found:
                _put(slopes.queries, some, real, found.queries * _scale(student))
                _put(slopes.keys, some, real, found.keys)
                if slopes.bias is not None and found.bias is not None:
                    slopes.bias[:, real[0][:, None], real[0]] += found.bias
        ctx.save_for_backward(*(slopes or ()))
        return value.to(student.queries.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return (*[None] * 5, *(None if x is None else slope * x for x in ctx.saved_tensors))


def _of_one_length(mask: Tensor, *, alone: bool) -> Iterator[Tensor]:
    """Indices of sequences that have as many real tokens as each other; or of one at a time."""
    lengths = mask.sum(dim=1).tolist()
    for length in sorted(set(lengths)):
        some = torch.tensor([i for i, other in enumerate(lengths) if other == length], device=mask.device)
        yield from some[:, None] if alone else (some,)


def _real(dots: Dots, some: Tensor, real: Tensor) -> Dots:
    """The tokens `real` (sequences, tokens) of the sequences `some`, one head after the other, (sequences * heads, tokens, width).

    Queries are scaled, so that scores are bare products. A bias is of a single sequence.
    """
    bias = None if dots.bias is None else dots.bias[:, real[0][:, None], real[0]]
    queries, keys = (x[some[:, None], :, real].transpose(1, 2).flatten(0, 1) for x in dots[:2])
    return Dots(queries * _scale(dots), keys, bias)


def _put(into: Tensor, some: Tensor, real: Tensor, found: Tensor) -> None:
    """The way back of `_real`."""
    into[some[:, None], :, real] = found.view(len(some), -1, *found.shape[1:]).transpose(1, 2)


def _scale(dots: Dots) -> float:
    return float(dots.queries.shape[-1] ** -0.5)


def _zeros(like: Dots) -> Dots:
    bias = None if like.bias is None else torch.zeros_like(like.bias)
    return Dots(torch.zeros_like(like.queries), torch.zeros_like(like.keys), bias)


def _over_tiles(loss: TileLoss, theirs: Dots, ours: Dots, slopes: Dots | None, weight: float) -> Tensor:
    """The sum of `loss` over all tiles, float64; its gradient, times `weight`, is added to `slopes`."""
    heads, tokens, _ = ours.queries.shape
    numbers = NUMBERS_ON_GPU if ours.queries.is_cuda else NUMBERS
    rows = min(tokens, ROWS, max(1, numbers // tokens))
    some = max(1, numbers // (rows * tokens))
    value = torch.zeros((), dtype=torch.float64, device=ours.queries.device)
    for first in range(0, heads, some):
        h = slice(first, first + some)
        for start in range(0, tokens, rows):
            q = slice(start, start + rows)
            part, slope = loss(_tile(theirs, h, q), _tile(ours, h, q))
            value += part
            if slopes:
                slope *= weight
                slopes.queries[h, q] = slope @ ours.keys[h]
                slopes.keys[h] += slope.transpose(-1, -2) @ ours.queries[h, q]
                if slopes.bias is not None:
                    slopes.bias[h, q] += slope
    return value


def _tile(dots: Dots, heads: slice, queries: slice) -> Tensor:
    """Some rows of the scores of a sequence, new numbers."""
    products = dots.queries[heads, queries] @ dots.keys[heads].transpose(-1, -2)
    return products if dots.bias is None else products.add_(dots.bias[heads, queries])


def _exponents(scores: Tensor) -> tuple[Tensor, Tensor]:
    """`exp(scores - their maximum)` in place of a copy, and its sums over keys; `scores` become what the exponents are of."""
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    exponents = scores.exp()
    return exponents, exponents.sum(dim=-1, keepdim=True)


def _divergence(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    target, target_sum = _exponents(theirs)
    found, found_sum = _exponents(ours)
    target.div_(target_sum)
    terms = theirs.sub_(ours).mul_(target).sum() - (target_sum.log() - found_sum.log()).sum()
    return terms, found.div_(found_sum).sub_(target)


def _squares(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    target, target_sum = _exponents(theirs)
    found, found_sum = _exponents(ours)
    found.div_(found_sum)
    apart = found - target.div_(target_sum)
    slope = apart.sub((found * apart).sum(dim=-1, keepdim=True)).mul_(found)
    return apart.square_().sum() / 2, slope


def _mse(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    apart = ours.sub_(theirs)
    return apart.square().sum() / apart.shape[-1], apart.mul(2 / apart.shape[-1])


TILE_LOSSES: dict[str, TileLoss] = {"kl": _divergence, "squares": _squares, "mse": _mse}
