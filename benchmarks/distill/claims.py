"""What choices and claims rest on, each as a figure: texts held out, promises, shares of the loss.

    python benchmarks/distill/claims.py

Prints a table in less than a minute on one core. It makes its texts itself. Where a figure is not what the methods page says, it exits
with 1.
"""

import sys
from collections import Counter

import numpy as np

from compress.data.examples import Example
from compress.data.splits import hold_out
from compress.runs.soft_labels import fold_of

FOUND: list[tuple[str, float, bool]] = []


def show(what: str, figure: float, *, right: bool) -> None:
    """A line of the table, and whether the figure is what it should be."""
    FOUND.append((what, figure, right))
    print(f"{what:<78} {figure:8.3f}{'' if right else '  <- wrong'}", flush=True)


def texts_held_out() -> None:
    """Each of 1,000 texts stands twice, once with other capitals and points; 60 of 70 classes have 5 texts."""
    names = [f"class {i % 10}" if i < 700 else f"rare {i % 60}" for i in range(1000)]
    twice = [Example(text, label=names[i]) for i in range(1000) for text in (f"text {i}", f"Text {i}.")]
    kept, held = hold_out(list(twice), 0)
    there = {each.text.casefold().strip(".") for each in kept}
    shared = float(np.mean([each.text.casefold().strip(".") in there for each in held]))
    show("held-out texts that train has too, where each stands twice: share", shared, right=shared == 0)
    folds = fold_of(twice, 2, 0)
    parted = float((folds[::2] != folds[1::2]).mean())
    show("pairs of copies in two folds: share", parted, right=parted == 0)
    lost = 0
    for seed in range(200):
        once = [Example(f"text {i}", label=f"class {i % 3}" if i < 280 else f"rare {i % 20}") for i in range(300)]
        kept, held = hold_out(once, seed)
        often = Counter(each.label for each in held)
        lost += len({each.label for each in once} - {each.label for each in kept}) + sum(
            often[f"class {i}"] < 9 for i in range(3)
        )
    show("classes that train loses, or that lack in validation, in 200 divisions", lost, right=lost == 0)


if __name__ == "__main__":
    texts_held_out()
    sys.exit(not all(right for *_, right in FOUND))
