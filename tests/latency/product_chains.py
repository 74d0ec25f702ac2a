"""Graphs whose work is known: a chain of equal products of matrices."""

from pathlib import Path

import numpy as np


def product_chain(file: Path, links: int, width: int = 256) -> Path:
    """Writes a graph of `links` products of (tokens, width) with (width, width); logits are (batch, width)."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(width, width)))[0].astype(np.float32)  # keeps lengths
    table = np.random.default_rng(1).normal(size=(64, width)).astype(np.float32)
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["x0"])]
    nodes += [helper.make_node("MatMul", [f"x{i}", "rotation"], [f"x{i + 1}"]) for i in range(links)]
    nodes.append(helper.make_node("ReduceMean", [f"x{links}", "axes"], ["logits"], keepdims=0))
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", width])],
        [
            numpy_helper.from_array(rotation, "rotation"),
            numpy_helper.from_array(table, "table"),
            helper.make_tensor("axes", TensorProto.INT64, [1], [1]),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), file)
    return file
