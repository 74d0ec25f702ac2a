"""What claims and choices are worth, on drawn answers: labels against the teacher, gains of methods, intervals.

    python benchmarks/distill/claims.py

Prints a table in about a minute on one core. Where a figure is not what the methods page says, it exits with 1.
"""

import sys

import numpy as np

from compress.evaluation.metrics import ACCURACY, Pairs, gain

FOUND: list[bool] = []


def show(what: str, figure: float, *, right: bool) -> None:
    """A line of the table, and whether the figure is what it should be."""
    FOUND.append(right)
    print(f"{what:<78} {figure:8.3f}{'' if right else '  <- wrong'}", flush=True)


def labels_or_teacher() -> None:
    """A teacher right on 92 % and labels alone on 91.5 % of the same texts, of which 300 are validation: how often labels seem better."""
    chance = np.random.default_rng(0)
    by_score, shown = [], []
    for _ in range(300):
        teacher = chance.random(300) < 0.92
        labels = np.where(chance.random(300) < 0.9, teacher, chance.random(300) < 0.87)
        said = [["a" if right else "b" for right in each] for each in (labels, teacher)]
        found = ACCURACY.difference(["a"] * 300, *said)
        by_score.append(found.value > 0)
        shown.append(found.low > 0)
    show(
        "worse labels alone are the better by score (decides without unlabelled text)",
        float(np.mean(by_score)),
        right=True,
    )
    show(
        "worse labels alone are shown to be better (decides with it)",
        float(np.mean(shown)),
        right=np.mean(shown) < 0.04,
    )


def gains_of_nothing() -> None:
    """Methods worth nothing: three seeds of each on 1,000 texts, whose accuracies differ by a standard deviation of 0.6 points."""
    chance = np.random.default_rng(0)
    texts_alone, supported, narrow, whole = [], [], [], []
    for _ in range(200):
        easy = chance.random(1_000)  # the same texts are hard for all
        rows = [[ACCURACY.counts(["a"] * 1_000, np.where(easy < chance.normal(0.9, 0.006), "a", "b").tolist())
                 for _ in range(3)] for _ in range(2)]  # fmt: skip
        texts_alone.append(ACCURACY.mean_score(rows[0], less=rows[1]).low > 0)
        supported.append(gain([[Pairs(ACCURACY, *rows)]]).supported)
        contexts = np.repeat(chance.beta(4, 1, 200), 5)  # five questions each
        said = np.where(chance.random(1_000) < contexts, "a", "b").tolist()
        for found, clusters in ((narrow, None), (whole, np.repeat(np.arange(200), 5))):
            score = ACCURACY.score(["a"] * 1_000, said, clusters=clusters)
            found.append(not score.low <= 0.8 <= score.high)
    show("methods worth nothing whose gain is above 0 over texts alone", float(np.mean(texts_alone)), right=True)
    show("methods worth nothing whose gain is supported", float(np.mean(supported)), right=np.mean(supported) < 0.12)
    show("95 % intervals that miss: questions resampled one by one", float(np.mean(narrow)), right=True)
    show("95 % intervals that miss: contexts resampled whole", float(np.mean(whole)), right=np.mean(whole) < 0.1)


if __name__ == "__main__":
    labels_or_teacher()
    gains_of_nothing()
    sys.exit(not all(FOUND))
