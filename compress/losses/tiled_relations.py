"""Losses between two attentions, computed in tiles: neither attention is ever held whole.

An attention is the softmax of the scaled products of queries and keys. With 512 tokens and 48 heads it has 12.6 million
numbers, and the usual form of a loss on it keeps several tensors of that size for the backward pass. Here a tile of some heads
and queries is computed over all keys, compared, turned into its part of the gradient of queries and keys, and discarded, so
memory grows as tokens times width. (A family's bias by distance and its gradient are held once.) The gradient is computed in the
forward pass, because the loss is a scalar and the backward pass can only scale it. Padding is removed first; sequences of the
same length share tiles. Torch would divide every operation on a tile, which takes 0.1 ms, among the cores: dividing it takes about as
long, so each core computes tiles of its own (`on_cores`).

On a GPU the divergence has its own kernels (`compress.losses.triton_kl`). The tests hold all to the same losses in the form of the
papers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from threading import Barrier
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from compress.losses.outputs import full, sequence_lengths
from compress.losses.vectors import dot_scores

# Of a tile: most queries, and most numbers. On a CPU a tile of 0.5 MB and its results stay in a core's cache
# (measured from 2^15 to 2^22 numbers); a GPU is faster with larger tiles.
ROWS, NUMBERS, NUMBERS_ON_GPU = 128, 1 << 17, 1 << 25


class RelationFactors(NamedTuple):
    """The factors of an attention's scores, `queries keys^T / sqrt(width of a head) + bias`, before masks and softmax."""

    queries: Tensor  # (batch, heads, tokens, width of a head)
    keys: Tensor | None = None  # the same shape; None for a relation, whose keys are its queries
    bias: Tensor | None = None  # (heads, tokens, tokens)

    def scores(self) -> Tensor:
        """All scores, (batch, heads, tokens, tokens)."""
        scores = dot_scores(self.queries, self.queries if self.keys is None else self.keys)
        return scores if self.bias is None else scores + self.bias


# Takes the scores of teacher and student, both (heads, queries, keys), which it may overwrite; gives the sum of the tile's
# losses and its gradient in the student's scores.
TileLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def tiled_loss(loss: str, teacher: RelationFactors, student: RelationFactors, mask: Tensor) -> Tensor:
    """The loss `loss` (one of `TILE_LOSSES`, as in `compress.methods.objectives`) of scores, in memory that grows as tokens times width.

    Args:
        loss: `kl`, the divergence of the student's attention from the teacher's (MiniLM, section 3), which for scores of queries
            with themselves is that of relations (MiniLMv2, eqs 7-9); the papers' cross-entropy differs only by the teacher's
            entropy. `squares`, half the squared difference of the attention distributions, summed over keys (XtremeDistil,
            eq. 9); `mean squares`, the squared difference itself, mean over keys (its authors' code). `mse`, the mean squared
            difference of scores before the softmax, over pairs of real tokens (TinyBERT, section 3). Means are over heads, a
            sequence's real queries, then sequences.
        teacher: gets no gradient.
        student: has as many heads; their width may differ.
        mask: (batch, tokens), as `compress.losses.outputs.sequence_lengths` takes it: each sequence attends to itself alone.

    Returns:
        A scalar, 0 if the student's scores equal the teacher's.
    """
    parts: list[Tensor | None] = [*teacher, *student]
    if not torch.is_grad_enabled():
        parts = [None if part is None else part.detach() for part in parts]
    if loss == "kl" and (fused := _on_gpu(teacher, student)):
        tq, tk, _, sq, sk, _ = parts
        assert tq is not None
        assert sq is not None
        return fused(tq, tk, sq, sk, mask)
    parts = [None if part is None else full(part) for part in parts]
    value: Tensor = _Tiled.apply(TILE_LOSSES[loss], mask, *parts)  # type: ignore[no-untyped-call]
    return value


def products_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """Mean squared difference of the products of every two tokens, summed over heads (comparative analysis, eq. 11).

    Both are (batch, heads, tokens, width of a head), whose widths may differ; `mask` is that of `tiled_loss`.
    """
    # The scores of `RelationFactors` are divided by the root of the width.
    theirs, ours = (RelationFactors(full(x) * x.shape[-1] ** 0.25) for x in (teacher, student))
    return teacher.shape[1] * tiled_loss("mse", theirs, ours, mask)


def expect(mask: Tensor, on_cpu: Tensor) -> None:
    """Tell the kernels for GPUs what `mask` holds, from its copy on the CPU, so that they need not wait for the GPU."""
    if mask.is_cuda and find_spec("triton"):
        from compress.losses.triton_kl import remember

        remember(mask, on_cpu)


def _on_gpu(teacher: RelationFactors, student: RelationFactors) -> Callable[..., Tensor] | None:
    """The GPU kernels, if they can compute this loss: there is no bias, and Triton, part of torch for GPUs, is installed."""
    if teacher.bias is not None or student.bias is not None or not student.queries.is_cuda or not find_spec("triton"):
        return None
    from compress.losses.triton_kl import divergence_loss, fits

    return divergence_loss if fits(teacher.queries, student.queries) else None


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: TileLoss, mask: Tensor, *parts: Tensor | None) -> Tensor:
        teacher, student = RelationFactors(*parts[:3]), RelationFactors(*parts[3:])  # type: ignore[arg-type]
        slopes = _zeros(student) if any(ctx.needs_input_grad) else None
        value = torch.zeros((), dtype=torch.float64, device=mask.device)
        lengths, heads = sequence_lengths(mask).tolist(), student.queries.shape[1]
        biased = teacher.bias is not None or student.bias is not None  # one of the two may be of another family
        for rows in _of_one_length(mask, lengths, alone=biased):
            weight = 1 / (len(lengths) * heads * rows.shape[1])  # of one query of one head
            ours = _real(student, rows)
            found = _zeros(ours) if slopes else None
            value += weight * _over_tiles(loss, _real(teacher, rows), ours, found)
            if slopes and found:
                _put(slopes, rows, found, weight)
        ctx.save_for_backward(*(slopes or ()))
        return value.to(student.queries.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return (*[None] * 5, *(None if x is None else slope * x for x in ctx.saved_tensors))


def _of_one_length(mask: Tensor, lengths: Sequence[int], *, alone: bool) -> Iterator[Tensor]:
    """The tokens of sequences with equally many, (sequences, tokens), as indices into (batch * tokens); with `alone` one sequence
    at a time. `lengths` are those of all sequences."""
    groups: dict[int, list[Tensor]] = {}
    for sequence in mask.flatten().nonzero().flatten().split(lengths):  # type: ignore[no-untyped-call]
        groups.setdefault(len(sequence), []).append(sequence)
    for length in sorted(groups):
        rows = torch.stack(groups[length])
        yield from rows[:, None] if alone else (rows,)


def _real(dots: RelationFactors, rows: Tensor) -> RelationFactors:
    """The tokens `rows` (sequences, tokens; see `_of_one_length`), head after head, (sequences * heads, tokens, width).

    They are scaled, so that scores are plain products. With a bias there is one sequence.
    """

    def chosen(x: Tensor, scale: float) -> Tensor:
        # Projections lie as (batch, tokens, heads, width): taking whole tokens is 10 times as fast as gathering single numbers.
        taken = x.transpose(1, 2).flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1::2])
        return taken.transpose(1, 2).flatten(0, 1).mul_(scale)

    bias = None if dots.bias is None else dots.bias[_pairs(dots, rows)]
    return RelationFactors(
        chosen(dots.queries, _scale(dots)), None if dots.keys is None else chosen(dots.keys, 1.0), bias
    )


def _pairs(dots: RelationFactors, rows: Tensor) -> tuple[slice, Tensor, Tensor]:
    """The index of the pairs of tokens of one sequence into a bias, (heads, tokens, tokens)."""
    places = rows[0] % dots.queries.shape[2]
    return slice(None), places[:, None], places


def _put(slopes: RelationFactors, rows: Tensor, found: RelationFactors, weight: float) -> None:
    """The backward of `_real`: write the gradients `found` of its parts, times `weight`, into `slopes`, those of the whole."""
    for into, slope, scale in ((slopes.queries, found.queries, _scale(slopes)), (slopes.keys, found.keys, 1.0)):
        if into is not None and slope is not None:
            of_tokens = slope.mul_(scale * weight).view(len(rows), -1, *slope.shape[1:]).transpose(1, 2).flatten(0, 1)
            into.transpose(1, 2).flatten(0, 1).index_copy_(0, rows.flatten(), of_tokens)
    if slopes.bias is not None and found.bias is not None:
        slopes.bias[_pairs(slopes, rows)] += weight * found.bias


def _scale(dots: RelationFactors) -> float:
    """The factor of the queries; in a relation it applies twice, as queries are also keys."""
    return float(dots.queries.shape[-1] ** (-0.5 if dots.keys is not None else -0.25))


def _zeros(like: RelationFactors) -> RelationFactors:
    """Zeros of the same shapes; with a batch they lie in memory as (batch, tokens, heads, width), as `_put` needs."""

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)

    of_batch = like.queries.ndim == 4
    queries, keys = (None if x is None else zeros(x) if of_batch else torch.zeros_like(x) for x in like[:2])
    return RelationFactors(queries, keys, None if like.bias is None else torch.zeros_like(like.bias))  # type: ignore[arg-type]


def _over_tiles(
    loss: TileLoss, theirs: RelationFactors, ours: RelationFactors, slopes: RelationFactors | None
) -> Tensor:
    """The sum of `loss` over all tiles, float64; its gradient is added to `slopes`."""
    heads, tokens, _ = ours.queries.shape
    numbers = NUMBERS_ON_GPU if ours.queries.is_cuda else NUMBERS
    rows = min(tokens, ROWS, max(1, numbers // tokens))
    some = max(1, numbers // (rows * tokens))

    def of_heads(first: int) -> Tensor:
        h = slice(first, first + some)
        value = torch.zeros((), dtype=torch.float64, device=ours.queries.device)
        for start in range(0, tokens, rows):
            q = slice(start, start + rows)
            part, slope = loss(_tile(theirs, h, q), _tile(ours, h, q))
            value += part
            if slopes:
                slopes.queries[h, q].baddbmm_(slope, _keys(ours)[h])
                _keys(slopes)[h].baddbmm_(slope.transpose(-1, -2), ours.queries[h, q])
                if slopes.bias is not None:
                    slopes.bias[h, q] += slope
        return value

    starts = range(0, heads, some)
    return torch.stack(list(map(of_heads, starts)) if ours.queries.is_cuda else on_cores(of_heads, starts)).sum()


def _keys(dots: RelationFactors) -> Tensor:
    return dots.queries if dots.keys is None else dots.keys


def _tile(dots: RelationFactors, heads: slice, queries: slice) -> Tensor:
    """Some rows of the scores of a sequence, in new memory."""
    products = dots.queries[heads, queries] @ _keys(dots)[heads].transpose(-1, -2)
    return products if dots.bias is None else products.add_(dots.bias[heads, queries])


def _divergence(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    theirs, ours = functional.log_softmax(theirs, dim=-1), functional.log_softmax(ours, dim=-1)
    target = theirs.exp()
    return theirs.sub_(ours).mul_(target).sum(), ours.exp_().sub_(target)


def _squares(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    found = functional.softmax(ours, dim=-1)
    apart = found - functional.softmax(theirs, dim=-1)
    slope = apart.sub((found * apart).sum(dim=-1, keepdim=True)).mul_(found)
    return apart.square_().sum() / 2, slope


def _mean_squares(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    value, slope = _squares(theirs, ours)
    return value * (2 / theirs.shape[-1]), slope.mul_(2 / theirs.shape[-1])


def _mse(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    apart = ours.sub_(theirs)
    return apart.square().sum() / apart.shape[-1], apart.mul(2 / apart.shape[-1])


TILE_LOSSES: dict[str, TileLoss] = {"kl": _divergence, "squares": _squares, "mean squares": _mean_squares, "mse": _mse}


Item = TypeVar("Item")
Answer = TypeVar("Answer")


def on_cores(work: Callable[[Item], Answer], items: Iterable[Item]) -> list[Answer]:
    """`work(item)` for each of `items`, in their order, on as many cores as torch may use; without gradients.

    One thread on one core computes each, so its bits do not depend on the number of cores.
    """
    items, cores = list(items), torch.get_num_threads()

    def alone(item: Item) -> Answer:
        with torch.no_grad():
            return work(item)

    if cores == 1:
        return [alone(item) for item in items]
    return list(_workers(cores).map(alone, items))


@cache
def _workers(cores: int) -> ThreadPoolExecutor:
    everyone = Barrier(cores)

    def begin() -> None:
        # In each thread torch's first call adopts the process's number; make it now, so that it cannot override ours later.
        torch.get_num_threads()
        torch.set_num_threads(1)
        everyone.wait()

    workers = ThreadPoolExecutor(cores, "core", initializer=begin)
    for _ in range(cores):
        workers.submit(lambda: None)  # each call starts one more worker, as none is idle until all have begun
    assert workers.submit(torch.get_num_threads).result() == 1
    torch.set_num_threads(cores)  # threads that torch starts later take the number that was set last
    return workers
