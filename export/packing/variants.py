"""Makes and checks the graphs of a bundle from a checkpoint: fp32, fp16 and int8, in every installed runtime."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from compress.data.encoded import Encoded
from compress.data.examples import Example
from compress.data.sampler import Row, subset
from export.graph.exporter import (
    GraphInfo,
    export_graph,
    fused,
    joined,
    missing,
    operators_of,
    session_operators,
    write_model,
)
from export.precision.calibration import with_long_texts
from export.precision.fp16 import write_fp16
from export.precision.int8 import Quantised, quantise_dynamic, quantise_weight_only
from export.precision.int8_preparation import Prepared, with_exact_sums
from export.precision.int8_search import Evaluator, Judged, Progress, Search, Verdict, find_int8
from export.settings import ATOL, VARIANTS, Precision, VariantSettings
from export.validation.parity import Parity, Text, graph_parity, variant_parity
from export.validation.promises import PrecisionGuarantee, answers_of, least_answers, make_promise, with_outside
from export.validation.temperature import Confidence, choose_confidence, validation_scores
from serve.bundle.manifest import ONNX_NAMES, ValidationScores
from serve.bundle.runtimes import Runtime, has_openvino
from serve.errors import BadInput, GateMissed, StillroomError
from serve.wording import counted, one_of

if TYPE_CHECKING:
    from tokenizers import Encoding


FEW_TEXTS = 50  # with fewer, neither the ranges of int8 nor its share of fp32 say much
CALIBRATION_TEXTS = 256
PARITY_TEXTS = 200

DOCUMENT = "export.json"


def gate(name: str, value: float, needed: float, flag: str = "--gate") -> dict[str, Any]:
    """The gate `name` of `flag`, which a `value` of `needed` or more passes."""
    return {"name": name, "value": value, "needed": needed, "passed": value >= needed, "flag": flag}


@dataclass(frozen=True)
class Split:
    """The texts of a split, with their encodings."""

    examples: Sequence[Example]
    encoded: Encoded
    outside: Encoded | None = None
    """Out-of-scope texts, which are not among `examples`."""
    labelled: bool = True
    rests_on: str = "validation"
    """What these texts are, for what is chosen on them."""


@dataclass
class Variants:
    """The graphs of a checkpoint in one folder, by precision, and all results about them."""

    folder: Path
    wanted: VariantSettings
    graph: GraphInfo
    max_length: int
    """Longest text in tokens."""
    validated_on: int = 0
    """Number of validation texts."""
    labelled: bool = True
    """Whether the validation texts had labels."""
    answers: str = "labels"
    """What the model's answers are, in the plural."""
    rests_on: str = "validation"
    """The texts that temperature and thresholds were chosen on."""
    answer_from: float | None = None
    """The score from which a question is answered, chosen on validation; None for other tasks."""
    schemes: dict[str, str] = field(default_factory=dict)
    int8: Quantised | None = None
    fp16_kept: tuple[str, ...] = ()
    fusions: dict[Precision, dict[str, int]] = field(default_factory=dict)
    """Kernels in the loaded session of onnxruntime; for fp16, in the file."""
    parity: dict[str, Parity] = field(default_factory=dict)
    """By `run_name`: the precision in onnxruntime, or `<precision> openvino`."""
    validation: dict[str, Verdict] = field(default_factory=dict)
    """By the same names."""
    confidence: dict[Precision, Confidence] = field(default_factory=dict)
    """By precision, in the runtime that the manifest pins."""
    promises: dict[Precision, list[PrecisionGuarantee]] = field(default_factory=dict)
    """The same."""
    scores: dict[Precision, ValidationScores] = field(default_factory=dict)
    """How sure each is of its answers to validation, in the runtime that the manifest pins."""
    search: Search | None = None
    faults: list[str] = field(default_factory=list)
    """Why these graphs may not ship, as text, apart from the metric (see `gates`)."""
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""

    @property
    def made(self) -> tuple[Precision, ...]:
        """The variants that were made; fp32 is always one."""
        return tuple(variant for variant in VARIANTS if variant in self.schemes)

    def file(self, variant: Precision) -> Path:
        """The file of `variant`."""
        return self.folder / ONNX_NAMES[variant]

    @property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """By variant, the processor features of which it needs one."""
        return {"int8": self.int8.cpu} if self.int8 and self.int8.cpu else {}

    @property
    def runs(self) -> list[tuple[str, Precision, Runtime]]:
        """Name, precision and runtime of each comparison."""
        return [(name, found.precision, found.runtime) for name, found in self.parity.items()]

    @property
    def served(self) -> Precision:
        """The default variant: int8 unless its answers depend on the batch, then fp32, then fp16."""
        order: tuple[Precision, ...] = ("int8", "fp32", "fp16")
        if self.wanted.int8 == "dynamic":
            order = ("fp32", "fp16", "int8")
        return next(variant for variant in order if variant in self.wanted.variants)

    @property
    def gates(self) -> list[dict[str, Any]]:
        """The share of fp32's metric that each variant keeps, in the runtime that serves it."""
        of = "over fp32, validation" if self.labelled else f"has fp32's {self.answers}, {self.validated_on} texts"
        return [
            gate(f"{name} {of}", self.validation[name].share, self.wanted.gate)
            for name, variant, runtime in self.runs
            if variant != "fp32" and runtime == self.wanted.runs_in(variant)
        ]

    @property
    def limits(self) -> list[str]:
        """Sentences for the card: what the int8 graph needs, and what stays in float32."""
        said = []
        if self.int8 and self.int8.scheme == "dynamic":
            said.append("The int8 graph is dynamically quantised: its answer to a text depends on the batch.")
        if needs := self.needs.get("int8"):
            said.append(
                f"The int8 graph's 8-bit weights need a processor with {one_of(needs)}. On other processors its "
                "sums can saturate, so stillroom answers from fp32 if the bundle has it."
            )
        if self.int8 and self.int8.kept:
            said.append(f"For accuracy, these products are left in float32: {', '.join(self.int8.kept)}.")
        if self.fp16_kept:
            said.append(f"In the fp16 graph, these values are left in float32: {', '.join(self.fp16_kept)}.")
        if self.wanted.atol != ATOL:
            said.append(
                f"A logit of its fp32 graph was allowed to differ from torch's by {self.wanted.atol:g}; the default is {ATOL:g}."
            )
        return said

    def write(self) -> None:
        """Write all of this as JSON beside the graphs, for `read_variants`."""
        document = {key: value for key, value in asdict(self).items() if key != "folder"}
        (self.folder / DOCUMENT).write_text(
            json.dumps(document, allow_nan=False, default=msgspec.to_builtins), encoding="utf-8"
        )


def read_variants(folder: Path) -> Variants:
    """The variants that `Variants.write` wrote in `folder`."""
    document = json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))
    return msgspec.convert({**document, "folder": str(folder)}, Variants, dec_hook=lambda kind, value: kind(value))


def make_variants(
    folder: Path,
    checkpoint: Path,
    wanted: VariantSettings,
    calibration: "Sequence[Encoding]",
    validation: Split,
    max_length: int,
    *,
    promised_on: Split | None = None,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Variants:
    """Write the `wanted` graphs of `checkpoint` in `folder`, and compare them with fp32.

    `calibration` are texts of the training split, of which up to 256 are used. fp32 is always made, as the reference for
    the others. Promises are made on `promised_on`, or on validation. Reasons not to ship are collected in `faults`. An fp16 graph that
    does not run is not in `made`. BadInput when the checkpoint cannot be exported, it has no kernels to join, or fp32 scores 0, so the
    others have nothing to keep.
    """
    import onnx

    check_promises(wanted, promised_on or validation)
    plain = folder / "plain.onnx"
    exported = export_graph(checkpoint, plain, max_length)
    described = replace(exported, shapes=())  # needed only here, and not JSON
    found = Variants(
        folder, wanted, described, max_length, validated_on=len(validation.encoded), labelled=validation.labelled,
        answers=validation.encoded.task.gives, rests_on=validation.rests_on,
    )  # fmt: skip
    model = onnx.load(plain)
    graph, promised = joined(model, exported.shapes) if wanted.fuse else (model, {})
    write_model(graph, found.file("fp32"))
    found.schemes["fp32"] = "fp32"
    promised |= {
        "gelu": found.graph.operators.get("Gelu", 0),
        "layer-norm": found.graph.operators.get("LayerNormalization", 0),
    }
    chosen = _drawn(calibration, CALIBRATION_TEXTS)
    if not validation.encoded.task.has_contexts:  # whose texts are as long as the windows
        chosen = with_long_texts(chosen, max_length)
    evaluator = Evaluator(
        validation.examples,
        validation.encoded,
        plain
        if wanted.fuse
        else found.file("fp32"),  # by this name the evaluator recognises fp32 and does not run it twice
        max_length,
        threads,
        labelled=validation.labelled,
    )
    if validation.encoded.task.has_contexts:
        found.answer_from = evaluator.encoded.answer_from
    for warning in (*nothing_to_keep(evaluator, wanted), *few_texts(len(calibration), len(validation.encoded), wanted)):
        progress(f"warning: {warning}")
        found.notes.append(warning)
    if "fp16" in wanted.variants:
        progress("fp16: converting, loading, running")
        try:
            found.fp16_kept = write_fp16(model, found.file("fp16"), chosen, joined=graph, threads=threads)
            found.schemes["fp16"] = "fp16"
        except GateMissed as missed:
            found.faults.append(missed.message)
    judged: dict[str, Judged] = {}
    if "int8" in wanted.variants:
        progress(f"int8, {wanted.int8}")
        if wanted.int8 == "static":
            prepared = Prepared.of(plain, chosen, threads)
            found.int8, found.search, judged[run_name("int8", wanted.runtime)] = find_int8(
                prepared, evaluator, found.file("int8"), wanted.gate, progress, runtime=wanted.runtime
            )
        else:
            quantise = quantise_dynamic if wanted.int8 == "dynamic" else quantise_weight_only
            found.int8 = quantise(with_exact_sums(model), found.file("int8"))
        found.schemes["int8"] = found.int8.scheme
    for variant in found.made:
        due = dict(promised)
        if variant == "int8":  # never joined (its operators are standard ones), and its products must be of integers
            due = {name: count for name, count in promised.items() if name in ("gelu", "layer-norm")}
            assert found.int8 is not None
            due["integer products"] = found.int8.products
        # CPUs have no float16 kernels, so a session here would count others. The operators of the file are counted instead.
        file = found.file(variant)
        counted = operators_of(onnx.load(file)) if variant == "fp16" else session_operators(file)
        found.fusions[variant] = fused(counted)
        found.faults += [f"{variant}: {fault}" for fault in missing(found.fusions[variant], due)]
    progress("parity and metric of every variant in every runtime")
    _compare(found, checkpoint, plain, validation, evaluator, judged, promised_on)
    plain.unlink()
    return found


def _drawn(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` of `rows`, shuffled: neighbours are joined into long texts, and a file sorted by label would join one label."""
    drawn = subset(rows, count)
    random.Random(0).shuffle(drawn)
    return drawn


def run_name(variant: Precision, runtime: Runtime) -> str:
    """The name of `variant` in `runtime` in reports; onnxruntime is not named."""
    return variant if runtime == "onnxruntime" else f"{variant} {runtime}"


def nothing_to_keep(evaluator: Evaluator, wanted: VariantSettings) -> list[str]:
    """A warning when fp32 scores 0 on validation, else nothing. BadInput when another variant must keep a share of it."""
    if evaluator.fp32.value > 0:
        return []
    what = evaluator.task.nothing_found(counted(len(evaluator.gold), "text"))
    zero = f"The checkpoint scores {min(evaluator.fp32.value, 0):.4g} on validation in fp32: it {what}"
    gated = [variant for variant in wanted.variants if variant != "fp32"]
    if gated and wanted.gate:
        raise BadInput(
            f"{zero}. {' and '.join(gated)} cannot keep {wanted.gate:g} of 0. Train it longer or give data of its own task; "
            "--variants fp32 or --gate 0 exports it as it is."
        )
    return [f"{zero}."]


def few_texts(calibrating: int, comparing: int, wanted: VariantSettings) -> list[str]:
    """A warning where int8 is calibrated on, or compared with fp32 on, so few texts that its share of fp32 says little; else nothing."""
    if "int8" not in wanted.variants or min(calibrating, comparing) >= FEW_TEXTS:
        return []
    return [
        f"int8 rests on few texts: {counted(calibrating, 'text')} to calibrate it, and {comparing:,} to compare it with fp32. On other "
        f"texts it may lose far more than its share of fp32 here says. Give {FEW_TEXTS} or more of each."
    ]


def _compare(
    found: Variants,
    checkpoint: Path,
    plain: Path,
    validation: Split,
    evaluator: Evaluator,
    judged: dict[str, Judged],
    promised_on: Split | None,
) -> None:
    """Parity, verdict and confidence of every variant in every runtime; those in `judged` are not evaluated again."""
    texts: list[Text] = [example.text_or_pair for example in _drawn(validation.examples, PARITY_TEXTS)]
    for variant in found.made:
        runtimes: list[Runtime] = ["onnxruntime"]
        # Only onnxruntime has MatMulNBits with 8 bits.
        if has_openvino() and not (variant == "int8" and found.wanted.int8 == "weight-only"):
            runtimes.append("openvino")
        for runtime in runtimes:
            name = run_name(variant, runtime)
            file, pinned = found.file(variant), runtime == found.wanted.runs_in(variant)
            how: dict[str, Any] = {"runtime": runtime, "threads": evaluator.threads}
            try:
                parity = (
                    graph_parity(checkpoint, file, texts, found.max_length, atol=found.wanted.atol, **how)
                    if variant == "fp32"
                    else variant_parity(variant, checkpoint, plain, file, texts, found.max_length, **how)
                )
                logits, verdict = judged.get(name) or evaluator.judge(file, runtime)
            except StillroomError as error:
                if pinned:
                    raise
                # This runtime was not asked for: what it cannot run is a note, not an error.
                found.notes.append(f"{name} was left out: {error.message}")
                continue
            found.parity[name], found.validation[name] = parity, verdict
            if pinned:
                found.faults += faults_of(name, parity, found.wanted)
            has_labels = validation.encoded.task.names_labels
            if pinned and validation.labelled and has_labels:
                strange = evaluator.logits(file, runtime, validation.outside) if validation.outside else []
                found.confidence[variant] = choose_confidence(
                    evaluator.encoded, logits, strange, found.wanted.keep_right, validation.examples
                )
                if scores := validation_scores(evaluator.encoded, logits, found.confidence[variant].temperature):
                    found.scores[variant] = scores
                if not found.confidence[variant].fitted:
                    found.notes.append(f"{name} keeps temperature 1: no other from 0.05 to 20 is best on validation")
                if found.wanted.promises and variant in found.wanted.variants:
                    texts_of = promised_on or validation
                    if promised_on:
                        logits = evaluator.logits(file, runtime, promised_on.encoded)
                        strange = evaluator.logits(file, runtime, promised_on.outside) if promised_on.outside else []
                    _promise(found, variant, texts_of, logits, strange, promised_on.rests_on if promised_on else "")


def check_promises(wanted: VariantSettings, validation: Split) -> None:
    """Check that promises can be made at all.

    Raises BadInput: there are no labels, a number is answered, or any number of labels; or there are so few texts that no
    threshold could show it, even if all answers were right.
    """
    # Each answer must be right or wrong with a score of its own: one class a text, or entities.
    encoded = validation.encoded
    if wanted.promises and not (validation.labelled and encoded.task.names_labels and not encoded.multi_label):
        why = (
            "the export has no labelled texts"
            if not validation.labelled
            else "this model gives no single class or entities"
        )
        raise BadInput(
            f"--promise {wanted.promises[0]} cannot be made: {why}. Give --data with one class a text or with entities, or leave it out."
        )
    if not wanted.promises:
        return
    gold = [encoded.task.gold_of(example) for example in validation.examples]
    answers = sum(len(each) if isinstance(each, frozenset) else 1 for each in gold)
    for promise in wanted.promises:
        needed = least_answers(promise, wanted.promise_confidence)
        if answers < needed:
            raise BadInput(
                f"--promise {promise} with a confidence of {wanted.promise_confidence:g} takes {needed:,} right answers at least, and "
                f"{validation.rests_on} has {answers:,} answers to give. Ask for less, or give more labelled texts."
            )


def _promise(
    found: Variants,
    variant: Precision,
    texts: Split,
    logits: Sequence[np.ndarray],
    outside: Sequence[np.ndarray],
    apart: str,
) -> None:
    """Add the promises of `variant`, from its logits on `texts` and on those out of scope; one that cannot be kept is a fault."""
    wanted, temperature = found.wanted, found.confidence[variant].temperature
    answers = answers_of(texts.examples, texts.encoded, logits, temperature)
    answers = with_outside(answers, outside, temperature)
    made = found.promises.setdefault(variant, [])
    for promise in dict.fromkeys(wanted.promises):
        try:
            made.append(make_promise(promise, answers, wanted.promise_confidence, apart=apart))
        except BadInput as fault:
            found.faults.append(f"{variant}: {fault.message.rstrip('.')}")


def faults_of(name: str, parity: Parity, wanted: VariantSettings) -> list[str]:
    """Why a graph may not ship, as text; empty when its answers match the reference's in any batch."""
    if parity.passed or (parity.precision == "int8" and wanted.int8 == "dynamic"):
        return []
    if parity.precision == "fp32":
        return [
            f"the fp32 graph does not answer as torch does: a logit differs by up to {parity.largest:.2g}, {parity.beyond_tolerance:,} of "
            f"{parity.positions:,} answers differ by more than {parity.absolute_tolerance:g} plus {parity.relative_tolerance:g} of a "
            f"logit, and {parity.labels_changed:,} have another label (--atol of `stillroom export` sets the allowed difference)"
        ]
    if parity.precision == "fp16":
        beyond = parity.beyond_tolerance
        return [f"{name} changes {counted(beyond, 'answer')} by more than its tolerance"]
    moved = parity.company_differences
    return [f"{name} answers {counted(moved, 'text')} otherwise in a batch than alone"]
