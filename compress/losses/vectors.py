"""Losses between vectors of the student, mapped to the teacher's width, and the teacher's: of tokens, of heads, and one a text.

Of tokens they are (batch, tokens, teacher's width), of heads (batch, heads, tokens, width of a head). `mask` is (batch, tokens), as
`compress.losses.outputs.sequence_lengths` takes it; means are over the real tokens of a sequence, then over sequences. A text's vector is
made of the last hidden states of its tokens by one of `POOLINGS`. Losses on scores and relations are in `tiled_relations`.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from compress.losses.outputs import full, mean_over_tokens
from serve.errors import BadInput

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


def hidden_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """Mean squared difference, over width too (comparative analysis, eq. 6, of one pair of layers; TinyBERT, section 3)."""
    return mean_over_tokens((full(teacher) - full(student)).square().mean(dim=-1), mask)


def summed_hidden_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """Half the squared difference, summed over width (XtremeDistil, eq. 8, of one pair of layers)."""
    return mean_over_tokens((full(teacher) - full(student)).square().sum(dim=-1) / 2, mask)


def cosine_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """One minus the cosine of the angle between the two (DistilBERT, section 3)."""
    return mean_over_tokens(1 - functional.cosine_similarity(full(teacher), full(student), dim=-1), mask)


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
