"""Sums over the tokens of a text that are the same bits in every batch.

A float32 sum depends on the order of its terms, and onnxruntime chooses the order by the length of the sum, padding included: the
mean of a text's tokens would differ with the texts beside it. Sums of integers below 2^24 are exact in float32, in any order. So each
value is split into two integers of a fixed scale, which are summed apart: hi = round(x 2^10) and lo = round((x - hi 2^-10) 2^22). The
sum is exact to 2^-23 a token while the mean of a feature's magnitude is below 32 over 512 tokens.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

HI, LO = 2.0**10, 2.0**22
TOKENS_AXIS = 1


def with_exact_sums(model: "ModelProto") -> "ModelProto":
    """A copy of `model` in which float32 sums over tokens are exact; the same graph where there are none."""
    import onnx
    from onnx import TensorProto, numpy_helper

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
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
        kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del copy.graph.node[:]
        copy.graph.node.extend(kept)
    return copy


def _exact(summed: "NodeProto") -> "list[NodeProto]":
    """The nodes that take the place of the ReduceSum `summed`."""
    from onnx import NodeProto, helper

    x, out = summed.input[0], summed.output[0]

    def total(of: str, to: str) -> NodeProto:
        node = NodeProto()
        node.CopyFrom(summed)
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
