"""A controller that draws a student's shape number by number, and learns by REINFORCE which shapes are worth training.

The comparative analysis found its smallest students so (appendix C, after the KD-NAS of Trivedi et al. 2023). It gives the reward; the
sizes and rates of the controller are ours.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import pstdev

import numpy as np
import torch
from torch import Tensor, nn

TARGET_SHARE, LATENCY_EXPONENT = 0.6, -0.06  # comparative analysis, eq. 12
HIDDEN = 32  # width of the LSTM
LEARNING_RATE = 0.02
BASELINE_DECAY = 0.8  # of the running mean of rewards, which is subtracted from each
ENTROPY_WEIGHT = (
    0.1  # of advantages whose standard deviation is 1; keeps the controller from drawing one shape too soon
)
MOST_REPEATS = 100  # draws in a row of what was trained before; then a shape is drawn by chance

Places = tuple[int, ...]  # a shape as choices: for each of its numbers the place among those that are possible


def reward(loss: float, student_ms: float, teacher_ms: float) -> float:
    """What a student is worth: `(1 - loss) (student_ms / (0.6 teacher_ms)) ^ -0.06` (comparative analysis, eq. 12).

    The paper's `loss` is that of hidden states, scaled to 0..1. A search has 1 minus the score on validation in its place.
    """
    return float((1 - loss) * (student_ms / (TARGET_SHARE * teacher_ms)) ** LATENCY_EXPONENT)


class Controller(nn.Module):
    """An LSTM that reads the choices made so far and gives the probabilities of the next; what leads to no allowed shape has none."""

    def __init__(self, allowed: Collection[Places], seed: int) -> None:
        """`allowed` are the shapes that may be drawn, all with as many choices; `seed` decides first weights and draws."""
        super().__init__()
        possible: dict[Places, set[int]] = {}
        for shape in allowed:
            for i, place in enumerate(shape):
                possible.setdefault(shape[:i], set()).add(place)
        self.possible = {before: sorted(places) for before, places in possible.items()}
        choices = max(map(len, allowed))
        widest = 1 + max(max(places) for places in self.possible.values())
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.start = nn.Parameter(torch.zeros(1, HIDDEN))
            self.embeddings = nn.ModuleList(nn.Embedding(widest, HIDDEN) for _ in range(choices - 1))
            self.cell = nn.LSTMCell(HIDDEN, HIDDEN)
            heads = [nn.Linear(HIDDEN, widest) for _ in range(choices)]
        for head in heads:  # every possible choice is as likely at first
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self.heads = nn.ModuleList(heads)
        self.optimiser = torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)
        self.rewards: list[float] = []
        self.baseline = 0.0

    def draw(self) -> Places:
        """A shape, drawn by what was learned so far."""
        with torch.no_grad():
            return self._walk(None)[0]

    def log_probability(self, shape: Places) -> Tensor:
        """The logarithm of the probability that `shape` is drawn, a scalar."""
        return self._walk(shape)[1]

    def learn(self, shape: Places, value: float) -> None:
        """One step of REINFORCE (Williams 1992): shapes whose reward `value` is above the running mean become likelier.

        Advantages are divided by the standard deviation of all rewards, which differ by little.
        """
        self.baseline = value if not self.rewards else self.baseline
        self.rewards.append(value)
        advantage = (value - self.baseline) / (pstdev(self.rewards) or 1.0)
        self.baseline = BASELINE_DECAY * self.baseline + (1 - BASELINE_DECAY) * value
        _, log_probability, entropy = self._walk(shape)
        self.optimiser.zero_grad()
        torch.autograd.backward(-advantage * log_probability - ENTROPY_WEIGHT * entropy)
        self.optimiser.step()

    def _walk(self, shape: Places | None) -> tuple[Places, Tensor, Tensor]:
        """The choices of `shape`, or of one that is drawn; the logarithm of their probability, and the sum of the choices' entropies."""
        read, state = self.start, (torch.zeros(1, HIDDEN), torch.zeros(1, HIDDEN))
        taken: Places = ()
        total, entropy = torch.zeros(()), torch.zeros(())
        while taken in self.possible:
            places, step = self.possible[taken], len(taken)
            state = self.cell(read, state)
            logs = self.heads[step](state[0])[0, places].log_softmax(0)  # (places,)
            drawn = (
                int(torch.multinomial(logs.exp(), 1, generator=self.generator))
                if shape is None
                else places.index(shape[step])
            )
            total, entropy = total + logs[drawn], entropy - (logs.exp() * logs).sum()
            taken = (*taken, places[drawn])
            if taken in self.possible:
                read = self.embeddings[step](torch.tensor([places[drawn]]))
        return taken, total, entropy


def controlled(
    allowed: Sequence[Places], first: Sequence[Places], rewards: Callable[[Places], float | None], seed: int
) -> Iterator[Places]:
    """Shapes of `allowed` to train, one after the other, until each was: the `first`, then those that a controller draws.

    `rewards` gives the reward of a shape that was trained, otherwise None; the caller has trained each before it asks for the next. A
    shape that is drawn again is learned again. The same rewards and seed give the same shapes.
    """
    controller, chance = Controller(allowed, seed), np.random.default_rng(seed)
    for given in first:
        yield given
        controller.learn(given, _known(rewards, given))
    while left := [shape for shape in allowed if rewards(shape) is None]:
        for _ in range(MOST_REPEATS):
            drawn = controller.draw()
            if (value := rewards(drawn)) is None:
                break
            controller.learn(drawn, value)
        else:
            drawn = left[int(chance.integers(len(left)))]
        yield drawn
        controller.learn(drawn, _known(rewards, drawn))


def _known(rewards: Callable[[Places], float | None], shape: Places) -> float:
    value = rewards(shape)
    assert value is not None
    return value
