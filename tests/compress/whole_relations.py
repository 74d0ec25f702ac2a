"""The losses on attention and relations as the papers write them, with all scores in memory: what the tiled ones are held to.

Tensors are (batch, heads, tokens, width of a head), or (batch, heads, tokens, tokens) for scores, the numbers before
padding is masked and the softmax taken. `mask` is (batch, tokens), 1 for a real token and 0 for padding, and each
sequence has a real token. Padded keys get no probability and padded queries no weight; means are over the real queries
of a sequence and the heads, then over sequences. Every loss is a scalar, 0 if the student agrees with the teacher.
"""

import torch
from torch import Tensor
from torch.nn import functional

from compress.losses.outputs import full, mean_over_tokens
from compress.losses.vectors import dot_scores


def relation_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """KL divergence of the student's relation from the teacher's, where a relation is `softmax(X X^T / sqrt(width))`.

    For queries, keys and values, re-split into any number of heads, it is MiniLMv2's loss (eqs 7-9); for values at the
    attention's own heads, MiniLM's value relation (section 3). The papers' cross-entropy differs only by the teacher's entropy.
    """
    theirs, ours = full(teacher), full(student)
    return attention_loss(dot_scores(theirs, theirs), dot_scores(ours, ours), mask)


def attention_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """KL divergence of the student's attention from the teacher's, of scores (MiniLM, section 3)."""
    padded_keys = ~mask.bool()[:, None, None, :]  # (batch, 1, 1, tokens)
    target, ours = _log_attention(teacher, padded_keys), _log_attention(student, padded_keys)
    # A padded key has log-probability -inf on both sides; without the fill its term would be NaN.
    terms = (target.exp() * (target - ours)).masked_fill(padded_keys, 0.0)
    return mean_over_tokens(terms.sum(dim=-1).mean(dim=1), mask)


def attention_square_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """Half the squared difference of the attention distributions, summed over keys (XtremeDistil, eq. 9, of one layer)."""
    padded_keys = ~mask.bool()[:, None, None, :]
    apart = _log_attention(teacher, padded_keys).exp() - _log_attention(student, padded_keys).exp()
    return mean_over_tokens(apart.square().sum(dim=-1).mean(dim=1) / 2, mask)


def score_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """Mean squared difference of the scores before the softmax, over pairs of real tokens and heads (TinyBERT, section 3)."""
    weights = mask.to(torch.float32)
    apart = (full(teacher) - full(student)).square().masked_fill(~mask.bool()[:, None, None, :], 0.0)
    rows = apart.sum(dim=-1).mean(dim=1) / weights.sum(dim=1, keepdim=True)  # mean over a query's real keys
    return mean_over_tokens(rows, mask)


def _log_attention(scores: Tensor, padded_keys: Tensor) -> Tensor:
    return functional.log_softmax(full(scores).masked_fill(padded_keys, float("-inf")), dim=-1)
