"""Scores of answers to questions: exact match and F1 of words, by the official definitions of SQuAD and MLQA. No torch.

SQuAD 1.1: Rajpurkar et al. 2016, section 6.1; SQuAD 2.0, where a question may have no answer: Rajpurkar et al. 2018, section 4; and the
evaluation scripts of both. MLQA: Lewis et al. 2020, section 4.2, whose script removes the articles of each language and splits Chinese
into characters.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np

from compress.data.encoded import Encoded
from compress.evaluation.metrics import Acceptable, Answers, Metric, Score, distance
from serve.text.questions import EVEN_SCORE, Found, QuestionRow, found_answer

ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"\sال^|ال",
}
CHINESE = "zh"
HAN = re.compile("[\u4e00-\u9fa5]")


class Said(NamedTuple):
    """A model's likeliest answer to a question, and its score (see `serve.text.questions.Found`)."""

    text: str
    score: float


def normal(text: str, language: str = "") -> str:
    """`text` in small letters, without punctuation and articles, its words with one blank between them."""
    lowered = text.lower()
    kept = "".join(each for each in lowered if not _is_punctuation(each, everywhere=bool(language)))
    articles = ARTICLES.get(language or "en")
    if articles:
        kept = re.sub(articles, " ", kept)
    if language == CHINESE:
        kept = HAN.sub(lambda found: f" {found[0]} ", kept)
    return " ".join(kept.split())


def exact(gold: Acceptable, said: str) -> float:
    """1 if `said` is one of the answers, both as `normal`, otherwise 0; no answer is right where there is none."""
    ours = normal(said, gold.language)
    return float(any(ours == theirs for theirs in _normal_texts(gold)))


def word_f1(gold: Acceptable, said: str) -> float:
    """The F1 of the words of `said` and of an answer, both as `normal`: the highest over the answers.

    Where one of the two has no words it is 1 if neither has, otherwise 0.
    """
    ours = normal(said, gold.language).split()
    return max(_f1(theirs.split(), ours) for theirs in _normal_texts(gold))


def said_of(encoded: Encoded, logits: Sequence[np.ndarray]) -> list[Said]:
    """The likeliest answer to each question of `encoded`, from the logits of its windows, (rows, 2) each."""
    assert encoded.owners is not None
    found: list[Said] = []
    order = np.flatnonzero(np.diff(encoded.owners, prepend=-1))  # the windows of a question follow each other
    for first, end in zip(order.tolist(), [*order.tolist()[1:], len(encoded)], strict=True):
        rows: Sequence[QuestionRow] = encoded.encodings[first:end]  # type: ignore[assignment]
        answer: Found = found_answer(rows, logits[first:end])
        found.append(Said(encoded.texts[first][answer.start : answer.end], answer.score))
    return found


def best_answer_from(gold: Sequence[Acceptable], said: Sequence[Said]) -> float:
    """The score from which answers are best given: where the mean F1 is highest; of equally good ones the nearest to an even chance.

    It is 0 where every question has an answer.
    """
    if all(each.texts for each in gold):
        return 0.0
    gains = np.array(
        [word_f1(theirs, ours.text) - word_f1(theirs, "") for theirs, ours in zip(gold, said, strict=True)]
    )
    scores = np.array([each.score for each in said])
    order = np.argsort(-scores, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(gains[order])])  # by how many are answered
    ordered = scores[order]
    # Between the last that is answered and the first that is not.
    places = (
        np.concatenate([[1.0], (ordered[:-1] + ordered[1:]) / 2, [0.0]]) if len(ordered) else np.array([EVEN_SCORE])
    )
    possible = np.concatenate([[True], ordered[:-1] > ordered[1:], [True]]) if len(ordered) else np.array([True])
    best = np.flatnonzero(possible & (sums >= sums[possible].max() - 1e-12))
    return float(min(places[best], key=lambda place: abs(place - EVEN_SCORE)))


def given(said: Sequence[Said], answer_from: float) -> list[str]:
    """The answers that are given from this score on; others are empty."""
    return [each.text if each.score >= answer_from else "" for each in said]


def _normal_texts(gold: Acceptable) -> list[str]:
    """The answers as `normal`; those of which nothing is left do not count, unless all are such: then there is no answer."""
    return list(filter(None, (normal(text, gold.language) for text in gold.texts))) or [""]


def _f1(gold: list[str], said: list[str]) -> float:
    if not gold or not said:
        return float(gold == said)
    same = sum((Counter(gold) & Counter(said)).values())
    return 2 * same / (len(gold) + len(said))


@lru_cache(maxsize=8192)
def _is_punctuation(character: str, *, everywhere: bool) -> bool:
    return character in string.punctuation or (everywhere and unicodedata.category(character).startswith("P"))


def span_distance(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> tuple[float, float]:
    """As `distance`, of where an answer starts and ends: each window has two distributions over its rows; logits (rows, 2) of each."""
    both = [distance(theirs.T, ours.T, multi_label=False) for theirs, ours in zip(expected, actual, strict=True)]
    divergence, changed = np.mean(both, axis=0)
    return float(divergence), float(changed)


class AnswerF1(Metric):
    """The mean F1 of words of answers to questions."""

    def rows(self, gold: Answers, predicted: Answers) -> np.ndarray:
        """Per question its F1, and 1: (questions, 2)."""
        return _means(word_f1, cast(Sequence[Acceptable], gold), predicted)

    def of(self, sums: np.ndarray) -> np.ndarray:
        """The mean from sums `(..., 2)`."""
        return np.asarray(sums[..., 0] / np.maximum(sums[..., 1], 1))

    def further_scores(
        self, gold: Answers, predicted: Answers, *, seed: int = 0, clusters: np.ndarray | None = None
    ) -> dict[str, Score]:
        """`exact_match`, and the F1 where there is an answer and where there is none."""
        right = cast(Sequence[Acceptable], gold)
        found = {"exact_match": self.interval_of(_means(exact, right, predicted), seed=seed, clusters=clusters)}
        for name, there in (("f1_with_answer", True), ("f1_without_answer", False)):
            chosen = [i for i, each in enumerate(right) if bool(each.texts) is there]
            if chosen and len(chosen) < len(right):
                rows = _means(word_f1, [right[i] for i in chosen], [predicted[i] for i in chosen])
                of_chosen = None if clusters is None else clusters[chosen]
                found[name] = self.interval_of(rows, seed=seed, clusters=of_chosen)
        return found


ANSWER_F1 = AnswerF1("answer_f1", further="questions")


def _means(each: Callable[[Acceptable, str], float], gold: Sequence[Acceptable], predicted: Answers) -> np.ndarray:
    """The rows of a mean over questions, (questions, 2): its term, and 1. Of what was shuffled, the first right answer stands for all."""
    said = [next(iter(ours.texts), "") if isinstance(ours, Acceptable) else str(ours) for ours in predicted]
    return np.array([[each(theirs, ours), 1.0] for theirs, ours in zip(gold, said, strict=True)])
