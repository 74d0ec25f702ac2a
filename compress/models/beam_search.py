"""Beam search over any model that gives the next token's probabilities; several texts at once."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# Gives the log-probabilities (texts * beams, vocabulary) of the next token from the last ones (texts * beams,), and from the rows that
# they go on from, (texts * beams,); both are None for the first token.
NextToken = Callable[[Tensor | None, Tensor | None], Tensor]


def length_penalty(tokens: int, power: float) -> float:
    """What a sum of log-probabilities of `tokens` tokens is divided by: `((5 + tokens) / 6) ** power` (Wu et al. 2016, eq. 14)."""
    return float(((5 + tokens) / 6) ** power)


def beam_search(
    next_token: NextToken, texts: int, *, beams: int, end_id: int, longest: int, power: float
) -> list[list[int]]:
    """The likeliest target that was found for each text: its token ids, without the one that ends it.

    A text is done when no target under way can be better than its best finished one; with one beam, at the first end.

    Args:
        next_token: the model; its rows are the beams of the first text, then those of the second.
        texts: how many.
        beams: targets under way for each text; 1 takes the likeliest token each time.
        end_id: the token that ends a target.
        longest: most tokens of a target, the one that ends it included.
        power: of the length penalty, 0 or more; a higher one prefers longer targets.
    """
    best_of: list[tuple[float, list[int]]] = [
        (float("-inf"), [])
    ] * texts  # the score and the tokens of finished targets
    done = [False] * texts
    log_probs = next_token(None, None)
    device = log_probs.device
    under_way: list[list[int]] = [[] for _ in range(texts * beams)]
    # All beams of a text begin alike, so only its first counts.
    sums = torch.full((texts, beams), float("-inf"), dtype=torch.float64, device=device)
    sums[:, 0] = 0
    for length in range(1, longest + 1):
        best, rows, tokens = _best(sums, log_probs)
        going: list[tuple[float, int, int]] = []  # the sum, the row it goes on from, the token
        for text, candidates in enumerate(_rows_of(best, rows, tokens)):
            ends, goes_on = _apart(candidates, beams, end_id, last=length == longest)
            scored = [(total / length_penalty(length, power), row, token) for total, row, token in ends]
            for score, row, token in () if done[text] else scored:
                if score > best_of[text][0]:
                    best_of[text] = score, under_way[row] + [token] * (token != end_id)
            # Sums only fall, and the penalty of a longer target divides by more.
            bound = goes_on[0][0] / length_penalty(longest, power)
            done[text] = done[text] or bound <= best_of[text][0] or (beams == 1 and bool(ends))
            going += goes_on
        if length == longest or all(done):
            break
        sums = torch.tensor([total for total, _, _ in going], dtype=torch.float64, device=device).view(texts, beams)
        origins, last = (torch.tensor([each[i] for each in going], device=device) for i in (1, 2))
        under_way = [[*under_way[row], token] for _, row, token in going]
        log_probs = next_token(last, origins)
    return [target for _, target in best_of]


def _best(sums: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest sums of a text's beams and their next tokens, twice as many as beams, of which at most half are ends.

    `sums` is (texts, beams), `log_probs` (texts * beams, vocabulary). Gives the sums, the rows that they go on from, and the tokens,
    (texts, 2 * beams) each, largest first. Each row is narrowed first, because a vocabulary in float64 takes gigabytes.
    """
    texts, beams = sums.shape
    of_row, tokens = log_probs.topk(min(2 * beams, log_probs.shape[1]), dim=1)
    totals = (sums[:, :, None] + of_row.double().view(texts, beams, -1)).flatten(1)
    best, places = totals.topk(min(2 * beams, totals.shape[1]), dim=1)
    rows = places // of_row.shape[1] + torch.arange(texts, device=sums.device)[:, None] * beams
    return best, rows, tokens.view(texts, -1).gather(1, places)


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
