"""Whether the texts that a model is asked about are still like those of its validation split, by how sure it is of its answers.

Every `WINDOW_TEXTS` texts, the mean confidence is compared with that of validation: z = (mean - mu) / (sigma sqrt(1/n + 1/N)), with mu and
sigma of the N texts of validation. Beyond `ALARM_DEVIATIONS` the texts have changed. None of 32,000 windows of texts
like those of validation reached that (docs/measurements/server.md, "Drift"), though confidence is skewed.
"""

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

from serve.observe.logs import FIELDS
from serve.observe.metrics import Metrics

log = logging.getLogger("serve")

WINDOW_TEXTS = 250
ALARM_DEVIATIONS = 5.0
# Of a model that is as sure of every text of validation: a change of its mean by less than 0.003 is no alarm.
LEAST_DEVIATION = 0.01


class Expected(NamedTuple):
    """How sure the model is of its answers to `texts` texts of validation: mean and standard deviation."""

    texts: int
    mean: float
    deviation: float


def deviations(mean: float, texts: int, expected: Expected) -> float:
    """How many standard deviations a mean over `texts` texts is above that of validation."""
    deviation = max(expected.deviation, LEAST_DEVIATION)
    return (mean - expected.mean) / (deviation * math.sqrt(1 / texts + 1 / expected.texts))


class Drift:
    """Watches the model called `model`, whose validation scores are `expected`. It logs when texts change, and when they are as before."""

    def __init__(self, model: str, expected: Expected, metrics: Metrics) -> None:
        self._model, self._expected, self._metrics = model, expected, metrics
        self._texts, self._sum = 0, 0.0
        self.alarmed = False
        metrics.scores_expected.labels(model).set(expected.mean)

    def add(self, scores: Sequence[float]) -> None:
        """Adds the confidence of some texts; a whole window is compared, and the next one begins."""
        self._texts += len(scores)
        self._sum += sum(scores)
        if self._texts < WINDOW_TEXTS:
            return
        mean, texts = self._sum / self._texts, self._texts
        self._texts, self._sum = 0, 0.0
        away = deviations(mean, texts, self._expected)
        self._metrics.scores_mean.labels(self._model).set(mean)
        self._metrics.drift_deviations.labels(self._model).set(away)
        changed = abs(away) > ALARM_DEVIATIONS
        if changed and not self.alarmed:
            self._metrics.drift_alarms.labels(self._model).inc()
            fields = {
                "model": self._model,
                "mean_score": round(mean, 4),
                "validation_mean": self._expected.mean,
                "texts": texts,
            }
            log.warning("texts are unlike those of validation: %.1f deviations", away, extra={FIELDS: fields})
        if self.alarmed and not changed:
            log.warning("texts are like those of validation again", extra={FIELDS: {"model": self._model}})
        self.alarmed = changed
