"""Thresholds below which no answer is given, so that a precision or a recall holds with a stated confidence.

A promise names what must hold, such as `precision=0.95`. Of the thresholds on validation, those are sought at which an exact test of the
binomial distribution rejects, at the stated confidence, that less than that is reached. Thresholds are tested one after another in an
order that does not depend on which answers are right, and one that fails uses up what it was tested at: so the chance that the promise is
broken is at most what was stated, however many thresholds pass (Angelopoulos, Bates, Candes, Jordan and Lei, "Learn then Test", 2021,
section 2.3). It holds for texts like those that it was made on; other texts may need another threshold. It is stated for a model
that these texts did not choose: where the best of ten models is chosen on the same texts, promises of 0.95 were broken 14 to 34 times in
100 in simulations, the more the less alike these models are.

Answers to one text may be right or wrong together. Where several belong to a text, they count for as many as they are worth: their number
is divided by the design effect (Korn and Graubard, "Confidence intervals for proportions with small expected number of positive counts
estimated from survey data", 1998), and where none is wrong a text counts once. For those the test is approximate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import betainc, expit

from compress.data.encoded import Encoded
from compress.data.examples import Example
from compress.evaluation.metrics import each_widened, scored_spans
from export.settings import Precision, PromiseKind, read_promise
from serve.errors import BadInput
from serve.text.answers import softmax

# Every threshold that is tried: 0, then probabilities from 0.12 to 0.9999 that are evenly spaced in their logit, because the
# probabilities of a good model crowd below 1.
THRESHOLDS = np.concatenate([[0.0], np.round(expit(np.arange(-2.0, 9.21, 0.08)), 6)])
# A precision may fail at high thresholds, where few answers are left to show it. So its thresholds are tried downwards from several
# starts, that above which so much of the answers lies. Each start has its part of the risk, and a threshold that passes hands what it was
# tested at to the next (fallback procedure: Wiens, "A fixed sequence Bonferroni procedure for testing multiple endpoints", 2003).
STARTS = (0.1, 0.25, 0.5, 1.0)
# How messages name texts that are for promises alone, and what they say where there are none.
PROMISE_FILE, SET_APART = "--promise-data", "validation, set apart before training"
NO_CONFIDENCE = "no confidence: chosen on the same texts"
SHARES = tuple(
    np.round(np.arange(0.995, 0.0, -0.005), 3).tolist()
)  # what is tried in place of a promise that cannot be kept


class Answers(NamedTuple):
    """What a model answered to texts, and how sure it was."""

    scores: np.ndarray
    """(answers,), the probability that the server gives each."""
    right: np.ndarray
    """(answers,), bool."""
    texts: np.ndarray
    """(answers,), the index of each answer's text."""
    wanted: np.ndarray
    """(texts,), how many right answers there are to each."""


@dataclass(frozen=True)
class Kept:
    """What a promise came to on texts."""

    reached: float
    """The precision or the recall."""
    given: float
    """Share of the model's answers that are given."""
    texts: int


@dataclass(frozen=True)
class PrecisionGuarantee:
    """A precision or a recall of the answers whose score is `min_score` or more."""

    of: PromiseKind
    asked: float
    confidence: float
    min_score: float
    made_on: Kept
    apart: str = ""
    """The texts that it was made on, where no model was chosen on them; empty for validation."""

    @property
    def stated(self) -> str:
        """What it is promised with."""
        return f"a confidence of {self.confidence:g}" if self.apart else NO_CONFIDENCE

    @property
    def name(self) -> str:
        """Such as `precision=0.95`."""
        return f"{self.of}={self.asked:g}"

    def on(self, answers: Answers) -> Kept:
        """What it comes to on other texts."""
        return kept(self.of, answers, self.min_score)


def answers_of(
    examples: Sequence[Example], encoded: Encoded, logits: Sequence[np.ndarray], temperature: float
) -> Answers:
    """The answers in each text's `logits` (rows, labels): its likeliest class, or its entities, as the server gives and scores them.

    As for the metric, entities of data that came as words count as the words that they touch.

    Args:
        examples: the labelled texts.
        encoded: the same, tokenised; one label applies to a text, or they have entities.
        logits: of each text's rows.
        temperature: logits are divided by it.
    """
    gold = [encoded.task.gold_of(example) for example in examples]
    if encoded.task.has_kinds:
        probabilities = softmax(np.concatenate(logits) / temperature)
        said = [encoded.labels[i] for i in probabilities.argmax(axis=-1)]
        right = np.array([one == other for one, other in zip(said, gold, strict=True)])
        return Answers(probabilities.max(axis=-1), right, np.arange(len(gold)), np.ones(len(gold)))
    spans = scored_spans(encoded, [rows / temperature for rows in logits])
    found = [
        (span.score, widened in _entities(truth), text)
        for text, (example, of_text, truth) in enumerate(zip(examples, spans, gold, strict=True))
        for span, widened in zip(
            of_text, each_widened([span[:3] for span in of_text], example.text, example.blanks_in_words), strict=True
        )
        if widened
    ]
    scores, right_of, texts = zip(*found, strict=True) if found else ((), (), ())
    return Answers(
        np.array(scores, dtype=np.float64),
        np.array(right_of, dtype=bool),
        np.array(texts, dtype=np.int64),
        np.array([len(_entities(truth)) for truth in gold], dtype=np.float64),
    )


def with_outside(answers: Answers, outside: Sequence[np.ndarray], temperature: float) -> Answers:
    """`answers` with those to out-of-scope texts, whose logits are (1, labels) each: every one of them is wrong, and none is wanted."""
    if not len(outside):
        return answers
    scores = softmax(np.concatenate(outside) / temperature).max(axis=-1)
    texts = len(answers.wanted) + np.arange(len(scores))
    return Answers(
        np.concatenate([answers.scores, scores]),
        np.concatenate([answers.right, np.zeros(len(scores), dtype=bool)]),
        np.concatenate([answers.texts, texts]),
        np.concatenate([answers.wanted, np.zeros(len(scores))]),
    )


def _entities(answer: object) -> frozenset[object]:
    return answer if isinstance(answer, frozenset) else frozenset()


def make_promise(text: str, answers: Answers, confidence: float, *, apart: str = "") -> PrecisionGuarantee:
    """The promise that `text` names, with the threshold that keeps it and gives most answers, or for a recall the fewest wrong ones.

    Args:
        text: such as `precision=0.95`.
        answers: to the texts that it is made on.
        confidence: the least chance that the promise holds, below 1.
        apart: what these texts are, where no model was chosen on them.

    Raises:
        BadInput: no threshold keeps it; the message has the share that could be promised.
    """
    kind, asked = read_promise(text)
    risk = 1 - confidence
    passed = _threshold(kind, answers, asked, risk)
    if passed is None:
        of = apart or "validation"
        less = next((share for share in SHARES if _threshold(kind, answers, share, risk) is not None), None)
        possible = f"no {kind} could be promised" if less is None else f"{kind}={less:g} could be promised"
        raise BadInput(
            f"--promise {text} cannot be kept with a confidence of {confidence:g} on the {len(answers.wanted):,} texts of {of}: "
            f"{possible}. Ask for less, give more of these texts, or a better model."
        )
    return PrecisionGuarantee(kind, asked, confidence, passed, kept(kind, answers, passed), apart)


def least_answers(text: str, confidence: float) -> int:
    """How many answers it takes to show the promise that `text` names, if all are right."""
    return math.ceil(math.log(1 - confidence) / math.log(read_promise(text)[1]))


def kept(kind: PromiseKind, answers: Answers, min_score: float) -> Kept:
    """What the answers with a score of `min_score` or more come to; a share of nothing is 1."""
    good, all_of = _counted(kind, answers, min_score)
    given = answers.scores >= min_score
    return Kept(
        float(good.sum() / all_of.sum()) if all_of.sum() else 1.0,
        float(given.mean()) if len(given) else 0.0,
        len(answers.wanted),
    )


def _counted(kind: PromiseKind, answers: Answers, min_score: float) -> tuple[np.ndarray, np.ndarray]:
    """Of each text the right answers that are given, and those that they are a share of: given ones, or wanted ones; (texts,) each."""
    texts = len(answers.wanted)
    given = answers.scores >= min_score
    good = np.bincount(answers.texts[given & answers.right], minlength=texts)
    if kind == "recall":
        return good, answers.wanted
    return good, np.bincount(answers.texts[given], minlength=texts)


def _threshold(kind: PromiseKind, answers: Answers, asked: float, risk: float) -> float | None:
    """The lowest threshold at which the precision holds, or the highest at which the recall does."""
    order, risks = THRESHOLDS, np.zeros(len(THRESHOLDS))
    if kind == "recall":
        risks[0] = risk
    elif len(answers.scores):
        # The starts are chosen by the scores alone, not by what is right.
        starts = [np.quantile(answers.scores, 1 - share, method="lower") for share in STARTS]
        order = THRESHOLDS[::-1]
        # Where even right answers alone could not pass, they are too few to have a part.
        able = [s for s in starts if asked ** int((answers.scores >= s).sum()) <= risk / len(STARTS)] or starts[-1:]
        np.add.at(risks, [int((order > start).sum()) for start in able], risk / len(able))
    found, passed_on = [], 0.0
    for threshold, own in zip(order.tolist(), risks.tolist(), strict=True):
        passed_on += own
        if passed_on and _holds(kind, answers, threshold, asked, passed_on):
            found.append(threshold)
        else:
            passed_on = 0.0
    return (max(found) if kind == "recall" else min(found)) if found else None


def _holds(kind: PromiseKind, answers: Answers, min_score: float, asked: float, risk: float) -> bool:
    """Whether it is rejected at `risk` that less than `asked` is reached: P(X >= right) for X ~ Bin(count, asked).

    Right answers and answers are both divided by the design effect.
    """
    good, all_of = _counted(kind, answers, min_score)
    right, count = float(good.sum()), float(all_of.sum())
    if not right:
        return False
    share = right / count
    alone = share * (1 - share) * count  # the variance of `right` if answers were independent
    if alone:
        effect = max(1.0, float(((good - share * all_of) ** 2).sum()) / alone)
        right, count = right / effect, count / effect
    else:  # then nothing tells how dependent they are, and each text counts once
        texts = float((all_of > 0).sum())
        right, count = right / count * texts, texts
    return float(betainc(right, count - right + 1, asked)) <= risk


def describe_promises(
    promises: Mapping[Precision, Sequence[PrecisionGuarantee]], test: Mapping[Precision, Sequence[Kept]]
) -> list[str]:
    """A line for each promise of each variant, for report and card: its threshold, and its share on `test`, else where it was made."""
    lines = []
    for variant, made in promises.items():
        for number, promise in enumerate(made):
            of = promise.apart or "validation"
            split, found = ("test", test[variant][number]) if variant in test else (of, promise.made_on)
            lines.append(
                f"{variant}: {promise.name} is promised with {promise.stated}. It is for answers with a score of {promise.min_score:g} or "
                f"more, on texts like those of {of}; on {split} {promise.of} is {found.reached:.4f}, with {found.given:.1%} of the "
                "answers given."
            )
    return lines
