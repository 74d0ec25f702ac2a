"""What the graphs that passed their checks reach on the test split, which is read this once."""

from collections.abc import Sequence
from typing import NamedTuple

from compress.data.encoded import Encoded
from compress.data.examples import Example
from export.packing.builder import Variants
from export.precision.int8_search import Evaluator, Verdict
from export.validation.parity import Precision
from export.validation.temperature import Reliability


class OnTest(NamedTuple):
    """What was found on test."""

    scores: dict[str, Verdict]
    """By the names of `Variants.parity`."""
    reliability: dict[Precision, Reliability]
    """Of the runtime that the manifest pins."""


def scores_on_test(
    variants: Variants, examples: Sequence[Example], encoded: Encoded, outside: Encoded | None, threads: int
) -> OnTest:
    """What every variant reaches in every runtime, and how far its probabilities hold; `outside` are texts out of scope."""
    evaluator = Evaluator(examples, encoded, variants.file("fp32"), variants.max_length, threads)
    found = OnTest({}, {})
    for name, precision, runtime in variants.runs:
        file = variants.file(precision)
        logits = evaluator.logits(file, runtime)
        found.scores[name] = evaluator.verdict_on(logits)
        if runtime == variants.wanted.runs_in(precision):
            strange = evaluator.logits(file, runtime, outside) if outside else []
            found.reliability[precision] = variants.confidence[precision].on(encoded, logits, strange)
    return found
