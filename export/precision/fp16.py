"""Converts an ONNX graph to float16, except nodes that would overflow or lose accuracy.

onnxruntime's own converter can write a graph that does not load: when some nodes stay in float32 and others belong to
onnxruntime's domain, it does not know the types between them. Here each value has the type of the node that makes it, and
a Cast is added where a node of the other type reads it.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compress.data.sampler import subset
from export.graph.exporter import write_model
from export.graph.nodes import Wiring, copied
from export.precision.calibration import tensor_ranges
from serve.errors import GateMissed
from serve.model.session import OUTPUT, Session

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto
    from tokenizers import Encoding

# Means of squares and sums of exponentials lose accuracy with an 11-bit mantissa.
KEPT_OPERATORS = frozenset({"LayerNormalization", "SkipLayerNormalization", "Softmax", "Range"})

# The largest float16 is 65,504. The factor of 8 is a margin for texts that are not in the calibration.
FLOAT16_MAX = 65_504
LARGEST = FLOAT16_MAX / 8

WATCHED = frozenset({"MatMul", "Add", "Mul", "Div", "Gelu", "LayerNormalization"})


def write_fp16(
    plain: "ModelProto",
    out: Path,
    calibration: "Sequence[Encoding]",
    *,
    joined: "ModelProto | None" = None,
    threads: int | None = None,
) -> tuple[str, ...]:
    """Write `plain` to the file `out` with float16 weights and products; inputs and logits keep their types.

    `joined`, when given, is written instead: the same model with joined kernels (`export.graph.exporter`). Types and ranges
    come from `plain`. LayerNormalization, Softmax and the classifier stay in float32. So does every node whose values on
    the `calibration` texts exceed an eighth of the largest float16; the names of these are returned. The written file is
    loaded and run on 8 of the texts. GateMissed when it does not load or its logits are not finite.
    """
    wiring = Wiring(plain)
    watched = [name for name, node in wiring.made_by.items() if node.op_type in WATCHED and name != OUTPUT]
    ranges = tensor_ranges(plain, watched, calibration, threads)
    large = {name for name, found in ranges.items() if max(-found.low, found.high) > LARGEST}
    # The attention mask's values are large on purpose; clipping them does not change the softmax.
    large -= {name for name in large if ranges[name].low < -1e30}
    model = joined or plain
    own = Wiring(model)
    new = own.made_by.keys() - wiring.made_by.keys()  # a joined kernel may have a new Reshape before and after it
    overflowing: set[str] = set()
    for node in reversed(model.graph.node):
        # A node must not read a large value as float16 either.
        touched = set(node.output) | set(node.input) | _within(wiring, own, node)
        if large & touched or new & overflowing & set(node.output):
            overflowing |= {node.output[0]} | new & set(node.input)
    exact = _not_of_the_text(plain)
    last = {value.name for value in plain.graph.output}  # and the logits before their bias is added
    for name in own.made_by:
        reader = own.only_reader(name)
        if reader is not None and reader.op_type == "Add" and OUTPUT in reader.output:
            last.add(name)
    kept = overflowing | {
        node.output[0] for node in model.graph.node if node.op_type in KEPT_OPERATORS or node.output[0] in exact | last
    }
    write_model(_halved(model, plain, kept), out)
    try:
        Session(out, threads).run(subset(calibration, 8))
    except Exception as error:  # whatever fails here would fail for a user too
        out.unlink(missing_ok=True)
        raise GateMissed(f"the fp16 graph does not run: {error}; leave fp16 out of --variants") from error
    return tuple(sorted(overflowing))


def _within(plain: Wiring, joined: Wiring, kernel: "NodeProto") -> set[str]:
    """The plain graph's values inside `kernel`: those that `kernel` depends on and no node of the joined graph makes."""
    inside: set[str] = set()
    frontier = [kernel.output[0]]
    while frontier:
        node = plain.made_by.get(frontier.pop())
        fresh = [name for name in node.input if name not in joined.made_by and name not in inside] if node else []
        inside.update(fresh)
        frontier += fresh
    return inside


def _not_of_the_text(plain: "ModelProto") -> set[str]:
    """Values that depend on no embedding: positions, angles and distances of tokens, which float16 would round.

    The outputs of Where (masks) are left out: their -3.4e38 must be clipped, and a Cast would make it an infinity.
    """
    wiring = Wiring(plain)
    text: set[str] = set()
    for node in plain.graph.node:
        looked_up = node.op_type == "Gather" and node.input[0] in wiring.constants
        if looked_up or text & set(node.input):
            text.update(node.output)
    return {
        name
        for node in plain.graph.node
        for name in node.output
        if name not in text and node.op_type != "Where" and name != OUTPUT
    }


def _halved(model: "ModelProto", plain: "ModelProto", kept: Collection[str]) -> "ModelProto":
    """A copy of `model` in float16; `plain` has the types of its values, `kept` the first outputs of nodes that stay in float32."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    inferred = onnx.shape_inference.infer_shapes(plain).graph
    floats = {
        value.name
        for value in (*inferred.value_info, *inferred.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    copy: ModelProto = copied(model)
    constants = {c.name: c for c in copy.graph.initializer if c.data_type == TensorProto.FLOAT}
    halves: dict[str, onnx.TensorProto] = {}
    stays = {name for node in copy.graph.node if node.output[0] in kept for name in node.output}
    nodes: list[NodeProto] = []
    cast: set[str] = set()

    def read(name: str, *, half: bool) -> str:
        """The name under which a node of float16 (`half`) or float32 reads the value or constant `name`."""
        if name in constants:
            if half and name not in halves:
                value = np.clip(numpy_helper.to_array(constants[name]), -FLOAT16_MAX, FLOAT16_MAX)
                halves[name] = numpy_helper.from_array(value.astype(np.float16), f"{name}_half")
            return f"{name}_half" if half else name
        if name not in floats or (name not in stays) == half:
            return name
        made = f"{name}_half" if half else f"{name}_float"
        if made not in cast:
            cast.add(made)
            to = TensorProto.FLOAT16 if half else TensorProto.FLOAT
            nodes.append(helper.make_node("Cast", [name], [made], name=made, to=to))
        return made

    for node in copy.graph.node:
        half = node.output[0] not in kept
        node.input[:] = [read(name, half=half) for name in node.input]
        if half and node.op_type == "Cast" and node.output[0] in floats:
            next(a for a in node.attribute if a.name == "to").i = TensorProto.FLOAT16
        nodes.append(node)
    nodes = [copied(node) for node in nodes]
    used = {name for node in nodes for name in node.input}
    wanted = [copied(c) for c in (*copy.graph.initializer, *halves.values()) if c.name in used]
    del copy.graph.node[:], copy.graph.initializer[:]
    copy.graph.node.extend(nodes)
    copy.graph.initializer.extend(wanted)
    return copy
