"""Simulate the drift alarm: false alarms on texts like those of validation, and how soon texts of another kind are noticed.

    python benchmarks/serve/drift.py BUNDLE --validation F --test F --other F [--texts 100000] [--seeds 20] [--json F]

F are labelled or plain files. The bundle answers each text once. Then `--texts` texts are drawn from the test file with replacement, and
watched by `serve.observe.metrics` as in a server, by confidence and by length; and from the other file until the alarm. Prints alarms, and
the texts until the first one over `--seeds` orders. What validation's texts are like is computed from `--validation`, so older bundles
can be tried too.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from compress.data.texts import read_texts
from serve.model.pipeline import Pipeline
from serve.observe.metrics import ALARM_DEVIATIONS, LONG_WINDOWS, WINDOW_TEXTS, Drift, Expected, Metrics
from serve.tasks.served_task import ReadText
from serve.text.inputs import TextWork


def quantities_of(pipeline: Pipeline, file: Path) -> dict[str, np.ndarray]:
    """The confidence of the bundle's answer to each text of `file`, cut to its length, and the text's tokens."""
    texts = read_texts(file)
    rows = pipeline.encode(texts)
    found = [
        pipeline.task.confidence(ReadText(TextWork(text), row, pipeline.task.words(text, row)), logits, pipeline.facts)
        for first in range(0, len(rows), 64)
        for text, row, logits in zip(
            texts[first : first + 64],
            rows[first : first + 64],
            pipeline.session.run(rows[first : first + 64]),
            strict=True,
        )
    ]
    known = [i for i, score in enumerate(found) if score is not None]
    return {
        "confidence": np.array([found[i] for i in known], dtype=float),
        "tokens": np.array([len(rows[i].ids) for i in known], dtype=float),
    }


def watchers(validation: dict[str, np.ndarray], metrics: Metrics) -> dict[str, Drift]:
    """What a server watches a model by."""
    return {
        of: Drift("model", of, Expected(len(values), float(values.mean()), float(values.std())), metrics)  # type: ignore[arg-type]
        for of, values in validation.items()
    }


def alarms(texts: dict[str, np.ndarray], validation: dict[str, np.ndarray], count: int, seed: int) -> dict[str, int]:
    """How often `count` texts, drawn with replacement, start an alarm of each quantity."""
    metrics = Metrics()
    chosen = np.random.default_rng(seed).integers(0, len(texts["tokens"]), count)
    for of, drift in watchers(validation, metrics).items():
        for value in texts[of][chosen].tolist():
            drift.add(1, value)
    return {of: int(metrics.drift_alarms.labels("model", of).value) for of in texts}


def noticed_after(
    texts: dict[str, np.ndarray], validation: dict[str, np.ndarray], seed: int, most: int = 10_000
) -> dict[str, int | None]:
    """The texts until the first alarm of each quantity; None if there is none within `most`."""
    chosen = np.random.default_rng(seed).integers(0, len(texts["tokens"]), most)
    after: dict[str, int | None] = dict.fromkeys(texts)
    for of, drift in watchers(validation, Metrics()).items():
        for number, value in enumerate(texts[of][chosen].tolist(), 1):
            drift.add(1, value)
            if drift.alarmed:
                after[of] = number
                break
    return after


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
    validation, test, other = (quantities_of(pipeline, file) for file in (given.validation, given.test, given.other))
    false = [alarms(test, validation, given.texts, seed) for seed in range(given.seeds)]
    after = [noticed_after(other, validation, seed) for seed in range(given.seeds)]
    found = {
        "window_texts": WINDOW_TEXTS, "long_windows": LONG_WINDOWS, "alarm_deviations": ALARM_DEVIATIONS,
        "means": {
            name: {of: float(values.mean()) for of, values in texts.items()}
            for name, texts in (("validation", validation), ("test", test), ("other", other))
        },
        "validation_deviation": {of: float(values.std()) for of, values in validation.items()},
        "false_alarms": {of: [each[of] for each in false] for of in test},
        "noticed_after_texts": {of: [each[of] for each in after] for of in other},
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
