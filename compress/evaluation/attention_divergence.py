"""How far a student's attention is from its teacher's: one divergence for attentions, their means over heads, and relations."""

import torch
from torch import Tensor


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """`KL(teacher || student)` in nats of each head, mean over queries (MiniLM, section 3.1, without its mean over heads): (heads,).

    It is computed in float64. A key to which the student gives nothing, or less than float32 can hold, counts as if it got
    float32's smallest normal number, so the divergence is never infinite.

    Args:
        teacher: (heads, queries, keys), each row a distribution over keys. Padding is not part of it.
        student: of the same shape; it may be another model's attention, mean over heads, or relation.
    """
    least = torch.finfo(torch.float32).tiny
    theirs, ours = teacher.double(), student.double().clamp(min=least)
    each = torch.where(theirs > 0, theirs * (theirs.clamp(min=least).log() - ours.log()), torch.zeros_like(theirs))
    return each.sum(dim=-1).mean(dim=-1)


def mean_divergence(teacher: Tensor, student: Tensor) -> float:
    """The divergence of the two attentions after each is averaged over its heads, whose numbers may differ.

    Args:
        teacher: (heads, queries, keys).
        student: (its own heads, queries, keys).
    """
    theirs, ours = (each.double().mean(dim=0, keepdim=True) for each in (teacher, student))
    return float(divergence(theirs, ours)[0])
