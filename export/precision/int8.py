"""Quantises an ONNX graph to 8 bits. With static scales an answer does not depend on the other texts of its batch.

Each product `x @ W` with a constant W becomes QuantizeLinear(x) -> DequantizeLinear -> MatMul <- W in int8 with one
scale per column: standard operators, which every runtime can run as one integer product. The scale of x comes from real
texts (`export.precision.calibration`) and is a constant of the graph; a dynamic scale would depend on the whole batch,
padding included. Outliers are moved into the weights first (`export.precision.int8_preparation`). Embedding tables become int8
with one scale per row, and only the rows looked up are converted to float32. Products of two activations (attention
scores), softmax, normalisation and the classifier stay in float32. Measurements: docs/measurements/export.md.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from export.graph.exporter import quiet, write_model
from export.graph.nodes import Wiring, copied
from export.precision.calibration import TensorRange
from export.settings import Scheme
from serve.files import replacing

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

WeightBits = Literal[7, 8]

# A CPU with any one of these adds 8-bit products in 32 bits. Other x86 CPUs first add pairs of them in 16 bits, which can
# saturate; Arm kernels do not.
NO_SATURATION = ("avx512_vnni", "avx_vnni", "amx_int8", "arm64")

# Smaller tables stay in float32: int8 would save nothing, as with the two rows of the segment table.
MIN_TABLE_ROWS = 64

# Inputs of a weight that share one scale per output in the weight-only scheme. With 128, onnxruntime 1.31 uses another
# kernel for a single row, and answers depend on the batch.
BLOCK = 32


@dataclass(frozen=True)
class Quantised:
    """What was quantised, and which CPUs the file needs."""

    scheme: Scheme
    weight_bits: int
    products: int
    """Products of 8-bit integers."""
    kept: tuple[str, ...]
    """Names of the products that were put back to float32."""
    tables: int
    size_bytes: int
    cpu: tuple[str, ...]
    """A CPU with any one of these features gives the measured answers; empty where every CPU does."""


class _Parts(NamedTuple):
    """Nodes in the order of execution, and the constants that they read."""

    nodes: "list[NodeProto]"
    constants: "list[TensorProto]"

    def extend(self, more: "_Parts") -> None:
        self.nodes.extend(more.nodes)
        self.constants.extend(more.constants)


def quantise_static(
    model: "ModelProto",
    out: Path,
    ranges: dict[str, TensorRange],
    *,
    weight_bits: WeightBits = 7,
    clipped: bool = False,
    kept: Collection[str] = (),
) -> Quantised:
    """Write the float32 graph `model` to the file `out` with int8 weights and constant activation scales.

    `ranges` are those of the products' inputs; `clipped` uses the clipped ones. `kept` names products to leave in
    float32. 8-bit weights lose a little less accuracy, but CPUs without VNNI add pairs of 8-bit products in 16 bits, which
    can saturate, so answers would depend on the CPU. 7-bit weights (2 * 255 * 63 < 2^15) give the same sums on every CPU.
    """
    wiring = Wiring(model)
    every = wiring.products()
    products = {id(product.node): product for product in every if product.name not in set(kept)}
    lookups = {id(node) for node in wiring.lookups(MIN_TABLE_ROWS)}

    parts = _Parts([], [])
    written: set[str] = set()
    for original in model.graph.node:
        if id(original) in lookups:
            parts.extend(_looked_up(original, wiring.constants[original.input[0]], written))
            continue
        product = products.get(id(original))
        if product is None:
            parts.nodes.append(original)
            continue
        if product.activation not in written:
            parts.extend(_activation(product.activation, ranges[product.activation], clipped=clipped))
        if product.weight not in written:
            parts.extend(_weight(product.weight, wiring.constants[product.weight], weight_bits))
        written |= {product.activation, product.weight}
        node: NodeProto = copied(original)
        node.input[:] = [f"{product.activation}_dequantised", f"{product.weight}_dequantised"]
        parts.nodes.append(node)
    write_model(_assembled(model, parts), out)
    return Quantised(
        scheme="static",
        weight_bits=weight_bits,
        products=len(products),
        kept=tuple(product.name for product in every if id(product.node) not in products),
        tables=len({node.input[0] for node in wiring.lookups(MIN_TABLE_ROWS)}),
        size_bytes=out.stat().st_size,
        cpu=() if weight_bits == 7 or not products else NO_SATURATION,
    )


def quantise_weight_only(model: "ModelProto", out: Path) -> Quantised:
    """Write `model` to the file `out` with 8-bit weights in blocks of `BLOCK` inputs (MatMulNBits) and int8 tables.

    The kernel rounds activations one row at a time (accuracy level 4). A row is a token, so answers do not depend on the
    batch. It needs no calibration and gives nearly float32's answers, but is no faster than float32 on most CPUs, and only
    onnxruntime reads it.
    """
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        MatMulNBitsQuantizer,
    )

    wiring = Wiring(model)
    products, lookups = wiring.products(), wiring.lookups(MIN_TABLE_ROWS)
    parts = _Parts([], [])
    written: set[str] = set()
    for node in model.graph.node:
        if any(node is lookup for lookup in lookups):
            parts.extend(_looked_up(node, wiring.constants[node.input[0]], written))
        else:
            parts.nodes.append(node)
    prepared = _assembled(model, parts)
    names = {product.node.name for product in products}
    others = [node.name for node in prepared.graph.node if node.op_type == "MatMul" and node.name not in names]
    settings = DefaultWeightOnlyQuantConfig(
        block_size=BLOCK, is_symmetric=True, accuracy_level=4, bits=8, op_types_to_quantize=("MatMul",)
    )
    quantiser = MatMulNBitsQuantizer(prepared, algo_config=settings, nodes_to_exclude=others)
    with quiet():
        quantiser.process()
    made: onnx.ModelProto = quantiser.model.model
    write_model(made, out)
    return Quantised("weight-only", 8, len(products), (), len(lookups), out.stat().st_size, ())


def quantise_dynamic(model: "ModelProto", out: Path) -> Quantised:
    """Write `model` to the file `out` with onnxruntime's dynamic quantisation, for comparison.

    The same products become int8. Each call computes the scale of each activation over the whole batch, so an answer
    depends on the other texts of its batch. Embedding tables stay in float32.
    """
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization import quantize_dynamic as ort_quantize_dynamic

    products = Wiring(model).products()
    out.parent.mkdir(parents=True, exist_ok=True)
    # quiet: onnxruntime recommends a preprocessing that the exporter has already done
    with replacing(out) as beside, quiet():
        ort_quantize_dynamic(
            model,
            beside,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=[product.node.name for product in products],
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
    return Quantised("dynamic", 8, len(products), (), 0, out.stat().st_size, NO_SATURATION)


def _activation(name: str, found: TensorRange, *, clipped: bool) -> _Parts:
    """The nodes and constants that quantise `name` to uint8 with one scale, and dequantise it."""
    from onnx import helper, numpy_helper

    # The range contains 0, so 0 has an exact code.
    low = min(found.clipped_low if clipped else found.low, 0.0)
    high = max(found.clipped_high if clipped else found.high, 0.0)
    scale = np.float32(max(high - low, 1e-6) / 255)
    zero_point = np.uint8(np.clip(round(-low / float(scale)), 0, 255))
    constants = [
        numpy_helper.from_array(np.asarray(scale), f"{name}_scale"),
        numpy_helper.from_array(np.asarray(zero_point), f"{name}_zero_point"),
    ]
    coding = [f"{name}_scale", f"{name}_zero_point"]
    nodes = [
        helper.make_node(kind, [given, *coding], [made], name=made)
        for kind, given, made in (
            ("QuantizeLinear", name, f"{name}_quantised"),
            ("DequantizeLinear", f"{name}_quantised", f"{name}_dequantised"),
        )
    ]
    return _Parts(nodes, constants)


def _weight(name: str, weight: np.ndarray, bits: int) -> _Parts:
    """The matrix `weight` (inputs, outputs) as int8 of `bits` bits, symmetric, with one scale per output."""
    from onnx import helper, numpy_helper

    largest_code = 2 ** (bits - 1) - 1
    scale = np.maximum(np.abs(weight).max(axis=0) / largest_code, 1e-12).astype(np.float32)  # (outputs,)
    codes = np.clip(np.round(weight / scale), -largest_code, largest_code).astype(np.int8)
    constants = [
        numpy_helper.from_array(codes, f"{name}_quantised"),
        numpy_helper.from_array(scale, f"{name}_scale"),
        numpy_helper.from_array(np.zeros(len(scale), dtype=np.int8), f"{name}_zero_point"),
    ]
    made = f"{name}_dequantised"
    given = [f"{name}_quantised", f"{name}_scale", f"{name}_zero_point"]
    return _Parts([helper.make_node("DequantizeLinear", given, [made], name=made, axis=1)], constants)


def _looked_up(node: "NodeProto", table: np.ndarray, written: set[str]) -> _Parts:
    """The lookup `node` on an int8 copy of `table` (rows, channels) with one scale per row."""
    from onnx import TensorProto, helper, numpy_helper

    name, indices = node.input
    (made,) = node.output
    constants = []
    if name not in written:
        written.add(name)
        scale = np.maximum(np.abs(table).max(axis=1, keepdims=True) / 127, 1e-12).astype(np.float32)  # (rows, 1)
        constants = [
            numpy_helper.from_array(np.round(table / scale).astype(np.int8), f"{name}_quantised"),
            numpy_helper.from_array(scale, f"{name}_scale"),
        ]
    codes, scales, widened = f"{made}_codes", f"{made}_scales", f"{made}_widened"
    nodes = [
        helper.make_node("Gather", [f"{name}_quantised", indices], [codes], name=codes),
        helper.make_node("Gather", [f"{name}_scale", indices], [scales], name=scales),
        # Not DequantizeLinear, whose scale must be a constant: this scale is looked up.
        helper.make_node("Cast", [codes], [widened], name=widened, to=TensorProto.FLOAT),
        helper.make_node("Mul", [widened, scales], [made], name=made),
    ]
    return _Parts(nodes, constants)


def _assembled(model: "ModelProto", parts: _Parts) -> "ModelProto":
    """A copy of `model` with the nodes and constants of `parts`, and its own constants that are still read."""
    import onnx

    read = {name for node in parts.nodes for name in node.input}
    copy = onnx.ModelProto()
    copy.ir_version = model.ir_version
    copy.producer_name, copy.producer_version = model.producer_name, model.producer_version
    copy.opset_import.extend(model.opset_import)
    copy.functions.extend(model.functions)
    copy.graph.name = model.graph.name
    copy.graph.input.extend(model.graph.input)
    copy.graph.output.extend(model.graph.output)
    copy.graph.node.extend(parts.nodes)
    copy.graph.initializer.extend(constant for constant in model.graph.initializer if constant.name in read)
    copy.graph.initializer.extend(parts.constants)
    return copy
