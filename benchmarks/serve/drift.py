"""Simulate the drift alarm: false alarms on texts like those of validation, and how soon texts of another kind are noticed.

    python benchmarks/serve/drift.py BUNDLE --validation F --test F --other F [--texts 100000] [--seeds 20] [--json F]

F are labelled or plain files. The bundle answers each text once. Then `--texts` texts are drawn from the test file with replacement, and
watched by `serve.observe.drift` as in a server; and from the other file until the alarm. Prints alarms, and the texts until the first one
over `--seeds` orders. What validation's scores are is computed from `--validation`, so older bundles can be tried too.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from compress.data.texts import read_texts
from serve.model.pipeline import Pipeline
from serve.observe.drift import ALARM_DEVIATIONS, WINDOW_TEXTS, Drift, Expected, deviations
from serve.observe.metrics import Metrics


def scores_of(pipeline: Pipeline, file: Path) -> np.ndarray:
    """The confidence of the bundle's answer to each text of `file`, cut to its length."""
    texts = read_texts(file)
    rows = pipeline.encode(texts)
    found = [
        pipeline.confidence(pipeline.words(text, row), logits)
        for first in range(0, len(rows), 64)
        for text, row, logits in zip(
            texts[first : first + 64],
            rows[first : first + 64],
            pipeline.session.run(rows[first : first + 64]),
            strict=True,
        )
    ]
    return np.array([score for score in found if score is not None])


def alarms(scores: np.ndarray, expected: Expected, texts: int, seed: int) -> int:
    """How often `texts` texts, drawn from `scores` with replacement, start an alarm."""
    metrics = Metrics()
    drift = Drift("model", expected, metrics)
    for score in np.random.default_rng(seed).choice(scores, texts):
        drift.add([float(score)])
    return int(metrics.drift_alarms.labels("model").value)


def noticed_after(scores: np.ndarray, expected: Expected, seed: int, most: int = 10_000) -> int | None:
    """The texts until the first alarm; None if there is none within `most`."""
    drift = Drift("model", expected, Metrics())
    for number, score in enumerate(np.random.default_rng(seed).choice(scores, most), 1):
        drift.add([float(score)])
        if drift.alarmed:
            return number
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    for name in ("validation", "test", "other"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pipeline = Pipeline(given.bundle)
    validation, test, other = (scores_of(pipeline, file) for file in (given.validation, given.test, given.other))
    expected = Expected(len(validation), float(validation.mean()), float(validation.std()))
    false = [alarms(test, expected, given.texts, seed) for seed in range(given.seeds)]
    after = [noticed_after(other, expected, seed) for seed in range(given.seeds)]
    found = {
        "window_texts": WINDOW_TEXTS,
        "alarm_deviations": ALARM_DEVIATIONS,
        "validation": {"texts": len(validation), "mean": expected.mean, "deviation": expected.deviation},
        "test": {
            "texts": len(test),
            "mean": float(test.mean()),
            "deviations_of_a_window": deviations(test.mean(), WINDOW_TEXTS, expected),
        },
        "other": {
            "texts": len(other),
            "mean": float(other.mean()),
            "deviations_of_a_window": deviations(other.mean(), WINDOW_TEXTS, expected),
        },
        "false_alarms": false,
        "noticed_after_texts": after,
    }
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
