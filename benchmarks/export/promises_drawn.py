"""How often promises of a precision are broken, and how many answers they give, on answers drawn from a calibrated model.

    python benchmarks/export/promises_drawn.py

Prints a table in a few seconds on one core. Where more promises are broken than chance explains, it exits with 1.
"""

import contextlib
import sys

import numpy as np

from export.validation.promises import Answers, make_promise
from serve.errors import BadInput

PROMISES, TEXTS, CONFIDENCE, MOST_BROKEN = 600, 500, 0.95, 0.065  # the last: 5 % of 600, and 1.7 standard deviations


def drawn(chance: np.random.Generator, texts: int) -> Answers:
    """Answers that are right as often as their scores say, one a text."""
    scores = chance.beta(8, 0.8, texts)
    return Answers(scores, chance.random(texts) < scores, np.arange(texts), np.ones(texts))


def main() -> int:
    """Make promises on few texts and look at them on many others."""
    chance, failed = np.random.default_rng(0), False
    others = drawn(chance, 100_000)
    print("precision  made  broken  answers given")
    for asked in (0.90, 0.93, 0.95):
        found = []
        for _ in range(PROMISES):
            with contextlib.suppress(BadInput):
                found.append(make_promise(f"precision={asked}", drawn(chance, TEXTS), CONFIDENCE).on(others))
        broken = float(np.mean([kept.reached < asked for kept in found]))
        failed |= broken > MOST_BROKEN
        print(f"{asked:9.2f} {len(found):5} {broken:7.3f} {np.mean([kept.given for kept in found]):14.3f}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
