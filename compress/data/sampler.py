"""Chooses the texts of each step of a training."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def language_counts(languages: Sequence[str], temperature: float) -> np.ndarray:
    """How often to read each text in an epoch, (texts,), float64, so that small languages are seen; the sum is the number of texts.

    Of `n` texts, those of one language together get a share that goes with `n ** (1 / temperature)`: 1 reads each text once, and a
    large temperature gives all languages the same (multilingual BERT has 1.43, XLM-R 3.33: section 3.1 of its paper). Texts of one
    language are read equally often.
    """
    texts = Counter(languages)
    powers = {language: count ** (1 / temperature) for language, count in texts.items()}
    each = {
        language: len(languages) * power / sum(powers.values()) / texts[language] for language, power in powers.items()
    }
    return np.array([each[language] for language in languages], dtype=np.float64)


@dataclass(frozen=True)
class Sampler:
    """Chooses `batch` texts of about equal length for each step, every text once an epoch, shuffled by `seed`.

    With `counts` (texts,) a text is read that often in an epoch on average: so often, or once more where that is no whole number.
    """

    lengths: np.ndarray
    batch: int
    seed: int
    counts: np.ndarray | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every text occurs once."""
        return -(-len(self.lengths) // self.batch)

    def tokens_at(self, step: int) -> int:
        """Real tokens of step `step`."""
        return int(self.lengths[self.at(step)].sum())

    def at(self, step: int) -> np.ndarray:
        """Indices of the texts of step `step`."""
        epoch, within = divmod(step, self.steps_per_epoch)
        ordered, turns = self._epoch(epoch)
        start = turns[within] * self.batch
        chosen: np.ndarray = ordered[start : start + self.batch]
        return chosen

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The indices of all texts, those of a batch next to each other, and the order of the batches; 8 bytes a text."""
        cached: tuple[int, tuple[np.ndarray, np.ndarray]] | None = self.__dict__.get("cached")
        if cached is None or cached[0] != epoch:
            object.__setattr__(self, "cached", None)  # frees the old order before the next is made
            generator = np.random.default_rng([self.seed, epoch])
            order = generator.permutation(len(self.lengths))
            if self.counts is not None:
                # Systematic sampling: evenly spaced points on the texts laid end to end, each as long as its count.
                ends = np.cumsum(self.counts[order])
                points = (np.arange(len(order)) + generator.random()) * (ends[-1] / len(order))
                order = generator.permutation(
                    order[np.searchsorted(ends, points, side="right").clip(max=len(order) - 1)]
                )
            # Sorting within pools of 64 batches keeps padding low and still mixes texts.
            pool = 64 * self.batch
            for i in range(0, len(order), pool):
                part = order[i : i + pool]
                order[i : i + pool] = part[np.argsort(self.lengths[part], kind="stable")]
            cached = (epoch, (order, generator.permutation(self.steps_per_epoch)))
            object.__setattr__(self, "cached", cached)
        return cached[1]
