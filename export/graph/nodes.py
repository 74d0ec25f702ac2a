"""Which node makes and which nodes read each value of an ONNX graph, and the products that can be quantised."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serve.model.session import OUTPUT

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


class Product(NamedTuple):
    """A product `activation @ weight` with a constant weight."""

    name: str
    """The node's name: its module, such as `bert.encoder.layer.0.output.dense`."""
    node: "NodeProto"
    activation: str
    weight: str


def copied(message: Any) -> Any:
    """A copy of a model, a node or a constant: emptying a list of messages deletes those in it."""
    made = type(message)()
    made.CopyFrom(message)
    return made


class Wiring:
    """The connections of `model`'s graph, read once: make another one after changing nodes."""

    def __init__(self, model: "ModelProto") -> None:
        from onnx import TensorProto, numpy_helper

        self.made_by: dict[str, NodeProto] = {}
        self.read_by: dict[str, list[NodeProto]] = defaultdict(list)
        for node in model.graph.node:
            self.made_by.update((name, node) for name in node.output if name)  # an omitted output has an empty name
            for name in filter(None, node.input):
                self.read_by[name].append(node)
        self.initializers = {constant.name: constant for constant in model.graph.initializer}
        self.constants: dict[str, np.ndarray] = {
            name: numpy_helper.to_array(constant)
            for name, constant in self.initializers.items()
            if constant.data_type == TensorProto.FLOAT
        }
        """The float32 constants."""
        self._nodes = list(model.graph.node)

    def only_reader(self, value: str) -> "NodeProto | None":
        """The node that reads `value`; None unless there is exactly one."""
        readers = self.read_by.get(value, [])
        return readers[0] if len(readers) == 1 else None

    def bias_after(self, node: "NodeProto") -> "tuple[NodeProto, str] | None":
        """The Add of a constant vector, when it is the only reader of the node's output, and the vector's name."""
        add = self.only_reader(node.output[0])
        if add is None or add.op_type != "Add":
            return None
        vectors = [name for name in add.input if name in self.constants and self.constants[name].size > 1]
        return (add, vectors[0]) if len(vectors) == 1 else None

    def products(self) -> list[Product]:
        """The products with a constant matrix, without the classifier: it has few columns, so it stays in float32."""
        last = {OUTPUT}
        for node in reversed(self._nodes):
            if node.op_type == "Add" and node.output[0] in last:
                last.update(node.input)
        return [
            Product(node.name, node, node.input[0], node.input[1])
            for node in self._nodes
            if node.op_type == "MatMul"
            and self.constants.get(node.input[1], np.empty(0)).ndim == 2
            and node.output[0] not in last
        ]

    def lookups(self, min_rows: int) -> "list[NodeProto]":
        """The nodes that look rows up in a constant table of `min_rows` rows or more."""
        return [
            node
            for node in self._nodes
            if node.op_type == "Gather"
            and self.constants.get(node.input[0], np.empty(0)).ndim == 2
            and len(self.constants[node.input[0]]) >= min_rows
            and all(attribute.i == 0 for attribute in node.attribute)  # axis is Gather's only attribute
        ]
