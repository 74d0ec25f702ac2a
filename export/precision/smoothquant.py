"""Moves outliers from activations to weights, in float32: the same function, which loses less when quantised.

Every product `x @ W` that will be quantised becomes `(x / f) @ (f * W)` with one factor per input channel:
f_j = max|x_j|^a / max|W_j|^(1-a), equation 4 of Xiao et al. 2022, "SmoothQuant" (arXiv 2211.10438). Where x is the
output of attention, the division costs nothing: each channel of x mixes one channel of the value projection, so the
projection's columns and bias are divided instead. After a residual or a GELU the division is one multiplication.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from export.graph.nodes import Product, Wiring
from export.precision.calibration import ChannelRange

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

SMOOTHING = 0.8


def smoothed(model: "ModelProto", ranges: dict[str, ChannelRange], exponent: float = SMOOTHING) -> "ModelProto":
    """A copy of `model` with the factors for `exponent` a in [0, 1] applied; `ranges` are those of its products' inputs.

    Products of the copy read other values where a multiplication was added, so make a new `Wiring` for it.
    """
    import onnx
    from onnx import helper, numpy_helper

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
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
    _put_after(copy, multiplications)
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


def _put_after(model: "ModelProto", added: "dict[str, NodeProto]") -> None:
    """Put each node of `added` right after the node that makes its input."""
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        nodes += [added[name] for name in node.output if name in added]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
