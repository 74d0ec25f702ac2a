"""How often a promise made on validation holds on test, over random splits of their texts.

    python benchmarks/export/promises.py --bundle BUNDLE --data FOLDER --promise precision=0.9 --promise recall=0.9 --out promises.json

The texts of validation and test in --data are answered once by the bundle, pooled, and split --splits times at random into as many as
they were. Each promise is made on one part and looked at on the other. It holds where the other part reaches what was
asked. The other part is a sample too: a promise that is kept exactly by all texts there are is missed by half of such samples.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from compress.data.splits import read_splits
from compress.tasks import task_named
from export.precision.int8_search import session_logits
from export.validation.promises import Answers, answers_of, make_promise
from latency.measure.machine import machine_facts
from serve.errors import BadInput
from serve.model.pipeline import Pipeline


def part(answers: Answers, chosen: np.ndarray) -> Answers:
    """The answers to the texts `chosen`, by index."""
    place = np.full(len(answers.wanted), -1)
    place[chosen] = np.arange(len(chosen))
    inside = place[answers.texts] >= 0
    return Answers(answers.scores[inside], answers.right[inside], place[answers.texts[inside]], answers.wanted[chosen])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--promise", action="append", required=True)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pipeline = Pipeline(given.bundle, threads=1)
    manifest = pipeline.manifest
    task = task_named(manifest.task)
    splits = read_splits(given.data, task)
    examples = [*splits.validation, *splits.test]
    pipeline.tokenizer.enable_truncation(manifest.max_length)
    encoded = task.encode(examples, pipeline.tokenizer, manifest.labels)
    logits = session_logits(pipeline.session, encoded)
    answers = answers_of(examples, encoded, logits, manifest.variants[pipeline.variant].temperature)
    rows = []
    for promise in given.promise:
        generator = np.random.default_rng(0)
        made, held, share = 0, 0, []
        refused = ""
        for _ in range(given.splits):
            order = generator.permutation(len(examples))
            ours, theirs = (part(answers, chosen) for chosen in np.split(order, [len(splits.validation)]))
            try:
                found = make_promise(promise, ours, given.confidence)
            except BadInput as fault:
                refused = fault.message
                continue
            made += 1
            there = found.on(theirs)
            held += there.reached >= found.asked
            share.append(there.given)
        rows.append({"promise": promise, "splits": given.splits, "made": made, "held": held,
                     "given": float(np.mean(share)) if share else None, "refused": refused})  # fmt: skip
        print(rows[-1], flush=True)
    sizes = {"validation": len(splits.validation), "test": len(splits.test)}
    document = {"machine": machine_facts(), "bundle": manifest.name, "task": task, "texts": sizes,
                "confidence": given.confidence, "promises": rows}  # fmt: skip
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
