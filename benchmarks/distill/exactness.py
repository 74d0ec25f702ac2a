"""Print the errors of each objective: against its formula in float64, at the teacher, under padding, and of its gradient.

    python benchmarks/distill/exactness.py

The formulas are those of the tests: loops written from the papers. Where the loss is a divergence, the error is relative to the
cross-entropy, which the papers use; otherwise to the loss. The table has the worst of 200 random draws.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [
    str(Path(__file__).parents[2]),
    str(Path(__file__).parents[2] / "tests" / "compress"),
    str(Path(__file__).parents[2] / "tests" / "compress" / "methods"),
]
import test_objectives as formulas  # noqa: E402 - the tests are no package

DRAWS = 200


def entropy(rows: np.ndarray) -> float:
    """Mean entropy of the rows of a distribution."""
    return float(-(rows * np.log(rows)).sum(axis=-1).mean())


def scale(name: str, teacher: np.ndarray, loss: float) -> float:
    """The scale of an error: the loss; for a divergence the cross-entropy, which is the loss plus the teacher's entropy."""
    if name.startswith("attention kl"):
        return loss + entropy(formulas.softmax(teacher))
    if name.startswith("relation kl"):
        scores = teacher @ teacher.swapaxes(-1, -2) / np.sqrt(teacher.shape[-1])
        return loss + entropy(formulas.softmax(scores))
    return max(loss, 1e-12)


def against(
    loss: Callable[..., torch.Tensor], teacher: torch.Tensor, mask: torch.Tensor, student: torch.Tensor
) -> torch.Tensor:
    """The loss with the student as last argument, for the gradient check."""
    return loss(teacher, student, mask)


def main() -> None:
    print("| objective | worst relative error | at the teacher | change under padding | gradient check |")
    print("|---|---:|---:|---:|---|")
    for name, (loss, formula, _) in formulas.LOSSES.items():
        worst = at_teacher = moved = 0.0
        for seed in range(DRAWS):
            tokens = 2 + seed % 11
            teacher, student, mask = formulas.drawn(name, seed, tokens)
            lengths = mask.sum(dim=1).tolist()
            parts = [
                (formulas.real(name, t, n), formulas.real(name, s, n))
                for t, s, n in zip(teacher, student, lengths, strict=True)
            ]
            expected = float(np.mean([formula(t, s) for t, s in parts]))
            relative_to = float(np.mean([scale(name, t, formula(t, s)) for t, s in parts]))
            value = loss(teacher, student, mask).item()
            worst = max(worst, abs(value - expected) / max(relative_to, 1e-12))
            at_teacher = max(at_teacher, abs(loss(teacher, teacher.clone(), mask).item()))
            wider = [formulas.wider(name, x, 5, 50.0) for x in (teacher, student)]
            longer = torch.cat([mask, torch.zeros(3, 5, dtype=torch.long)], dim=1)
            moved = max(moved, abs(loss(*wider, longer).item() - value) / max(abs(value), 1e-12))
        teacher, student, mask = formulas.drawn(name, 3, 4)
        passed = torch.autograd.gradcheck(
            partial(against, loss, teacher.double(), mask), (student.double().requires_grad_(),)
        )
        print(f"| {name} | {worst:.1e} | {at_teacher:.1e} | {moved:.1e} | {'pass' if passed else 'FAIL'} |")


if __name__ == "__main__":
    main()
