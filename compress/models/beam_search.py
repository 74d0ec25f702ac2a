"""Beam search over any model that gives the next token's probabilities; several texts at once."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Gives the log-probabilities (texts * beams, vocabulary) of the next token from the last ones (texts * beams,), and from the rows that
# they go on from, (texts * beams,); both are None for the first token.
NextToken = Callable[[Tensor | None, Tensor | None], Tensor]


def length_penalty(tokens: int, power: float) -> float:
    """What a sum of log-probabilities of `tokens` tokens is divided by: `((5 + tokens) / 6) ** power` (Wu et al. 2016, eq. 14)."""
    return float(((5 + tokens) / 6) ** power)


@dataclass
class _Finished:
    """The best finished targets of one text, at most `beams`, with their scores; the best is the first."""

    beams: int
    targets: list[tuple[float, list[int]]] = field(default_factory=list)

    def add(self, score: float, target: list[int]) -> None:
        self.targets = sorted([*self.targets, (score, target)], key=lambda scored: -scored[0])[: self.beams]

    def all_better_than(self, bound: float) -> bool:
        """Whether no further target, of which `bound` is the best possible score, can be among the best."""
        return len(self.targets) == self.beams and bound <= self.targets[-1][0]


def beam_search(
    next_token: NextToken, texts: int, *, beams: int, end_id: int, longest: int, power: float
) -> list[list[int]]:
    """The likeliest target that was found for each text: its token ids, without the one that ends it.

    A text is done when it has `beams` finished targets, and none under way can be better than the worst of them.

    Args:
        next_token: the model; its rows are the beams of the first text, then those of the second.
        texts: how many.
        beams: targets under way for each text; 1 is greedy decoding.
        end_id: the token that ends a target.
        longest: most tokens of a target, the one that ends it included.
        power: of the length penalty, 0 or more; a higher one prefers longer targets.
    """
    finished = [_Finished(beams) for _ in range(texts)]
    done = [False] * texts
    log_probs = next_token(None, None)
    device, words = log_probs.device, log_probs.shape[1]
    under_way: list[list[int]] = [[] for _ in range(texts * beams)]
    # All beams of a text begin alike, so only its first counts.
    sums = torch.full((texts, beams), float("-inf"), dtype=torch.float64, device=device)
    sums[:, 0] = 0
    for length in range(1, longest + 1):
        totals = (sums[:, :, None] + log_probs.double().view(texts, beams, words)).flatten(1)
        best, places = totals.topk(2 * beams, dim=1)  # at most `beams` of them are ends
        rows = places // words + torch.arange(texts, device=device)[:, None] * beams
        going: list[tuple[float, int, int]] = []  # the sum, the row it goes on from, the token
        for text, candidates in enumerate(_rows_of(best, rows, places % words)):
            ends, goes_on = _apart(candidates, beams, end_id, last=length == longest)
            for total, row, token in ends:
                target = under_way[row] + [token] * (token != end_id)
                finished[text].add(total / length_penalty(length, power), target)
            # Sums only fall, and the penalty of a longer target divides by more.
            bound = goes_on[0][0] / length_penalty(longest, power)
            done[text] = finished[text].all_better_than(bound)
            going += goes_on
        if length == longest or all(done):
            break
        sums = torch.tensor([total for total, _, _ in going], dtype=torch.float64, device=device).view(texts, beams)
        origins, last = (torch.tensor([each[i] for each in going], device=device) for i in (1, 2))
        under_way = [[*under_way[row], token] for _, row, token in going]
        log_probs = next_token(last, origins)
    return [each.targets[0][1] for each in finished]


def _rows_of(*tensors: Tensor) -> Iterable[list[tuple[float, int, int]]]:
    """The rows of tensors of one shape, side by side as numbers."""
    return (list(zip(*columns, strict=True)) for columns in zip(*(tensor.tolist() for tensor in tensors), strict=True))


def _apart(
    candidates: list[tuple[float, int, int]], beams: int, end_id: int, *, last: bool
) -> tuple[list[tuple[float, int, int]], list[tuple[float, int, int]]]:
    """The candidates of one text that end, and the `beams` that go on, best first; after the `last` token all end.

    A candidate counts only while fewer than `beams` better ones go on.
    """
    ends: list[tuple[float, int, int]] = []
    goes_on: list[tuple[float, int, int]] = []
    for each in candidates:
        if len(goes_on) == beams:
            break
        if each[2] != end_id:
            goes_on.append(each)
        if (each[2] == end_id or last) and each[0] > float("-inf"):
            ends.append(each)
    return ends, goes_on
