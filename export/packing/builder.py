"""From a checkpoint to the graphs of a bundle, each proven: fp32, fp16 and int8, in every runtime that is installed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.data.encoded import Encoded
from compress.data.examples import Example
from export.graph.exporter import GraphInfo, export_graph, write_model
from export.graph.fusions import fused, joined, missing, operators_of, session_operators
from export.precision.calibration import with_long_texts
from export.precision.fp16 import write_fp16
from export.precision.int8 import Quantised, Scheme, quantise_dynamic, quantise_weight_only
from export.precision.int8_search import Evaluator, Prepared, Progress, Search, Verdict, find_int8
from export.validation.parity import Parity, Precision, Text, graph_parity, variant_parity
from export.validation.temperature import KEPT_RIGHT, Confidence, choose_confidence
from serve.bundle.manifest import ONNX_NAMES
from serve.bundle.runtimes import INSTALL_OPENVINO, Runtime, has_openvino
from serve.errors import BadInput, GateMissed, StillroomError

if TYPE_CHECKING:
    from onnx import ModelProto
    from tokenizers import Encoding

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")
SCHEMES: tuple[Scheme, ...] = ("static", "weight-only", "dynamic")

CALIBRATION_TEXTS = 256
PARITY_TEXTS = 200


@dataclass(frozen=True)
class VariantSettings:
    """What to make of a checkpoint, and what it must keep."""

    precisions: tuple[Precision, ...] = ("fp32", "int8")
    int8: Scheme = "static"
    fuse: bool = False
    """Whether to join kernels in the float graphs, for GPUs."""
    gate: float = 0.99
    """Least share of the fp32 metric that every other precision keeps on validation."""
    runtime: Runtime = "onnxruntime"
    """What the manifest pins for int8."""
    keep_right: float = KEPT_RIGHT
    """Share of validation's rightly answered texts that the threshold for abstaining leaves answered; 0 sets none."""

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.precisions) - set(PRECISIONS)):
            raise BadInput(f"--precision {', '.join(unknown)} is unknown; the precisions are {', '.join(PRECISIONS)}.")
        if not self.precisions:
            raise BadInput("--precision names nothing; give some of fp32, fp16, int8.")
        if self.int8 not in SCHEMES:
            raise BadInput(f"--int8 {self.int8} is unknown; the schemes are {', '.join(SCHEMES)}.")
        if not 0 <= self.gate <= 1:
            raise BadInput(f"--gate is {self.gate:g}; a share between 0 and 1 is needed.")
        if not 0 <= self.keep_right <= 1:
            raise BadInput(f"--keep-right is {self.keep_right:g}; a share between 0 and 1 is needed.")
        if self.runtime not in ("onnxruntime", "openvino"):
            raise BadInput(f"--runtime {self.runtime} is unknown; the runtimes are onnxruntime, openvino.")
        if self.runtime == "openvino" and not has_openvino():
            raise BadInput(f"--runtime openvino: OpenVINO is not installed; {INSTALL_OPENVINO}.")
        if self.runtime == "openvino" and self.int8 == "weight-only":
            raise BadInput("--int8 weight-only is read by onnxruntime alone; leave --runtime openvino out.")

    def runs_in(self, variant: Precision) -> Runtime:
        """What the manifest pins for `variant`."""
        return self.runtime if variant == "int8" else "onnxruntime"


@dataclass
class Variants:
    """The graphs of a checkpoint under one folder, by precision, and all that was found out about them."""

    folder: Path
    wanted: VariantSettings
    graph: GraphInfo
    max_length: int
    """Longest text in tokens."""
    schemes: dict[str, str] = field(default_factory=dict)
    int8: Quantised | None = None
    fp16_kept: tuple[str, ...] = ()
    fusions: dict[Precision, dict[str, int]] = field(default_factory=dict)
    """Kernels in onnxruntime's session as loaded."""
    parity: dict[str, Parity] = field(default_factory=dict)
    """By precision in onnxruntime, and by `precision openvino`."""
    validation: dict[str, Verdict] = field(default_factory=dict)
    """By the same names."""
    confidence: dict[Precision, Confidence] = field(default_factory=dict)
    """By precision, of the runtime that the manifest pins."""
    search: Search | None = None
    faults: list[str] = field(default_factory=list)
    """Why these graphs may not ship, in words; the metric apart, for which see `missed`."""
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""

    @property
    def made(self) -> tuple[Precision, ...]:
        """The precisions that were made, fp32 always among them."""
        return tuple(precision for precision in PRECISIONS if precision in self.schemes)

    def file(self, variant: Precision) -> Path:
        """The graph of `variant`."""
        return self.folder / ONNX_NAMES[variant]

    @property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """What processors the variants ask for."""
        return {"int8": self.int8.cpu} if self.int8 and self.int8.cpu else {}

    @property
    def runs(self) -> list[tuple[str, Precision, Runtime]]:
        """Name, precision and runtime of everything that was compared."""
        return [(name, found.precision, found.runtime) for name, found in self.parity.items()]

    @property
    def missed(self) -> list[str]:
        """The gates that what would be served misses, in words."""
        return [
            f"{name} keeps {verdict.share:.4f} of fp32's metric on validation, needed {self.wanted.gate:g}"
            for name, precision, runtime in self.runs
            if precision != "fp32"
            and runtime == self.wanted.runs_in(precision)
            and (verdict := self.validation[name]).share < self.wanted.gate
        ]

    @property
    def limits(self) -> list[str]:
        """Sentences for a card: what the int8 graph asks for, and what was left in float32."""
        said = []
        if self.int8 and self.int8.scheme == "dynamic":
            said.append("The int8 graph is dynamically quantised: its answer to a text depends on the batch.")
        if needs := self.needs.get("int8"):
            said.append(
                f"The int8 graph's 8-bit weights need a processor with one of {', '.join(needs)}; elsewhere its sums would "
                "saturate, and stillroom answers from fp32 where the bundle has it."
            )
        if self.int8 and self.int8.kept:
            said.append(f"For accuracy these products are left in float32: {', '.join(self.int8.kept)}.")
        if self.fp16_kept:
            said.append(f"In the fp16 graph these values are left in float32: {', '.join(self.fp16_kept)}.")
        return said

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types: what the manifest and the report say of the graphs."""
        document: dict[str, Any] = {
            "inputs": list(self.graph.inputs),
            "schemes": dict(self.schemes),
            "needs": {variant: list(features) for variant, features in self.needs.items()},
            "runtimes": {variant: self.wanted.runs_in(variant) for variant in self.made},
            "int8": asdict(self.int8) if self.int8 else None,
            "fp16_kept": list(self.fp16_kept),
            "fusions": dict(self.fusions),
            "parity": {name: found.as_dict() for name, found in self.parity.items()},
            "validation": {name: asdict(found) for name, found in self.validation.items()},
            "confidence": {precision: asdict(found) for precision, found in self.confidence.items()},
            "search": self.search.as_dict() if self.search else None,
            "faults": list(self.faults),
            "limits": self.limits,
            "notes": list(self.notes),
        }
        plain: dict[str, Any] = json.loads(json.dumps(document))  # tuples become lists, as they will on disk
        return plain


def make_variants(
    folder: Path,
    checkpoint: Path,
    wanted: VariantSettings,
    calibration: "Sequence[Encoding]",
    examples: Sequence[Example],
    encoded: Encoded,
    max_length: int,
    *,
    outside: Encoded | None = None,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Variants:
    """Write the graphs of `checkpoint` that are `wanted` under `folder`, and find out what they are worth.

    `calibration` are texts of the training split, of which a few hundred are used; `examples` and `encoded` are the
    validation split, and `outside` its texts that are out of scope, if it has such. fp32 is always made: it is what the
    others are held against. What forbids to ship is collected in `faults`, and a fp16 graph that does not run is not among
    what was made. BadInput when the checkpoint cannot be exported, it has no kernels to join, or fp32 has no metric of
    which the others could keep a share.
    """
    import onnx

    plain = folder / "plain.onnx"
    found = Variants(folder, wanted, export_graph(checkpoint, plain, max_length), max_length)
    model = onnx.load(plain)
    graph, promised = joined(model, found.graph.shapes) if wanted.fuse else (model, {})
    write_model(graph, found.file("fp32"))
    found.schemes["fp32"] = "fp32"
    promised |= {
        "gelu": found.graph.operators.get("Gelu", 0),
        "layer-norm": found.graph.operators.get("LayerNormalization", 0),
    }
    step = max(1, len(calibration) // CALIBRATION_TEXTS)
    chosen = with_long_texts(calibration[::step][:CALIBRATION_TEXTS], max_length)
    evaluator = Evaluator(examples, encoded, plain, max_length, threads)
    refuse_nothing_to_keep(evaluator, wanted)
    if "fp16" in wanted.precisions:
        progress("fp16: converting, loading, running")
        try:
            found.fp16_kept = write_fp16(model, found.file("fp16"), chosen, joined=graph, threads=threads)
            found.schemes["fp16"] = "fp16"
        except GateMissed as missed:
            found.faults.append(missed.message)
    if "int8" in wanted.precisions:
        progress(f"int8, {wanted.int8}")
        found.int8 = _int8(found, model, plain, chosen, evaluator, threads, progress)
        found.schemes["int8"] = found.int8.scheme
    for variant in found.made:
        due = dict(promised) if variant != "int8" else _due_in_int8(found, promised)
        # Processors have no float16 kernels: a session here would show what it does instead. What is in the file counts.
        file = found.file(variant)
        counted = operators_of(onnx.load(file)) if variant == "fp16" else session_operators(file)
        found.fusions[variant] = fused(counted)
        found.faults += [f"{variant}: {fault}" for fault in missing(found.fusions[variant], due)]
    progress("parity and metric of every variant in every runtime")
    texts = [example.text_or_pair for example in examples[:PARITY_TEXTS]]
    _compare(found, checkpoint, plain, texts, evaluator, outside, threads)
    plain.unlink()
    return found


def run_name(variant: Precision, runtime: Runtime) -> str:
    """What `variant` in `runtime` is called in reports: onnxruntime goes without saying."""
    return variant if runtime == "onnxruntime" else f"{variant} {runtime}"


def refuse_nothing_to_keep(evaluator: Evaluator, wanted: VariantSettings) -> None:
    """Nothing, when fp32 has a metric on validation or nothing is held against it. BadInput when what is has none to keep."""
    gated = [precision for precision in wanted.precisions if precision != "fp32"]
    if gated and wanted.gate and not evaluator.fp32.value:
        raise BadInput(
            f"The checkpoint scores 0 on validation in fp32: of {len(evaluator.gold)} texts it finds nothing that their labels say, so "
            f"there is no metric of which {' and '.join(gated)} could keep {wanted.gate:g}. It was not trained for these labels, or too "
            "little. Train it longer or give data of its own task; --precision fp32 or --gate 0 exports it as it is."
        )


def _int8(
    found: Variants,
    model: "ModelProto",
    plain: Path,
    calibration: "Sequence[Encoding]",
    evaluator: Evaluator,
    threads: int | None,
    progress: Progress,
) -> Quantised:
    file, wanted = found.file("int8"), found.wanted
    if wanted.int8 == "dynamic":
        return quantise_dynamic(model, file)
    if wanted.int8 == "weight-only":
        return quantise_weight_only(model, file)
    prepared = Prepared.of(plain, calibration, threads)
    quantised, found.search = find_int8(prepared, evaluator, file, wanted.gate, progress, runtime=wanted.runtime)
    return quantised


def _due_in_int8(found: Variants, promised: dict[str, int]) -> dict[str, int]:
    """int8 is never joined (its operators are the standard ones), and its products must really run on integers."""
    assert found.int8 is not None
    kept = {name: count for name, count in promised.items() if name in ("gelu", "layer-norm")}
    return kept | {"integer products": found.int8.products}


def _compare(
    found: Variants,
    checkpoint: Path,
    plain: Path,
    texts: Sequence[Text],
    evaluator: Evaluator,
    outside: Encoded | None,
    threads: int | None,
) -> None:
    max_length = found.max_length
    for variant in found.made:
        runtimes: list[Runtime] = ["onnxruntime"]
        # MatMulNBits with 8 bits is an operator of onnxruntime's own.
        if has_openvino() and not (variant == "int8" and found.wanted.int8 == "weight-only"):
            runtimes.append("openvino")
        for runtime in runtimes:
            name = run_name(variant, runtime)
            file, pinned = found.file(variant), runtime == found.wanted.runs_in(variant)
            how: dict[str, Any] = {"runtime": runtime, "threads": threads}
            try:
                parity = (
                    graph_parity(checkpoint, file, texts, max_length, **how)
                    if variant == "fp32"
                    else variant_parity(variant, checkpoint, plain, file, texts, max_length, **how)
                )
                logits = evaluator.logits(file, runtime)
                verdict = evaluator.verdict_on(logits)
            except StillroomError as error:
                if pinned:
                    raise
                # Nobody asked for this runtime: what it cannot run is told, and stops nothing.
                found.notes.append(f"{name} was left out: {error.message}")
                continue
            found.parity[name], found.validation[name] = parity, verdict
            if pinned:
                found.faults += faults_of(name, parity, found.wanted)
                strange = evaluator.logits(file, runtime, outside) if outside else []
                found.confidence[variant] = choose_confidence(
                    evaluator.encoded, logits, strange, found.wanted.keep_right
                )
                if not found.confidence[variant].fitted:
                    found.notes.append(f"{name} keeps temperature 1: validation knows no better one")


def faults_of(name: str, parity: Parity, wanted: VariantSettings) -> list[str]:
    """What forbids to ship a graph, in words; nothing when it answers as its reference does, and alone as in company."""
    if parity.passed or (parity.precision == "int8" and wanted.int8 == "dynamic"):
        return []
    if parity.precision == "fp32":
        return ["the fp32 graph does not answer as torch does"]
    if parity.precision == "fp16":
        return [f"the fp16 graph moves {parity.beyond_tolerance} answers by more than its tolerance"]
    return [f"{parity.company_differences} texts are answered otherwise in company than alone by {name}"]
