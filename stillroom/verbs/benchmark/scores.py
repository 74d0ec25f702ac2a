"""The metrics of the suites, by the libraries that define them."""

from collections.abc import Callable, Sequence
from typing import Any

from compress.evaluation.metrics import ENTITY_F1, Prediction
from compress.evaluation.questions import ANSWER_F1

POSITIVE = "1"  # the class whose F1 GLUE reports


def scored(metric: str, gold: Sequence[Prediction], predicted: Sequence[Prediction]) -> float:
    """One metric of predictions: accuracy, f1 (of class 1), matthews, pearson, spearman, entity_f1, answer_f1 or exact_match.

    Accuracy, F1 and Matthews' correlation are scikit-learn's, Pearson's and Spearman's SciPy's; constant predictions have a
    correlation of 0. Entity F1 is that of `compress.evaluation.metrics`, which tests hold to seqeval; answers are scored by SQuAD's and
    MLQA's definitions (`compress.evaluation.questions`).

    Raises:
        ValueError: another name.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    theirs: Any = list(gold)
    ours: Any = list(predicted)
    for ours_too in (ENTITY_F1, ANSWER_F1):
        if metric == ours_too.name:
            return ours_too.value(ours_too.counts(gold, predicted))
    if metric in ("pearson", "spearman"):
        if len(set(ours)) < 2 or len(set(theirs)) < 2:
            return 0.0
        return float((pearsonr if metric == "pearson" else spearmanr)(theirs, ours).statistic)
    by_name: dict[str, Callable[[], float]] = {
        "accuracy": lambda: accuracy_score(theirs, ours),
        "f1": lambda: f1_score(theirs, ours, pos_label=POSITIVE, average="binary", zero_division=0),
        "matthews": lambda: matthews_corrcoef(theirs, ours) if len({*theirs, *ours}) > 1 else 0.0,
        "exact_match": lambda: ANSWER_F1.further_scores(gold, predicted)["exact_match"].value,
    }
    if metric not in by_name:
        raise ValueError(f"{metric} is no metric of a suite")
    return float(by_name[metric]())
