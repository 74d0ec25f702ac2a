"""Heads, scores, and the direct loss on queries, keys and values. The losses on scores and relations are in `tiled_relations`.

Tensors are (batch, heads, tokens, width of a head). `mask` is (batch, tokens), as `compress.losses.outputs.sequence_lengths` takes
it.
"""

from torch import Tensor

from compress.losses.outputs import full, mean_over_tokens
from serve.errors import BadInput


def check_relation_heads(relation_heads: int, *widths: int) -> None:
    """Check that `relation_heads` divides every width.

    Raises:
        BadInput: it does not; the message lists the numbers that do.
    """
    if relation_heads < 1 or any(width % relation_heads for width in widths):
        smallest = min(widths)
        works = [n for n in range(1, smallest + 1) if not any(width % n for width in widths)]
        raise BadInput(
            f"--relation-heads is {relation_heads}, which does not divide the widths {' and '.join(map(str, widths))} of teacher and "
            f"student. Give one of {', '.join(map(str, works))}."
        )


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`x` (batch, tokens, width) as (batch, heads, tokens, width / heads)."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def dot_scores(x: Tensor, y: Tensor) -> Tensor:
    """Scaled dot products of each token of `x` with each of `y`: both (batch, heads, tokens, width), out (.., tokens, tokens)."""
    scores: Tensor = x @ y.transpose(-1, -2) / x.shape[-1] ** 0.5
    return scores


def direct_loss(teacher: Tensor, student: Tensor, projection: Tensor, mask: Tensor) -> Tensor:
    """Mean squared difference of queries, keys or values, mapped by a matrix per head, summed over heads (DirectMiniLM, eq. 10).

    Args:
        teacher: (batch, heads, tokens, teacher's width), no gradient.
        student: (batch, heads, tokens, student's width).
        projection: (heads, student's width, teacher's width), learned with the student.
        mask: (batch, tokens).
    """
    apart = full(teacher) - full(student) @ projection
    return mean_over_tokens(apart.square().mean(dim=-1).sum(dim=1), mask)
