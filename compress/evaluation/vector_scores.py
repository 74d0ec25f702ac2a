"""Scores of a model's vectors beside its teacher's, with their intervals. No torch."""

from collections.abc import Sequence

import numpy as np

from compress.evaluation.metrics import Score, resamples, score
from compress.evaluation.vectors import recall_at

RECALLED = 10  # nearest texts, as in benchmarks of nearest-neighbour search


def vector_scores(theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray], *, seed: int = 0) -> dict[str, Score]:
    """By name: `similarity_spearman` and `recall_at_10`, with percentile bootstrap intervals over texts.

    The first is Spearman's rho between the similarities of texts by both models. The second is the mean share of a text's ten nearest
    texts by the teacher that are among its ten nearest by the student.

    Args:
        theirs: the teacher's vector of each text.
        ours: the student's, of any width.
        seed: of the resampling.
    """
    each = recall_at(theirs, ours, RECALLED)
    means = np.concatenate([weights @ each / len(each) for weights in resamples(len(each), seed)])
    low, high = np.quantile(means, (0.025, 0.975))
    recall = Score(float(each.mean()), float(low), float(high))
    return {"similarity_spearman": score(list(theirs), list(ours), seed=seed), f"recall_at_{RECALLED}": recall}
