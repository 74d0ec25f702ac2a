"""Self-attention relations (MiniLMv2, eqs 7-9): what the queries, keys and values of one layer say of each other."""

from torch import Tensor
from torch.nn import functional

from compress.losses import full
from serve.errors import BadInput


def check_relation_heads(relation_heads: int, *widths: int) -> None:
    """Nothing, when `relation_heads` divides every width.

    Raises:
        BadInput: it does not; the message names the numbers that would.
    """
    if any(width % relation_heads for width in widths):
        smallest = min(widths)
        works = [n for n in range(1, smallest + 1) if not any(width % n for width in widths)]
        raise BadInput(
            f"{relation_heads} relation heads do not divide the widths {' and '.join(map(str, widths))} of teacher and student. "
            f"Take one of {', '.join(map(str, works))}."
        )


def split_heads(x: Tensor, relation_heads: int) -> Tensor:
    """`x` (batch, tokens, width) as (batch, relation_heads, tokens, width / relation_heads)."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, relation_heads, width // relation_heads).transpose(1, 2)


def relation_loss(teacher: Tensor, student: Tensor, mask: Tensor, relation_heads: int) -> Tensor:
    """KL divergence of the student's relation from the teacher's, for one of queries, keys or values.

    Both sides are re-split into `relation_heads`, scaled by their own sqrt(width / relation_heads), and compared row by
    row. Padded keys get no probability, padded queries no weight; the mean is over the real queries of a sequence and the
    relation heads, then over sequences. The paper's cross-entropy differs by the teacher's entropy alone.

    Args:
        teacher: (batch, tokens, teacher width), no gradient.
        student: (batch, tokens, student width).
        mask: (batch, tokens), 1 for a real token and 0 for padding; each sequence has a real token.
        relation_heads: divides both widths.

    Returns:
        A scalar, 0 when the relations agree.
    """
    padded_keys = ~mask.bool()[:, None, None, :]  # (batch, 1, 1, tokens)
    target = _log_relation(teacher, padded_keys, relation_heads)
    ours = _log_relation(student, padded_keys, relation_heads)
    # A padded key has log-probability -inf on both sides: its term is 0, where the arithmetic would say nan.
    terms = (target.exp() * (target - ours)).masked_fill(padded_keys, 0.0)
    rows = terms.sum(dim=-1).mean(dim=1)  # (batch, tokens): one divergence a query, mean over heads
    weights = mask.to(rows.dtype)
    return ((rows * weights).sum(dim=1) / weights.sum(dim=1)).mean()


def _log_relation(x: Tensor, padded_keys: Tensor, relation_heads: int) -> Tensor:
    heads = split_heads(full(x), relation_heads)
    scores = heads @ heads.transpose(-1, -2) / heads.shape[-1] ** 0.5
    return functional.log_softmax(scores.masked_fill(padded_keys, float("-inf")), dim=-1)
