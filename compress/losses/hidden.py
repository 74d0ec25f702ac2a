"""Losses between the hidden states or embeddings of the student, mapped to the teacher's width, and the teacher's.

Tensors are (batch, tokens, teacher's width); `mask` is (batch, tokens), as `compress.losses.outputs.sequence_lengths` takes
it. Means are over the real tokens of a sequence, then over sequences.
"""

from torch import Tensor
from torch.nn import functional

from compress.losses.outputs import full, mean_over_tokens


def hidden_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """Mean squared difference, over width too (comparative analysis, eq. 6, of one pair of layers; TinyBERT, section 3)."""
    return mean_over_tokens((full(teacher) - full(student)).square().mean(dim=-1), mask)


def summed_hidden_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """Half the squared difference, summed over width (XtremeDistil, eq. 8, of one pair of layers)."""
    return mean_over_tokens((full(teacher) - full(student)).square().sum(dim=-1) / 2, mask)


def cosine_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """One minus the cosine of the angle between the two (DistilBERT, section 3)."""
    return mean_over_tokens(1 - functional.cosine_similarity(full(teacher), full(student), dim=-1), mask)
