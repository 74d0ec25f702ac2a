"""Probabilities in logits, and how far the logits of two models are apart. No torch."""

from collections.abc import Sequence

import numpy as np

from compress.evaluation.numbers import distinguishable


def distance(expected: np.ndarray, actual: np.ndarray, *, multi_label: bool) -> tuple[float, float]:
    """Mean divergence in nats, and the share of rows whose answer differs; logits (rows, labels).

    KL(p || q) = sum p (log p - log q) over the softmax of the labels. With `multi_label` it is the sum over labels, each
    with two outcomes. For one label a row, a constant added to all logits of a row does not matter.
    """
    expected, actual = expected.astype(np.float64), actual.astype(np.float64)
    if multi_label:
        log_p, log_q = _log_both(expected), _log_both(actual)
        other = ((expected > 0) != (actual > 0)).any(axis=-1)
        divergences = (np.exp(log_p) * (log_p - log_q)).sum(axis=(-1, -2))
    else:
        log_p, log_q = _log_softmax(expected), _log_softmax(actual)
        other = expected.argmax(axis=-1) != actual.argmax(axis=-1)
        divergences = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return float(divergences.mean()), float(other.mean())


def span_distance(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> tuple[float, float]:
    """As `distance`, of where an answer starts and ends: each window has two distributions over its rows; logits (rows, 2) of each."""
    both = [distance(theirs.T, ours.T, multi_label=False) for theirs, ours in zip(expected, actual, strict=True)]
    divergence, changed = np.mean(both, axis=0)
    return float(divergence), float(changed)


def number_distance(expected: np.ndarray, actual: np.ndarray) -> tuple[float, float]:
    """The mean squared difference of numbers (texts,) as a share of the variance of `expected`, and the share that can be told apart."""
    expected, actual = expected.astype(np.float64), actual.astype(np.float64)
    squares = float(((actual - expected) ** 2).mean())
    return squares / (float(expected.var()) or 1.0), float(distinguishable(expected, actual).mean())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    shares: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shares


def _log_both(logits: np.ndarray) -> np.ndarray:
    """Log probabilities that a label applies and that it does not, (..., labels, 2)."""
    return np.stack([-np.logaddexp(0, -logits), -np.logaddexp(0, logits)], axis=-1)
