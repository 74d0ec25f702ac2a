"""Whether the texts that a model is asked about are still like those of its validation split: how sure it is of its answers, and how long
they are.

Every `WINDOW_TEXTS` texts, their mean, and that of the last `LONG_WINDOWS` windows together, are compared with that of
validation: z = (mean - mu) / (sigma sqrt(1/n + 1/N)), with mu and sigma of the N texts of validation. Beyond `ALARM_DEVIATIONS` the texts
have changed: one window shows a large change soon, several show a small one. No window of texts like those of validation
reached that (docs/measurements/server.md, "Drift"), though both quantities are skewed.
"""

import logging
import math
from collections import deque
from typing import Literal, NamedTuple

from serve.observe.logs import FIELDS
from serve.observe.metrics import Metrics

log = logging.getLogger("serve")

WINDOW_TEXTS = 250
LONG_WINDOWS = 4
ALARM_DEVIATIONS = 5.0
# `confidence` is the mean of `serve.text.answers.confidence` over texts, `tokens` that of their lengths.
Quantity = Literal["confidence", "tokens"]
# Where all texts of validation are alike, a change by less than a third of this is no alarm.
LEAST_DEVIATION = {"confidence": 0.01, "tokens": 0.5}


class Expected(NamedTuple):
    """The mean and the standard deviation over `texts` texts of validation."""

    texts: int
    mean: float
    deviation: float


def deviations(mean: float, texts: int, expected: Expected, least: float = LEAST_DEVIATION["confidence"]) -> float:
    """How many standard deviations, each `least` or more for one text, a mean over `texts` texts is above that of validation."""
    deviation = max(expected.deviation, least)
    return (mean - expected.mean) / (deviation * math.sqrt(1 / texts + 1 / expected.texts))


class Drift:
    """Watches a quantity of the texts of the model called `model`. It logs when they change, and when they are as before."""

    def __init__(self, model: str, of: Quantity, expected: Expected, metrics: Metrics) -> None:
        self._model, self._of, self._expected, self._metrics = model, of, expected, metrics
        self._texts, self._sum = 0, 0.0
        self._windows: deque[tuple[int, float]] = deque(maxlen=LONG_WINDOWS)  # texts and sum of the last ones
        self.alarmed = False
        metrics.drift_expected.labels(model, of).set(expected.mean)

    def add(self, texts: int, total: float) -> None:
        """Adds `texts` texts, of which `total` is the sum; a whole window is compared, and the next one begins."""
        self._texts += texts
        self._sum += total
        if self._texts < WINDOW_TEXTS:
            return
        self._windows.append((self._texts, self._sum))
        self._texts, self._sum = 0, 0.0
        last = self._windows[-1]
        together = sum(count for count, _ in self._windows), sum(of for _, of in self._windows)
        least = LEAST_DEVIATION[self._of]
        away = max((deviations(of / count, count, self._expected, least) for count, of in (last, together)), key=abs)
        self._metrics.drift_mean.labels(self._model, self._of).set(last[1] / last[0])
        self._metrics.drift_deviations.labels(self._model, self._of).set(away)
        self._tell(away, *together)

    def _tell(self, away: float, texts: int, total: float) -> None:
        changed = abs(away) > ALARM_DEVIATIONS
        fields: dict[str, object] = {"model": self._model, "of": self._of}
        if changed and not self.alarmed:
            self._metrics.drift_alarms.labels(self._model, self._of).inc()
            fields |= {"mean": round(total / texts, 4), "validation_mean": self._expected.mean, "texts": texts}
            log.warning("texts are unlike those of validation: %.1f deviations", away, extra={FIELDS: fields})
        if self.alarmed and not changed:
            log.warning("texts are like those of validation again", extra={FIELDS: fields})
        self.alarmed = changed
