"""What is done to a float32 graph before it is quantised: sums are made exact, and outliers are moved into the weights.

Sums over the tokens of a text become the same bits in every batch. A float32 sum depends on the order of its terms, and onnxruntime
chooses the order by the length of the sum, padding included: the mean of a text's tokens would differ with the texts beside it. Sums of
integers below 2^24 are exact in float32, in any order. So each value is split into two integers of a fixed scale, which are summed apart:
hi = round(x 2^10) and lo = round((x - hi 2^-10) 2^22). The sum is exact to 2^-23 a token while the mean of a feature's magnitude is below
32 over 512 tokens.

Outliers move from activations to weights, in float32: the same function, which loses less when quantised. Every product `x @ W` that
will be quantised becomes `(x / f) @ (f * W)` with one factor per input channel: f_j = max|x_j|^a / max|W_j|^(1-a), equation 4 of Xiao
et al. 2022, "SmoothQuant" (arXiv 2211.10438). Where x is the output of attention, the division costs nothing: each channel of x mixes one
channel of the value projection, so the projection's columns and bias are divided instead. After a residual or a GELU the division is one
multiplication.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from export.graph.nodes import Product, Wiring, copied
from export.precision.calibration import ChannelRange, TensorRange, channel_ranges, tensor_ranges

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto
    from tokenizers import Encoding

HI, LO = 2.0**10, 2.0**22
TOKENS_AXIS = 1
SMOOTHING = 0.8


@dataclass(frozen=True)
class Prepared:
    """A float32 graph whose outliers were moved into its weights, and the ranges of its products' inputs."""

    model: "ModelProto"
    ranges: dict[str, TensorRange]
    products: tuple[str, ...]

    @classmethod
    def of(cls, fp32: Path, calibration: "Sequence[Encoding]", threads: int | None = None) -> "Prepared":
        """Prepare the graph in the file `fp32` with encoded texts of the training split. BadInput when they have no tokens."""
        import onnx

        model = with_exact_sums(onnx.load(fp32))
        channels = channel_ranges(model, [p.activation for p in Wiring(model).products()], calibration, threads)
        easier = smoothed(model, channels)
        products = Wiring(easier).products()
        ranges = tensor_ranges(easier, [product.activation for product in products], calibration, threads)
        return cls(easier, ranges, tuple(product.name for product in products))


def with_exact_sums(model: "ModelProto") -> "ModelProto":
    """A copy of `model` in which float32 sums over tokens are exact; the same graph where there are none."""
    import onnx
    from onnx import TensorProto, numpy_helper

    copy: ModelProto = copied(model)
    described = onnx.shape_inference.infer_shapes(copy).graph
    kinds = {value.name: value.type.tensor_type for value in (*described.value_info, *described.input)}
    constants = {constant.name: constant for constant in copy.graph.initializer}

    def over_tokens(node: "NodeProto") -> bool:
        kind = kinds.get(node.input[0])
        axes = constants.get(node.input[1]) if len(node.input) > 1 else None
        return (
            node.op_type == "ReduceSum"
            and kind is not None
            and kind.elem_type == TensorProto.FLOAT
            and axes is not None
            and numpy_helper.to_array(axes).tolist() == [TOKENS_AXIS]
        )

    nodes: list[NodeProto] = []
    for node in copy.graph.node:
        nodes += _exact(node) if over_tokens(node) else [node]
    if len(nodes) > len(copy.graph.node):
        scales = {"exact_hi": HI, "exact_lo": LO, "exact_of_hi": 1 / HI, "exact_of_lo": 1 / LO}
        copy.graph.initializer.extend(
            numpy_helper.from_array(np.array(value, dtype=np.float32), name) for name, value in scales.items()
        )
        kept = [copied(node) for node in nodes]
        del copy.graph.node[:]
        copy.graph.node.extend(kept)
    return copy


def _exact(summed: "NodeProto") -> "list[NodeProto]":
    """The nodes that take the place of the ReduceSum `summed`."""
    from onnx import NodeProto, helper

    x, out = summed.input[0], summed.output[0]

    def total(of: str, to: str) -> NodeProto:
        node: NodeProto = copied(summed)
        node.name, node.input[0], node.output[0] = f"{out}_{to}_node", of, f"{out}_{to}"
        return node

    def make(kind: str, inputs: list[str], to: str) -> NodeProto:
        return helper.make_node(kind, inputs, [to], name=f"{to}_node")

    return [
        make("Mul", [x, "exact_hi"], f"{out}_raised"),
        make("Round", [f"{out}_raised"], f"{out}_hi"),
        make("Mul", [f"{out}_hi", "exact_of_hi"], f"{out}_coarse"),
        make("Sub", [x, f"{out}_coarse"], f"{out}_rest"),
        make("Mul", [f"{out}_rest", "exact_lo"], f"{out}_rest_raised"),
        make("Round", [f"{out}_rest_raised"], f"{out}_lo"),
        total(f"{out}_hi", "sum_hi"),
        total(f"{out}_lo", "sum_lo"),
        make("Mul", [f"{out}_sum_hi", "exact_of_hi"], f"{out}_part_hi"),
        make("Mul", [f"{out}_sum_lo", "exact_of_lo"], f"{out}_part_lo"),
        make("Add", [f"{out}_part_hi", f"{out}_part_lo"], out),
    ]


def smoothed(model: "ModelProto", ranges: dict[str, ChannelRange], exponent: float = SMOOTHING) -> "ModelProto":
    """A copy of `model` with the factors for `exponent` a in [0, 1] applied; `ranges` are those of its products' inputs.

    Products of the copy read other values where a multiplication was added, so make a new `Wiring` for it.
    """
    from onnx import helper, numpy_helper

    copy: ModelProto = copied(model)
    wiring = Wiring(copy)
    products = wiring.products()
    factors = smoothing_factors(products, ranges, wiring.constants, exponent)
    changed: dict[str, np.ndarray] = {}  # constant -> its new value
    multiplications: dict[str, NodeProto] = {}  # by the value that each reads
    for activation, factor in factors.items():
        if np.all(factor == 1):
            continue
        users = [product for product in products if product.activation == activation]
        for weight in {product.weight for product in users}:
            changed[weight] = changed.get(weight, wiring.constants[weight]) * factor[:, None]
        values = _value_projection(wiring, activation, len(factor))
        if values and len(wiring.read_by[activation]) == len(users):
            weight, bias = values
            changed[weight] = changed.get(weight, wiring.constants[weight]) / factor
            changed[bias] = changed.get(bias, wiring.constants[bias]) / factor
            continue
        made = f"{activation}_smoothed"
        copy.graph.initializer.append(numpy_helper.from_array(1 / factor, f"{activation}_factors"))
        multiplications[activation] = helper.make_node("Mul", [activation, f"{activation}_factors"], [made], name=made)
        for product in users:
            product.node.input[0] = made
    for name, value in changed.items():
        wiring.initializers[name].CopyFrom(numpy_helper.from_array(value.astype(np.float32), name))
    nodes = []
    for node in copy.graph.node:  # a multiplication comes right after the node that makes its input
        nodes.append(node)
        nodes += [multiplications[name] for name in node.output if name in multiplications]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def smoothing_factors(
    products: Sequence[Product],
    ranges: dict[str, ChannelRange],
    constants: dict[str, np.ndarray],
    exponent: float,
) -> dict[str, np.ndarray]:
    """The factors of each activation that `products` read, float32 (channels,), with geometric mean 1.

    A weight that several products share (ALBERT's layers) can take only one set of factors: its activations get factors 1.
    """
    uses = Counter(product.weight for product in products)
    factors: dict[str, np.ndarray] = {}
    for name, (low, high) in ranges.items():
        weights = [product.weight for product in products if product.activation == name]
        largest = np.maximum(np.abs(low), np.abs(high))
        if any(uses[weight] > 1 for weight in weights):
            factors[name] = np.ones_like(largest)
            continue
        # A channel that is near 0 in calibration may be larger later: a lower bound keeps its factor from leaving it no range.
        activation = np.maximum(largest, max(float(largest.max()) / 100, 1e-6))
        weight = np.maximum(np.max([np.abs(constants[name]).max(axis=1) for name in weights], axis=0), 1e-6)
        logarithm = exponent * np.log(activation) - (1 - exponent) * np.log(weight)
        factors[name] = np.exp(logarithm - logarithm.mean()).astype(np.float32)
    return factors


def _value_projection(wiring: Wiring, context: str, channels: int) -> tuple[str, str] | None:
    """Weight and bias of the value projection of an attention whose output is `context`; None for any other value.

    Backwards from `context`: heads joined (Reshape, Transpose), probabilities times values (MatMul), heads split
    (Transpose, Reshape), bias (Add), projection (MatMul). None of these mixes channels, and no other node reads their values.
    """
    joined = wiring.made_by.get(context)
    turned = _source(wiring, joined, "Reshape")
    mixed = _source(wiring, turned, "Transpose")
    if mixed is None or mixed.op_type != "MatMul" or mixed.input[0] not in wiring.made_by:
        return None
    split = wiring.made_by.get(mixed.input[1])
    reshaped = _source(wiring, split, "Transpose")
    add = _source(wiring, reshaped, "Reshape")
    if add is None or add.op_type != "Add" or _order(turned) != [0, 2, 1, 3] or _order(split) != [0, 2, 1, 3]:
        return None
    found = [
        (node, bias[1])
        for name in add.input
        if (node := wiring.made_by.get(name)) is not None
        and node.op_type == "MatMul"
        and (bias := wiring.bias_after(node)) is not None
        and wiring.constants.get(node.input[1], np.empty(0)).ndim == 2
        and wiring.constants[node.input[1]].shape[1] == channels
        and wiring.constants[bias[1]].shape == (channels,)
        and len(wiring.read_by[node.input[1]]) == len(wiring.read_by[bias[1]]) == 1
    ]
    way = [add, reshaped, split, mixed, turned]
    if len(found) != 1 or any(node is None or wiring.only_reader(node.output[0]) is None for node in way):
        return None
    return found[0][0].input[1], found[0][1]


def _source(wiring: Wiring, node: "NodeProto | None", kind: str) -> "NodeProto | None":
    """The node that makes the first input of `node`, when `node` is of `kind`."""
    return wiring.made_by.get(node.input[0]) if node is not None and node.op_type == kind else None


def _order(transpose: "NodeProto | None") -> list[int]:
    assert transpose is not None
    return [int(axis) for attribute in transpose.attribute for axis in attribute.ints]
