"""Scores of generated texts: ROUGE and BLEU, with intervals over texts. No torch.

ROUGE (Lin 2004) is the mean F1 of stemmed words and pairs of words, and of the longest common subsequence, by `rouge-score`. BLEU (Papineni
et al. 2002) is that of all texts together, up to four words, by `sacrebleu` with its own tokenisation; papers that tokenise otherwise
report other figures. Neither tells capital letters from small ones, which half of all encoders cannot write.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.evaluation.metrics import Score, resamples

METRIC = "rouge_l"
ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", METRIC: "rougeL"}
BLEU_WORDS = 4
UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")


def generation_scores(gold: Sequence[str], said: Sequence[str]) -> dict[str, Score]:
    """`rouge_1`, `rouge_2`, `rouge_l` (F1) and `bleu` of `said` against `gold`, each from 0 to 1, with its 95 % bootstrap interval."""
    from sacrebleu import sentence_bleu

    rouge = rouge_f1(gold, said)
    # What BLEU is made of: matching and all groups of 1 to 4 words, then the words of both texts.
    counts = np.empty((len(gold), 2 * BLEU_WORDS + 2))
    for row, theirs, ours in zip(counts, gold, said, strict=True):
        found: Any = sentence_bleu(apart(ours), [apart(theirs)], lowercase=True)
        row[:] = [*found.counts, *found.totals, found.sys_len, found.ref_len]
    drawn = [
        np.column_stack([weights @ rouge / len(gold), [_bleu(sums) for sums in weights @ counts]])
        for weights in resamples(len(gold))
    ]
    values = [*rouge.mean(axis=0), _bleu(counts.sum(axis=0))]
    low, high = np.quantile(np.concatenate(drawn), (0.025, 0.975), axis=0)
    return {
        name: Score(*map(float, of))
        for name, of in zip((*ROUGE, "bleu"), zip(values, low, high, strict=True), strict=True)
    }


def rouge_f1(gold: Sequence[str], said: Sequence[str]) -> np.ndarray:
    """The F1 of each text, (texts, 3): ROUGE-1, ROUGE-2, ROUGE-L."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE.values()), tokenizer=_Words())
    found = [scorer.score(theirs, ours) for theirs, ours in zip(gold, said, strict=True)]
    return np.array([[each[name].fmeasure for name in ROUGE.values()] for each in found])


class _Words:
    """Gives ROUGE the words of a text in any script; of English they are those of `rouge-score`'s own tokenizer with stemming.

    That one drops every character but a to z and digits.
    """

    def __init__(self) -> None:
        from nltk.stem.porter import PorterStemmer

        self._stem = PorterStemmer().stem

    def tokenize(self, text: str) -> list[str]:
        """The words of `text` in small letters; those of more than three letters, all ASCII, are stemmed."""
        kept = "".join(each if unicodedata.category(each)[0] in "LMN" else " " for each in apart(text.lower()))
        return [self._stem(word) if len(word) > 3 and word.isascii() else word for word in kept.split()]


def apart(text: str) -> str:
    """`text` with blanks around each Chinese character and kana, since no blank is written between words there."""
    return UNSPACED.sub(lambda found: f" {found[0]} ", text)


def _bleu(sums: np.ndarray) -> float:
    from sacrebleu.metrics import BLEU

    *groups, ours, theirs = sums.astype(np.int64).tolist()
    found: Any = BLEU.compute_bleu(groups[:BLEU_WORDS], groups[BLEU_WORDS:], ours, theirs, smooth_method="exp")
    return float(found.score) / 100
