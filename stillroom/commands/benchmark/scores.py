"""The metrics of the suites, by the libraries that define them."""

from collections.abc import Sequence
from typing import Any

from compress.evaluation.metrics import Prediction, counts, metric_of

POSITIVE = "1"  # the class whose F1 GLUE reports


def scored(metric: str, gold: Sequence[Prediction], predicted: Sequence[Prediction]) -> float:
    """One metric of predictions: accuracy, f1 (of class 1), matthews, pearson, spearman or entity_f1.

    Accuracy, F1 and Matthews' correlation are scikit-learn's, Pearson's and Spearman's SciPy's; constant predictions have a
    correlation of 0. Entity F1 is that of `compress.evaluation.metrics`, which tests hold to seqeval.

    Raises:
        ValueError: another name.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    theirs: Any = list(gold)
    ours: Any = list(predicted)
    if metric == "entity_f1":
        return float(metric_of(counts(gold, predicted).sum(axis=0)))
    if metric == "accuracy":
        return float(accuracy_score(theirs, ours))
    if metric == "f1":
        return float(f1_score(theirs, ours, pos_label=POSITIVE, average="binary", zero_division=0))
    if metric == "matthews":
        return float(matthews_corrcoef(theirs, ours)) if len({*theirs, *ours}) > 1 else 0.0
    if metric in ("pearson", "spearman"):
        if len(set(ours)) < 2 or len(set(theirs)) < 2:
            return 0.0
        return float((pearsonr if metric == "pearson" else spearmanr)(theirs, ours).statistic)
    raise ValueError(f"{metric} is no metric of a suite")
