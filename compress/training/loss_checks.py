"""What a loss curve makes one doubt. A training that went nowhere still ends with a model; this is how somebody hears of it."""

from collections.abc import Sequence

FIFTH = 5
FEW = 10  # points below which a curve says nothing
# Of the first losses: what is left where a divergence fell to nothing, which no student of a smaller size does.
NOTHING_LEFT = 1e-5


def doubts(curve: Sequence[tuple[int, float]], what: str) -> list[str]:
    """What is wrong with the loss `curve` (step, loss) of `what`, in words; nothing when it fell as it should.

    Compared are the means of its first and last fifth, so that one batch does not decide.
    """
    if len(curve) < FEW:
        return []
    part = len(curve) // FIFTH
    values = [value for _, value in curve]
    first, last = sum(values[:part]) / part, sum(values[-part:]) / part
    if last <= NOTHING_LEFT * first or last == 0:
        return [
            f"{what}: the loss fell from {first:.3g} to {last:.3g}, next to nothing. Are teacher and student the same model, "
            "or is nearly all text padding?"
        ]
    if last >= first:
        return [
            f"{what}: the loss did not fall ({first:.4g} at first, {last:.4g} at last). A lower learning rate, more steps or "
            "another teacher layer may help."
        ]
    return []
