"""Warnings about a loss curve: a training that learned nothing still ends with a model."""

from collections.abc import Sequence

FIFTH = 5
FEW = 10  # with fewer points a curve is not checked
# Share of the first losses. No smaller student gets this close: at or below it teacher and student are one model.
NOTHING_LEFT = 1e-5


def doubts(curve: Sequence[tuple[int, float]], what: str) -> list[str]:
    """A warning if the loss `curve` (step, loss) of `what` did not fall, or fell to nearly 0; otherwise an empty list.

    The means of its first and last fifth are compared, so that one batch does not decide.
    """
    if len(curve) < FEW:
        return []
    part = len(curve) // FIFTH
    values = [value for _, value in curve]
    first, last = sum(values[:part]) / part, sum(values[-part:]) / part
    if last <= NOTHING_LEFT * first or last == 0:
        return [
            f"{what}: the loss fell from {first:.3g} to {last:.3g}, nearly 0. Check whether teacher and student are the same model, "
            "or nearly all text is padding."
        ]
    if last >= first:
        return [
            f"{what}: the loss did not fall ({first:.4g} over the first fifth, {last:.4g} over the last). A lower learning rate, "
            "more steps or another teacher layer may help."
        ]
    return []
