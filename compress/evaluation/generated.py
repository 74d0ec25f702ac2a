"""Scores of generated texts: ROUGE and BLEU, with intervals over texts. No torch.

ROUGE (Lin 2004) is the mean F1 of stemmed words and pairs of words, and of the longest common subsequence, by `rouge-score`. BLEU (Papineni
et al. 2002) is that of all texts together, up to four words, by `sacrebleu` with its own tokenisation; papers that tokenise otherwise
report other figures. Neither tells capital letters from small ones, which half of all encoders cannot write.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.evaluation.metrics import Score, resamples

METRIC = "rouge_l"
ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", METRIC: "rougeL"}
BLEU_WORDS = 4


def generation_scores(gold: Sequence[str], said: Sequence[str]) -> dict[str, Score]:
    """`rouge_1`, `rouge_2`, `rouge_l` (F1) and `bleu` of `said` against `gold`, each from 0 to 1, with its 95 % bootstrap interval."""
    rouge = rouge_f1(gold, said)
    bleu = np.array([_bleu_counts(*pair) for pair in zip(gold, said, strict=True)], dtype=np.float64)
    draws = np.concatenate(list(resamples(len(gold))))  # (resamples, texts)
    scores: dict[str, Score] = {}
    for column, name in enumerate(ROUGE):
        low, high = np.quantile(draws @ rouge[:, column] / len(gold), (0.025, 0.975))
        scores[name] = Score(float(rouge[:, column].mean()), float(low), float(high))
    low, high = np.quantile([_bleu(sums) for sums in draws @ bleu], (0.025, 0.975))
    return scores | {"bleu": Score(_bleu(bleu.sum(axis=0)), float(low), float(high))}


def rouge_f1(gold: Sequence[str], said: Sequence[str]) -> np.ndarray:
    """The F1 of each text, (texts, 3): ROUGE-1, ROUGE-2, ROUGE-L."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE.values()), use_stemmer=True)
    found = [scorer.score(theirs, ours) for theirs, ours in zip(gold, said, strict=True)]
    return np.array([[each[name].fmeasure for name in ROUGE.values()] for each in found])


def _bleu_counts(gold: str, said: str) -> list[int]:
    """What BLEU is made of: matching and all groups of 1 to 4 words, then the words of both texts."""
    from sacrebleu import sentence_bleu

    found: Any = sentence_bleu(said, [gold], lowercase=True)
    return [*found.counts, *found.totals, found.sys_len, found.ref_len]


def _bleu(sums: np.ndarray) -> float:
    from sacrebleu.metrics import BLEU

    *groups, ours, theirs = sums.astype(np.int64).tolist()
    found: Any = BLEU.compute_bleu(groups[:BLEU_WORDS], groups[BLEU_WORDS:], ours, theirs, smooth_method="exp")
    return float(found.score) / 100
