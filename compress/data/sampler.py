"""Chooses the texts of each step of a training."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampler:
    """Chooses `batch` texts of about equal length for each step, every text once an epoch, shuffled by `seed`."""

    lengths: np.ndarray
    batch: int
    seed: int

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
            # Sorting within pools of 64 batches keeps padding low and still mixes texts.
            pool = 64 * self.batch
            for i in range(0, len(order), pool):
                part = order[i : i + pool]
                order[i : i + pool] = part[np.argsort(self.lengths[part], kind="stable")]
            cached = (epoch, (order, generator.permutation(self.steps_per_epoch)))
            object.__setattr__(self, "cached", cached)
        return cached[1]
