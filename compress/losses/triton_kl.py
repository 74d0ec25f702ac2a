"""The KL divergence of relations and attentions on a GPU: two Triton kernels that store no (tokens, tokens) matrix.

The first kernel takes a block of queries over all keys, with running maxima and sums of exponentials, and stores each query's
normalisers and divergence. The second recomputes the same blocks of scores, turns them into their part of the gradient and
multiplies that with the other side at once. Only real tokens are read, packed one sequence after the other, so padding costs
nothing. The order of all sums is fixed, so the same input gives the same bits.

Products of bfloat16 and float16 are exact and summed in float32. A factor of a gradient is the sum of two halves, with 16 bits
unless it is tiny. A product of float32 is made of three products in tf32, which nearly keeps its precision. Gradients stay in float32
until they are scaled. Scores are held in powers of two, since a GPU's exponential is one of two. The compiler may not join
products and sums, because it would join those of teacher and student in different ways, and the loss at equality would not be 0.
"""

import os
from shutil import which
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from compress.losses.outputs import sequence_lengths

BLOCK = 64  # queries, and keys, of a block
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter cannot multiply bfloat16
WIDEST = 128  # most padded head width of teacher and student together: it fits into 96 KiB of shared memory, as most GPUs have


class Packed(NamedTuple):
    """Real tokens of all sequences, one sequence after the other."""

    rows: Tensor  # (tokens,) their indices into (batch * tokens)
    places: Tensor  # (batch * tokens,) where each is among `rows`; -1 for padding
    starts: Tensor  # (sequences + 1,) int32: the start of each sequence, and the end of the last
    longest: int  # the most tokens that a sequence can have

    @property
    def full(self) -> bool:
        """Whether there is no padding."""
        return len(self.rows) == len(self.places)

    def take(self, x: Tensor) -> Tensor:
        """The real tokens of `x` (batch, heads, tokens, width) as (tokens, heads, width)."""
        tokens = x.transpose(1, 2).flatten(0, 1)
        return tokens.contiguous() if self.full else tokens.index_select(0, self.rows)

    def put(self, packed: Tensor, like: Tensor) -> Tensor:
        """The inverse of `take`, in the shape of `like`; padding is 0."""
        batch, heads, tokens, width = like.shape
        if not self.full:  # tokens are fetched: to scatter them is slow where torch must be deterministic
            packed = packed.index_select(0, self.places.clamp(min=0)).masked_fill_((self.places < 0)[:, None, None], 0)
        return packed.view(batch, tokens, heads, width).transpose(1, 2)


def divergence_loss(
    teacher_queries: Tensor,
    teacher_keys: Tensor | None,
    student_queries: Tensor,
    student_keys: Tensor | None,
    mask: Tensor,
) -> Tensor:
    """The KL divergence of `tiled_loss`, a scalar; all vectors are (batch, heads, tokens, width), and a relation has no keys."""
    value: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        packed_by(mask), teacher_queries, teacher_keys, student_queries, student_keys
    )
    return value


_last: tuple[ReferenceType[Tensor], int, Packed] | None = None


def packed_by(mask: Tensor) -> Packed:
    """Where the real tokens of `mask` are.

    The relations of a step share a mask, and to find its tokens is to wait for the GPU, so that of the last mask is kept. A mask
    must not be written to behind torch's back (`.data`, `.numpy()`).
    """
    global _last  # noqa: PLW0603 - a memory of one
    last, version = _last, None if mask.is_inference() else mask._version  # those of inference mode count no versions
    if last is not None and version is not None and last[0]() is mask and last[1] == version:
        return last[2]
    packed = _found(mask)
    if version is not None:
        _last = ref(mask), version, packed
    return packed


def remember(mask: Tensor, on_cpu: Tensor) -> None:
    """Let `packed_by` find the tokens of `mask`, which is on a GPU, in `on_cpu`, its copy on the CPU."""
    global _last  # noqa: PLW0603 - a memory of one
    if not mask.is_inference():
        found = _found(on_cpu)
        rows, places, starts = (x.pin_memory().to(mask.device, non_blocking=True) for x in found[:3])
        _last = ref(mask), mask._version, Packed(rows, places, starts, found.longest)


def _found(mask: Tensor) -> Packed:
    starts = torch.nn.functional.pad(sequence_lengths(mask).cumsum(0, dtype=torch.int32), (1, 0))
    real = mask.flatten() > 0
    places = torch.where(real, real.cumsum(0) - 1, -1)
    return Packed(real.nonzero().flatten(), places, starts, mask.shape[1])


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Packed, tq: Tensor, tk: Tensor | None, sq: Tensor, sk: Tensor | None) -> Tensor:
        parts = [None if x is None else packed.take(x) for x in (tq, tk, sq, sk)]
        value, slopes = _divergence(packed, *parts, wanted=any(ctx.needs_input_grad))  # type: ignore[arg-type]
        found = [packed.put(slope, sq) for slope in slopes]
        ctx.save_for_backward(*found)
        ctx.dtype = sq.dtype
        return value.to(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled before rounding: float16 training scales the loss to keep small gradients.
        slopes = [(up * slope).to(ctx.dtype) for slope in ctx.saved_tensors]
        return (None, None, None, slopes[0], slopes[1] if len(slopes) > 1 else None)


def _divergence(
    packed: Packed, tq: Tensor, tk: Tensor | None, sq: Tensor, sk: Tensor | None, *, wanted: bool
) -> tuple[Tensor, list[Tensor]]:
    """The loss, float64, and if `wanted` its gradients in the student's queries and keys (if there are keys)."""
    tokens, heads, _ = tq.shape
    lengths, sequences = packed.starts.diff(), len(packed.starts) - 1
    weights = 1.0 / (lengths * (heads * sequences)).float()  # of one query of one head
    norms = torch.empty(2, heads, tokens, dtype=torch.float32, device=tq.device)
    rows = torch.empty(heads, tokens, dtype=torch.float32, device=tq.device)
    shape = options(tq, sq)
    grid = (triton.cdiv(packed.longest, shape["BLOCK"]), heads, sequences)
    theirs, ours = (tq, tq if tk is None else tk), (sq, sq if sk is None else sk)
    _rows[grid](theirs[0], theirs[1], ours[0], ours[1], packed.starts, norms, rows, tokens, heads, **shape)
    value = (rows.double() * weights.repeat_interleave(lengths, output_size=tokens)).sum()

    def slope(of: int, by: int, *, row: bool, column: bool) -> Tensor:
        found = torch.empty_like(ours[of], dtype=torch.float32)
        _slopes[grid](
            theirs[of], theirs[by], ours[of], ours[by], packed.starts, norms, weights, found, tokens, heads,
            ROW=row, COLUMN=column, **shape,
        )  # fmt: skip
        return found

    if not wanted:
        return value, []
    if sk is None:  # scores are symmetric: the gradients of a token as query and as key come from the same blocks
        return value, [slope(0, 0, row=True, column=True)]
    return value, [slope(0, 1, row=True, column=False), slope(1, 0, row=False, column=True)]


def options(teacher: Tensor, student: Tensor) -> dict[str, Any]:
    """The compile-time options of the kernels: head widths, whether vectors are multiplied in float32, and the size of a block."""
    halves = {torch.float16} if INTERPRETED else {torch.float16, torch.bfloat16}
    whole = [x.dtype not in halves for x in (teacher, student)]
    return {
        "T": teacher.shape[-1], "S": student.shape[-1], "PAD_T": _padded(teacher), "PAD_S": _padded(student),
        "T_WHOLE": whole[0], "S_WHOLE": whole[1], "BLOCK": BLOCK,
        # Of halves the next block is loaded meanwhile; of float32 it would take too much shared memory. Measured by
        # `benchmarks/distill/gpu_kernels.py`, as were the block and the usual 4 warps.
        "num_stages": 1 if any(whole) else 2,
        "enable_fp_fusion": False,
    }  # fmt: skip


def fits(teacher: Tensor, student: Tensor) -> bool:
    """Whether the kernels support these head widths and this machine.

    AMD's GPUs lack products in three tf32 steps, and Triton needs a C compiler for the code that launches a kernel.
    """
    compiler = os.environ.get("CC") or which("gcc") or which("clang")
    return _padded(teacher) + _padded(student) <= WIDEST and torch.version.hip is None and compiler is not None


def _padded(x: Tensor) -> int:
    """The width of a head, padded for the matrix units: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(x.shape[-1])))


@triton.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    x,
    start,
    count,
    first,
    head,
    heads,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """BLOCK tokens of a sequence from `first` on, (BLOCK, PAD); 0 past the sequence's end and past the width."""
    token, column = first + tl.arange(0, BLOCK), tl.arange(0, PAD)
    place = ((start + token).to(tl.int64) * heads + head)[:, None] * WIDTH + column[None, :]
    loaded = tl.load(x + place, mask=(token < count)[:, None] & (column < WIDTH)[None, :], other=0.0)
    return loaded.to(tl.float32) if WHOLE else loaded


@triton.jit  # type: ignore[untyped-decorator]
def _products(queries, keys, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each query with each key, (queries, keys), float32."""
    if WHOLE:
        return tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
    return tl.dot(queries, tl.trans(keys))


@triton.jit  # type: ignore[untyped-decorator]
def _times(factors, vectors, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`factors` (queries, keys), float32 and within 2, times `vectors` (keys, width)."""
    if WHOLE:
        return tl.dot(factors, vectors, input_precision="tf32x3")
    UP: tl.constexpr = 1024.0 if vectors.dtype == tl.float16 else 1.0  # a float16 holds no small factors
    factors *= UP
    most = factors.to(vectors.dtype)
    rest = (factors - most.to(tl.float32)).to(vectors.dtype)
    return tl.dot(rest, vectors, tl.dot(most, vectors)) * (1 / UP)


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    tq, tk, sq, sk, starts, norms, rows, tokens, heads,
    T: tl.constexpr, S: tl.constexpr, PAD_T: tl.constexpr, PAD_S: tl.constexpr,
    T_WHOLE: tl.constexpr, S_WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each query the binary logarithms of both sums of exponentials, (2, heads, tokens), and the divergence, (heads, tokens)."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    T_SCALE: tl.constexpr = T**-0.5 * LOG2_E
    S_SCALE: tl.constexpr = S**-0.5 * LOG2_E
    first, head, sequence = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    if first < count:
        theirs = _load(tq, start, count, first, head, heads, T, PAD_T, BLOCK, T_WHOLE)
        ours = _load(sq, start, count, first, head, heads, S, PAD_S, BLOCK, S_WHOLE)
        lowest = tl.full((BLOCK,), float("-inf"), tl.float32)
        t_most, s_most = lowest, lowest
        t_sum, s_sum = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        apart = tl.zeros((BLOCK,), tl.float32)  # difference of the scores, weighted by the teacher's exponentials
        for other in range(0, count, BLOCK):
            real = (other + tl.arange(0, BLOCK) < count)[None, :]
            their_keys = _load(tk, start, count, other, head, heads, T, PAD_T, BLOCK, T_WHOLE)
            our_keys = _load(sk, start, count, other, head, heads, S, PAD_S, BLOCK, S_WHOLE)
            t = _products(theirs, their_keys, T_WHOLE) * T_SCALE
            s = _products(ours, our_keys, S_WHOLE) * S_SCALE
            difference = t - s
            t, s = tl.where(real, t, float("-inf")), tl.where(real, s, float("-inf"))
            t_new, s_new = tl.maximum(t_most, tl.max(t, 1)), tl.maximum(s_most, tl.max(s, 1))
            weights = tl.exp2(t - t_new[:, None])
            fade = tl.exp2(t_most - t_new)
            t_sum = t_sum * fade + tl.sum(weights, 1)
            apart = apart * fade + tl.sum(weights * difference, 1)
            s_sum = s_sum * tl.exp2(s_most - s_new) + tl.sum(tl.exp2(s - s_new[:, None]), 1)
            t_most, s_most = t_new, s_new
        t_norm, s_norm = t_most + tl.log2(t_sum), s_most + tl.log2(s_sum)
        token = first + tl.arange(0, BLOCK)
        place = head.to(tl.int64) * tokens + start + token
        tl.store(norms + place, t_norm, mask=token < count)
        tl.store(norms + (heads + head).to(tl.int64) * tokens + start + token, s_norm, mask=token < count)
        tl.store(rows + place, (apart / t_sum - (t_norm - s_norm)) / LOG2_E, mask=token < count)


@triton.jit  # type: ignore[untyped-decorator]
def _slopes(  # type: ignore[no-untyped-def]
    tq, tk, sq, sk, starts, norms, weights, slopes, tokens, heads,
    ROW: tl.constexpr, COLUMN: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, PAD_T: tl.constexpr, PAD_S: tl.constexpr,
    T_WHOLE: tl.constexpr, S_WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient, in each row's vector, of the divergence of rows (ROW), of columns (COLUMN), or of both.

    For an attention's gradient in queries, rows are queries and columns are keys; for that in keys it is the reverse.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    T_SCALE: tl.constexpr = T**-0.5 * LOG2_E
    S_SCALE: tl.constexpr = S**-0.5 * LOG2_E
    first, head, sequence = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    if first < count:
        t_norms = norms + head.to(tl.int64) * tokens + start
        s_norms = norms + (heads + head).to(tl.int64) * tokens + start
        row = first + tl.arange(0, BLOCK)
        theirs = _load(tq, start, count, first, head, heads, T, PAD_T, BLOCK, T_WHOLE)
        ours = _load(sq, start, count, first, head, heads, S, PAD_S, BLOCK, S_WHOLE)
        t_row = -tl.load(t_norms + row, mask=row < count, other=0.0)[:, None]
        s_row = -tl.load(s_norms + row, mask=row < count, other=0.0)[:, None]
        found = tl.zeros((BLOCK, PAD_S), tl.float32)
        for other in range(0, count, BLOCK):
            column = other + tl.arange(0, BLOCK)
            their_keys = _load(tk, start, count, other, head, heads, T, PAD_T, BLOCK, T_WHOLE)
            our_keys = _load(sk, start, count, other, head, heads, S, PAD_S, BLOCK, S_WHOLE)
            t, s = _products(theirs, their_keys, T_WHOLE), _products(ours, our_keys, S_WHOLE)
            slope = tl.zeros((BLOCK, BLOCK), tl.float32)
            if ROW:
                slope += tl.exp2(tl.fma(s, S_SCALE, s_row)) - tl.exp2(tl.fma(t, T_SCALE, t_row))
            if COLUMN:
                t_column = -tl.load(t_norms + column, mask=column < count, other=0.0)[None, :]
                s_column = -tl.load(s_norms + column, mask=column < count, other=0.0)[None, :]
                slope += tl.exp2(tl.fma(s, S_SCALE, s_column)) - tl.exp2(tl.fma(t, T_SCALE, t_column))
            # Rows past the end are not stored.
            found += _times(tl.where((column < count)[None, :], slope, 0.0), our_keys, S_WHOLE)
        found *= tl.load(weights + sequence) * (S**-0.5)
        width = tl.arange(0, PAD_S)
        place = ((start + row).to(tl.int64) * heads + head)[:, None] * S + width[None, :]
        inside = (row < count)[:, None] & (width < S)[None, :]
        tl.store(slopes + place, found.to(slopes.dtype.element_ty), mask=inside)
