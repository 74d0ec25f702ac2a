"""Counts the operators that a session runs, and joins kernels on request.

onnxruntime rewrites a graph when it opens it, by exact patterns; a change of layout can break one without a message. So
the optimised graph is read back and its operators are counted. An expected kernel that is missing is an error.

By default only what the exporter wrote is joined (LayerNormalization, Gelu): on CPUs onnxruntime 1.31's joined kernels
are slower than the plain ones (figures in docs/measurements/export.md). `joined` is for runtimes where they are faster,
mainly GPUs. It uses onnxscript, which writes operators of the `com.microsoft` domain: onnxruntime reads all of them,
OpenVINO most.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from export.graph.exporter import shape_biases_of_gelu, strip_provenance
from export.graph.nodes import copied
from serve.errors import BadInput
from serve.wording import one_of

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

# Kernel -> the operators of a session that count as one.
KERNELS: Mapping[str, frozenset[str]] = {
    "layer-norm": frozenset({"LayerNormalization", "SkipLayerNormalization", "EmbedLayerNormalization"}),
    "gelu": frozenset({"Gelu", "BiasGelu", "FastGelu", "QuickGelu"}),
    "integer products": frozenset(
        {"MatMulIntegerToFloat", "QLinearMatMul", "QGemm", "DynamicQuantizeMatMul", "MatMulNBits"}
    ),
    "attention": frozenset({"Attention", "MultiHeadAttention", "QAttention"}),
    "skip-layer-norm": frozenset({"SkipLayerNormalization"}),
    "bias-gelu": frozenset({"BiasGelu"}),
}
JOINED = ("attention", "skip-layer-norm", "bias-gelu")


def session_operators(onnx_file: Path) -> dict[str, int]:
    """How many nodes of each kind onnxruntime runs for `onnx_file` on this processor, after its own optimisation."""
    import onnx
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # suppresses the warning that the optimised file is for this machine only
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        ort.InferenceSession(str(onnx_file), options, providers=["CPUExecutionProvider"])
        return operators_of(onnx.load(options.optimized_model_filepath))


def operators_of(model: "ModelProto") -> dict[str, int]:
    """How many nodes of each kind `model` has."""
    return dict(sorted(Counter(node.op_type for node in model.graph.node).items()))


def fused(operators: Mapping[str, int]) -> dict[str, int]:
    """The kernels of `KERNELS` among a session's operators."""
    return {name: sum(operators.get(kind, 0) for kind in kinds) for name, kinds in KERNELS.items()}


def missing(found: Mapping[str, int], promised: Mapping[str, int]) -> list[str]:
    """A sentence for each kernel with fewer operators in `found` than in `promised`."""
    return [
        f"{name}: the loaded session has {found.get(name, 0)}, expected {count}"
        for name, count in promised.items()
        if found.get(name, 0) < count
    ]


def joined(model: "ModelProto", shapes: "Iterable[ValueInfoProto]") -> tuple["ModelProto", dict[str, int]]:
    """A copy of `model` with the kernels of `JOINED` joined by onnxscript, and how many of each there are.

    `shapes` are `GraphInfo.shapes` of the exporter: the rules compare shapes, and ONNX's own inference loses the number
    of heads. Remaining values keep their names, and a joined kernel's output has the name of the last value that it
    replaces. BadInput for a model with nothing to join.
    """
    import onnx_ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    copy = copied(model)
    copy.graph.value_info.extend(shapes)
    shape_biases_of_gelu(copy, (-1,))  # the exporter writes (1, features) to prevent joining
    rewritten, _ = optimize_for_ort(onnx_ir.from_proto(copy))
    made: ModelProto = onnx_ir.to_proto(rewritten)
    # A joined kernel writes each named output to memory, such as a residual's sum: those that no node reads are removed.
    read = {name for node in made.graph.node for name in node.input} | {value.name for value in made.graph.output}
    for node in made.graph.node:
        if node.domain == "com.microsoft":
            wanted = [name if name in read else "" for name in node.output]
            while not wanted[-1]:
                wanted.pop()
            node.output[:] = wanted
    strip_provenance(made)
    del made.graph.value_info[:]
    kernels = fused(operators_of(made))
    counts = {name: kernels[name] for name in JOINED if kernels[name]}
    if not counts:
        raise BadInput(f"--fuse: the graph has no {one_of(JOINED)} to join; leave --fuse out.")
    return made, counts
