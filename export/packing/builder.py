"""Builds every bundle: one set of results goes to gates, report, model card, manifest and JSON.

`make_variants` makes the graphs, `scores_on_test` scores them on the test split, and `ModelReport` does the rest. The
caller makes pages and timings, and passes the files that the bundle holds beside graphs and card.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from export.packing.model_card import HUB_METRICS, CardFacts, Figure, model_card
from export.packing.variants import Split, Variants, run_name
from export.packing.writer import pack
from export.precision.int8_search import Evaluator, Verdict, with_intervals
from export.settings import Precision
from export.validation.promises import Kept, PrecisionGuarantee, answers_of, describe_promises, with_outside
from export.validation.temperature import Confidence, Reliability, describe_confidence
from serve.bundle.manifest import ONNX_NAMES, SCHEMA_VERSION, Manifest, Variant
from serve.errors import GateMissed

Scores = dict[str, dict[str, float]]
"""Model name -> the value of its metric, and the low and high ends of the interval."""

DOCUMENTED = ("gates", "scores", "variants", "claims", "warnings")
"""The parts of the report that every `--json` document about a bundle also has."""

UNSCORED = "No scores were measured: the export was given no labelled texts."
UNCOMPARED = "Its vectors were compared with those of its fp32 graph, not with its teacher's."


@dataclass(frozen=True)
class OnTest:
    """Results of the graphs on the test split, which is read once, after the gates."""

    scores: dict[str, Verdict]
    """By the names of `Variants.parity`."""
    reliability: dict[Precision, Reliability]
    """How reliable their probabilities are, in the runtime that the manifest pins."""
    promises: dict[Precision, list[Kept]] = field(default_factory=dict)
    """What the promises of each came to there, in their order."""


def scores_on_test(variants: Variants, test: Split, threads: int) -> tuple[OnTest, dict[str, list[np.ndarray]]]:
    """The results of every variant in every runtime on `test`, and by the same names the logits of each text's rows."""
    encoded = test.encoded if variants.answer_from is None else replace(test.encoded, answer_from=variants.answer_from)
    evaluator = Evaluator(test.examples, encoded, variants.file("fp32"), variants.max_length, threads, chooses=False)
    found, said = OnTest({}, {}), {}
    for name, variant, runtime in variants.runs:
        file = variants.file(variant)
        said[name], found.scores[name] = evaluator.judge(file, runtime)
        if runtime == variants.wanted.runs_in(variant) and variant in variants.confidence:
            strange = evaluator.logits(file, runtime, test.outside) if test.outside else []
            chosen = variants.confidence[variant]
            found.reliability[variant] = chosen.on(test.encoded, said[name], strange, test.examples)
            if made := variants.promises.get(variant):
                answers = answers_of(test.examples, test.encoded, said[name], chosen.temperature)
                answers = with_outside(answers, strange, chosen.temperature)
                found.promises[variant] = [promise.on(answers) for promise in made]
    return found, said


@dataclass(frozen=True)
class ModelReport:
    """All results of a model whose graphs are made, and the documents made from them."""

    facts: CardFacts
    """Facts for the model card; scores, limits and confidence are added here."""
    metric: str
    variants: Variants
    test: OnTest | None = None
    """None until the test split has been read."""
    others: Mapping[str, Scores] = field(default_factory=dict)
    """By split: scores of models that are not in the bundle, such as the teacher. They are the first rows of each table."""
    other_sizes: Mapping[str, int] = field(default_factory=dict)
    """In bytes, by the same names."""
    other_gates: Sequence[dict[str, Any]] = ()
    claims: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @property
    def scores(self) -> dict[str, Scores]:
        """By split and model; empty without labels."""
        if not self.variants.labelled:
            return {}
        verdicts = {"validation": self.variants.validation} | ({"test": self.test.scores} if self.test else {})
        return {split: {**self.others.get(split, {}), **with_intervals(found)} for split, found in verdicts.items()}

    @property
    def gates(self) -> list[dict[str, Any]]:
        """Every gate that decides whether a bundle is written."""
        return [*self.variants.gates, *self.other_gates]

    @property
    def missed(self) -> list[str]:
        """The reasons why no bundle may be written, as text; empty when it may."""
        gates = [f"{g['name']} is {g['value']:.4f}, needed {g['needed']:g}" for g in self.gates if not g["passed"]]
        return [*self.variants.faults, *gates]

    @property
    def lower_gates(self) -> str:
        """A sentence with the flags that let the missed gates pass; empty without one."""
        missed = sorted((each for each in self.gates if not each["passed"]), key=lambda each: -each["value"])
        values = {each["flag"]: math.floor(100 * each["value"]) / 100 for each in missed}  # the least of each flag
        if not values or self.variants.faults:
            return ""
        flags = " ".join(f"{flag} {max(0, value):g}" for flag, value in values.items())
        return f" If less is enough, the same command with {flags} accepts it, and repeats no finished training."

    @property
    def confidence(self) -> dict[Precision, Confidence]:
        """Temperature and threshold of each variant in the bundle."""
        found = self.variants.confidence
        return {variant: found[variant] for variant in self.packed if variant in found}

    @property
    def promises(self) -> dict[Precision, list[PrecisionGuarantee]]:
        """The promises of each variant in the bundle."""
        return {variant: made for variant, made in self.variants.promises.items() if variant in self.packed}

    @property
    def packed(self) -> list[Precision]:
        """The variants in the bundle: fp32 is always made, but packed only on request."""
        return [variant for variant in self.variants.made if variant in self.variants.wanted.variants]

    def report(self) -> dict[str, Any]:
        """The report as JSON types. It holds no text from the data."""
        scores, variants = self.scores, self.variants
        split = "test" if self.test else "validation"
        verdicts = self.test.scores if self.test else variants.validation
        sizes = self._sizes()
        packed = {
            variant: {
                "size_bytes": variants.file(variant).stat().st_size,
                "scheme": variants.schemes[variant],
                "runtime": variants.wanted.runs_in(variant),
                # of fp32's metric
                "share": variants.validation[run_name(variant, variants.wanted.runs_in(variant))].share,
            }
            for variant in self.packed
        }
        return {
            "title": self.facts.name,
            "task": self.facts.task,
            "metric_name": f"{self.metric}, {split}",
            "summary": [
                {
                    "name": name,
                    "metric": row["value"],
                    "low": row["low"],
                    "high": row["high"],
                    "size_bytes": sizes.get(name),
                }
                for name, row in scores.get(split, {}).items()
            ],
            "claims": [*self._unscored(), *self.claims, *self._confidence_lines()],
            "gates": self.gates,
            "scores": scores,
            "variants": packed,
            "warnings": [*self.warnings, *self.missed, *variants.limits, *variants.notes],
            "agreement": {name: asdict(verdict) for name, verdict in verdicts.items()},
            "search": asdict(variants.search) if variants.search else None,
            "fusions": variants.fusions,
            "parity": {name: asdict(found) for name, found in variants.parity.items()},
            "confidence": self._confidence_metrics(),
            "promises": {variant: [asdict(promise) for promise in made] for variant, made in self.promises.items()},
        }

    def document(self, bundle: Path | None, report: Path) -> dict[str, Any]:
        """What `--json` prints; `bundle` is None when a gate was missed."""
        said = self.report()
        return {
            "bundle": str(bundle) if bundle else None,
            "report": str(report),
            "metric": self.metric,
            **{key: said[key] for key in DOCUMENTED},
        }

    def refusal(self, report: Path, advice: str = "") -> GateMissed:
        """The error for a bundle that may not be written; `report` is the file of its report."""
        message = f"No bundle was written: {'; '.join(self.missed)}. The report is {report}.{advice}"
        return GateMissed(message, document=self.document(None, report))

    def pack(self, out: Path, checkpoint: Path, extra_files: Mapping[str, bytes]) -> Path:
        """Write the bundle `out` in one step: the graphs, the folder `checkpoint`, card, manifest and `extra_files`."""
        facts, variants, confidence = self.facts, self.variants, self.confidence
        described = {}
        for variant in self.packed:
            abstain_below = confidence[variant].abstain_below if variant in confidence else None
            described[str(variant)] = Variant(
                file=ONNX_NAMES[variant],
                scheme=variants.schemes[variant],
                runtime=variants.wanted.runs_in(variant),
                cpu=list(variants.needs.get(variant, ())),
                temperature=confidence[variant].temperature if variant in confidence else 1.0,
                abstain_below=abstain_below if variants.answer_from is None else variants.answer_from,
                promises={each.name: each.min_score for each in self.promises.get(variant, [])},
                promise_confidence=next((each.stated for each in self.promises.get(variant, [])), ""),
                validation_scores=variants.scores.get(variant),
            )
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            name=facts.name,
            task=facts.task,
            labels=list(facts.labels),
            vector_width=facts.vector_width,
            normalised=facts.normalised,
            multi_label=facts.multi_label,
            relations=facts.relations,
            pairs=facts.pairs,
            single_texts=facts.single_texts,
            max_length=facts.max_length,
            default_variant=variants.served,
            variants=described,
            files={},
            inputs=list(variants.graph.inputs),
            lineage=dict(facts.lineage),
            metrics={"metric": self.metric, **self.scores, "confidence": self._confidence_metrics()},
            parity={name: asdict(found) for name, found in variants.parity.items()},
            cpu=[],
            digest="",
        )
        files = {str(variant): variants.file(variant) for variant in self.packed}
        card = {"README.md": model_card(self._card()).encode()}
        return pack(out, manifest, checkpoint, files, card | dict(extra_files))

    def _card(self) -> CardFacts:
        """The card's facts, with figures of the variants in the bundle and of the models in `others`."""
        scores, sizes = self.scores.get("test", {}), self._sizes()
        runs = {name: variant for name, variant, _ in self.variants.runs}
        served = self.variants.served
        return replace(
            self.facts,
            figures=[
                Figure(name, HUB_METRICS[self.metric], row["value"], row["low"], row["high"], sizes.get(name))
                for name, row in scores.items()
                if name not in runs or runs[name] in self.packed
            ],
            shipped=run_name(served, self.variants.wanted.runs_in(served)),
            report=True,
            limits=[*self._unscored(), *self.variants.limits],
            confidence=self._confidence_lines(),
        )

    def _unscored(self) -> list[str]:
        if self.variants.labelled:
            return []
        return [UNCOMPARED if self.facts.vector_width else UNSCORED]

    def _sizes(self) -> dict[str, int]:
        files = {name: self.variants.file(variant) for name, variant, _ in self.variants.runs}
        return {**self.other_sizes, **{name: file.stat().st_size for name, file in files.items()}}

    def _confidence_metrics(self) -> dict[str, dict[str, Any]]:
        """As JSON types: each variant's results on validation and, where known, on test."""
        test = self.test.reliability if self.test else {}
        return {
            variant: {"validation": asdict(found.validation)}
            | ({"test": asdict(test[variant])} if variant in test else {})
            for variant, found in self.confidence.items()
        }

    def _confidence_lines(self) -> list[str]:
        test = self.test or OnTest({}, {})
        return [
            *describe_confidence(self.confidence, test.reliability, self.variants.rests_on),
            *describe_promises(self.promises, test.promises),
        ]
