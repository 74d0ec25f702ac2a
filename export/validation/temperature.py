"""Chooses a temperature and an abstention threshold on validation, and measures how reliable they make the probabilities.

Trained models are mostly overconfident. Dividing all logits by one number, the temperature, corrects most of that and
changes no answer (temperature scaling: Guo, Pleiss, Sun and Weinberger, "On Calibration of Modern Neural Networks",
ICML 2017, section 4.2).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.data.encoded import IGNORED, Encoded
from compress.data.examples import Example
from export.settings import KEPT_RIGHT, Precision
from export.validation.promises import answers_of
from serve.bundle.manifest import ValidationScores
from serve.text.answers import confidence, sigmoid, softmax

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.05, 20.0

# After 40 halvings, the interval log(20 / 0.05) = 6 is far below `DECIMALS`.
HALVINGS = 40

# A few hundred texts give no more, and rounding makes equal inputs give equal bytes.
DECIMALS = 4

# Every possible threshold. 1 is not one: rounding alone would put texts below it.
THRESHOLDS = np.arange(10**DECIMALS) / 10**DECIMALS

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Results of a temperature and a threshold on one split. A share of nothing, or without a threshold, is None."""

    rows: int
    """Labelled texts; words in token classification; pairs of a text and a label in multi-label classification."""
    ece_uncalibrated: float
    """Expected calibration error at temperature 1."""
    ece: float
    """The same at the chosen temperature."""
    ece_of_entities: float | None = None
    """The same of the entities that the server gives, and of their scores; None where there are no entities to give."""
    in_scope_abstained: float | None = None
    """Share of the labelled texts that fall below the threshold."""
    right_abstained: float | None = None
    """The same share of the texts that are answered correctly."""
    wrong_abstained: float | None = None
    """The same share of the texts that are answered wrongly."""
    out_of_scope_texts: int = 0
    out_of_scope_abstained: float | None = None


@dataclass(frozen=True)
class Confidence:
    """Temperature and threshold of one variant, and their results on validation, where they were chosen."""

    temperature: float
    abstain_below: float | None
    fitted: bool
    """False when validation has no best temperature, and 1 is kept."""
    validation: Reliability

    def on(
        self,
        encoded: Encoded,
        logits: Sequence[np.ndarray],
        outside: Sequence[np.ndarray] = (),
        examples: Sequence[Example] = (),
    ) -> Reliability:
        """The results on other texts; arguments as in `choose_confidence`."""
        return reliability(encoded, logits, self.temperature, self.abstain_below, outside, examples)


def choose_confidence(
    encoded: Encoded,
    logits: Sequence[np.ndarray],
    outside: Sequence[np.ndarray] = (),
    kept_right: float = KEPT_RIGHT,
    examples: Sequence[Example] = (),
) -> Confidence:
    """Choose temperature and threshold for a variant, from its `logits` for the validation texts in `encoded`.

    Args:
        encoded: labelled texts; rows without one of the model's labels are left out.
        logits: of each text's rows, (rows, labels).
        outside: the logits of out-of-scope texts, each (1, labels).
        kept_right: without `outside`, the share of correctly answered texts still to answer; 0 sets no threshold.
        examples: the same texts, for the calibration of their entities.
    """
    rows, targets = labelled_rows(encoded, logits)
    found = fit_temperature(rows, targets)
    temperature = 1.0 if found is None else found
    threshold = None
    # Where each text has one answer, the model may abstain.
    if encoded.task.has_kinds and not encoded.multi_label and len(rows):
        sure = softmax(rows / temperature).max(axis=-1)
        if len(outside):
            threshold = threshold_between(sure, softmax(_stacked(outside) / temperature).max(axis=-1))
        elif kept_right:
            threshold = threshold_keeping(sure[rows.argmax(axis=-1) == targets], kept_right)
    validation = reliability(encoded, logits, temperature, threshold, outside, examples)
    return Confidence(temperature, threshold, found is not None, validation)


def reliability(
    encoded: Encoded,
    logits: Sequence[np.ndarray],
    temperature: float,
    threshold: float | None,
    outside: Sequence[np.ndarray] = (),
    examples: Sequence[Example] = (),
) -> Reliability:
    """The results of temperature and threshold on the texts of `encoded` and on `outside`; arguments as in `choose_confidence`."""
    rows, targets = labelled_rows(encoded, logits)
    before, after = (expected_calibration_error(rows, targets, each) for each in (1.0, temperature))
    shares: dict[str, Any] = {}
    if encoded.task.labels_words and examples:
        answers = answers_of(examples, encoded, logits, temperature)
        shares["ece_of_entities"] = calibration_error(answers.scores, answers.right) if len(answers.scores) else None
    if threshold is not None:
        refused = softmax(rows / temperature).max(axis=-1) < threshold
        right = rows.argmax(axis=-1) == targets
        shares = {
            "in_scope_abstained": _share(refused),
            "right_abstained": _share(refused[right]),
            "wrong_abstained": _share(refused[~right]),
        }
        if len(outside):
            shares["out_of_scope_abstained"] = _share(softmax(_stacked(outside) / temperature).max(axis=-1) < threshold)
    return Reliability(targets.size, before, after, out_of_scope_texts=len(outside), **shares)


def labelled_rows(encoded: Encoded, logits: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The rows that carry a label: their logits (rows, labels), float64, and targets.

    Targets are (rows,), the index of the right label; for multi-label (rows, labels), 1 for each label that applies.
    """
    rows, targets = _stacked(logits), np.concatenate(encoded.targets)
    known = (targets != IGNORED).reshape(len(targets), -1).all(axis=-1)
    return rows[known], targets[known]


def fit_temperature(logits: np.ndarray, targets: np.ndarray) -> float | None:
    """The temperature T at which `targets` are likeliest under logits / T, to `DECIMALS` decimals.

    The negative log likelihood (of the softmax, or for targets (rows, labels) of each label's sigmoid) is convex in 1/T.
    The sign of its slope shows on which side the minimum is, so bisection finds it. None when the minimum is not between
    `LEAST_TEMPERATURE` and `MOST_TEMPERATURE`: when all rows are right, every lower temperature is likelier; when rows are
    right less often than by chance, every higher one.

    Args:
        logits: (rows, labels).
        targets: as `labelled_rows` gives them.
    """
    low, high = math.log(LEAST_TEMPERATURE), math.log(MOST_TEMPERATURE)
    logits = logits.astype(np.float64)
    if not len(logits) or _slope(logits, targets, low) <= 0 or _slope(logits, targets, high) >= 0:
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _slope(logits, targets, middle) > 0:
            low = middle
        else:
            high = middle
    return round(math.exp((low + high) / 2), DECIMALS)


def _slope(logits: np.ndarray, targets: np.ndarray, log_temperature: float) -> float:
    """The derivative by 1/T of the summed negative log likelihood: above 0 where the model is overconfident.

    For one right label: sum p z - z_right over each row's logits z and probabilities p. For multi-label: sum (p - y) z.
    """
    scaled = logits / math.exp(log_temperature)
    if targets.ndim == 2:
        return float(((sigmoid(scaled) - targets) * logits).sum())
    # Relative to the right label's logit, so that a large constant in a row does not cost precision.
    beyond = logits - logits[np.arange(len(logits)), targets][:, None]
    return float((softmax(scaled) * beyond).sum())


def expected_calibration_error(logits: np.ndarray, targets: np.ndarray, temperature: float = 1.0) -> float:
    """How far a model's probabilities are from how often it is right, 0 to 1; 0 for no rows.

    Guo et al. 2017, equation 5 (Naeini et al. 2015): rows are put into `BINS` bins of equal width by the probability of their
    likeliest label. The result is the mean over bins, weighted by rows, of the distance between mean probability and share
    of right rows. For multi-label, each text and label is a row: the probability that the label applies, and whether it does.
    """
    scaled = logits.astype(np.float64) / temperature
    if targets.ndim == 2:
        said, right = sigmoid(scaled).ravel(), targets.ravel() == 1
    else:
        said, right = softmax(scaled).max(axis=-1), logits.argmax(axis=-1) == targets
    return calibration_error(said, right) if len(said) else 0.0


def calibration_error(said: np.ndarray, right: np.ndarray) -> float:
    """The expected calibration error of the probabilities `said` (answers,) of answers that are `right` (answers,) or not."""
    # Bins are open below and closed above, as in the paper.
    bins = np.clip(np.ceil(said * BINS).astype(np.int64) - 1, 0, BINS - 1)
    apart = np.bincount(bins, weights=said - right, minlength=BINS)
    return float(np.abs(apart).sum() / len(said))


def threshold_keeping(right: np.ndarray, share: float) -> float | None:
    """The highest threshold that keeps at least `share` of the probabilities `right` (texts,); None for no texts."""
    if not len(right):
        return None
    kept = len(right) - np.searchsorted(np.sort(right), THRESHOLDS, side="left")  # for each threshold
    return float(THRESHOLDS[np.flatnonzero(kept >= share * len(right))[-1]])


def threshold_between(inside: np.ndarray, outside: np.ndarray) -> float:
    """The threshold that best separates texts in scope from texts out of scope, by their probabilities, each (texts,).

    It maximises Youden's J (Youden 1950, "Index for rating diagnostic tests"): the share of out-of-scope texts below it,
    less the share of in-scope texts below it. J does not depend on the number of texts of each kind. Of equally good
    thresholds the middle one is taken, which is far from both kinds when they are well apart.
    """
    below = [np.searchsorted(np.sort(each), THRESHOLDS, side="left") for each in (inside, outside)]
    # J times the number of pairs, in whole numbers, so that ties are exact.
    index = below[1] * len(inside) - below[0] * len(outside)
    best = np.flatnonzero(index == index.max())
    return float(THRESHOLDS[best[len(best) // 2]])


def validation_scores(encoded: Encoded, logits: Sequence[np.ndarray], temperature: float) -> ValidationScores | None:
    """How sure a variant is of its answers to the validation texts in `encoded`, from its `logits`, and how long these are.

    None if no text has a word.
    """
    sure = [confidence(rows / temperature, multi_label=encoded.multi_label) for rows in logits if len(rows)]
    if not sure:
        return None
    tokens = [len(ids) for ids in encoded.ids]
    found = (np.mean(sure), np.std(sure), np.mean(tokens), np.std(tokens))
    return ValidationScores(len(sure), *(round(float(each), 6) for each in found))


def describe_confidence(
    confidence: Mapping[Precision, Confidence], test: Mapping[Precision, Reliability], rests_on: str = "validation"
) -> list[str]:
    """A line for each variant, for report and card: what was chosen, on which texts, and its results on `test`, else on validation."""
    lines = []
    for variant, chosen in confidence.items():
        split, found = ("test", test[variant]) if variant in test else ("validation", chosen.validation)
        by_entity = found.ece_of_entities
        of_entities = "" if by_entity is None else f" of words; of the entities that it gives it is {by_entity:.4f}"
        line = (
            (
                f"{variant}: dividing the logits by the temperature {chosen.temperature:g} takes the expected calibration error "
                f"on {split} from {found.ece_uncalibrated:.4f} to {found.ece:.4f}{of_entities}."
            )
            if chosen.fitted
            else (
                f"{variant}: the probabilities could not be calibrated, since no temperature from 0.05 to 20 is the best on validation "
                f"(for example, when no answer is wrong); the expected calibration error on {split} is {found.ece:.4f}{of_entities}."
            )
        )
        shares = [
            f"{share:.1%} of {whose}"
            for share, whose in (
                (found.in_scope_abstained, "the texts"),
                (found.wrong_abstained, "those that it would answer wrongly"),
                (found.out_of_scope_abstained, f"{found.out_of_scope_texts:,} texts out of scope"),
            )
            if share is not None
        ]
        if chosen.abstain_below is not None and shares:
            line += f" Below a probability of {chosen.abstain_below:g} it abstains: {', '.join(shares)}."
        lines.append(line if rests_on == "validation" else f"{line} All this was chosen on {rests_on}.")
    return lines


def _stacked(logits: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(logits).astype(np.float64)


def _share(chosen: np.ndarray) -> float | None:
    return float(chosen.mean()) if len(chosen) else None
