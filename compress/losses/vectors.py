"""Losses between the vectors of texts, one a text: the student's and the teacher's.

A text's vector is made of the last hidden states of its tokens by one of `POOLINGS`.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from compress.losses.outputs import full

Pooling = Literal["mean", "first"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
# The similarities of a text to the others of its batch become a distribution at this temperature, since they lie close together.
TEMPERATURE = 0.05


def pooled(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """The vectors (texts, width) of hidden states (texts, tokens, width): their mean over real tokens, or that of the first token.

    `mask` is (texts, tokens), 0 for padding (Sentence-BERT, section 3: MEAN and CLS).
    """
    if pooling == "first":
        return states[:, 0]
    real = (mask > 0).unsqueeze(-1).to(states.dtype)
    return (states * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)


def vector_loss(teacher: Tensor, student: Tensor) -> Tensor:
    """One minus the cosine of the angle between the two vectors of a text, mean over texts; 0 if they point the same way.

    It is half the squared distance of the two at length 1. Both are (texts, teacher's width); the teacher's has no gradient.
    """
    return (1 - functional.cosine_similarity(full(teacher), full(student), dim=-1)).sum() / max(1, len(teacher))


def similarity_loss(teacher: Tensor, student: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """`KL(softmax(teacher's similarities / T) || softmax(student's / T))`, mean over texts; 0 if they agree.

    The similarities of a text are the cosines to each other text of the batch, so that the widths may differ: MiniLM's relations of
    tokens (section 3.2), of texts. 0 for fewer than three texts, of which each has at most one other.

    Args:
        teacher: (texts, teacher's width), no gradient.
        student: (texts, student's width).
        temperature: above 0.
    """
    theirs, ours = (_others(full(vectors)) / temperature for vectors in (teacher, student))
    target, found = functional.log_softmax(theirs, dim=-1), functional.log_softmax(ours, dim=-1)
    return (target.exp() * (target - found)).sum() / max(1, len(teacher))


def _others(vectors: Tensor) -> Tensor:
    """The cosine of each vector to each other one, (texts, texts - 1)."""
    count = len(vectors)
    unit = functional.normalize(vectors, dim=-1)
    others = ~torch.eye(count, dtype=torch.bool, device=vectors.device)
    return (unit @ unit.T)[others].view(count, max(0, count - 1))
