"""Sums over tokens: as close as float32's own, and the same bits whatever stands beside a text."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from export.precision.int8_preparation import with_exact_sums


def masked_sum(axis: int = 1, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """sum of x (batch, tokens, 32) over `axis`."""
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "axes"], ["y"], name="sum", keepdims=0)],
        "sum",
        [helper.make_tensor_value_info("x", kind, ["batch", "tokens", 32])],
        [helper.make_tensor_value_info("y", kind, ["batch", "tokens" if axis == 2 else 32])],
        [helper.make_tensor("axes", TensorProto.INT64, [1], [axis])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(model)
    (found,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    return np.asarray(found)


def test_a_text_has_the_same_bits_alone_and_beside_longer_ones() -> None:
    chance = np.random.default_rng(0)
    plain, exact = masked_sum(), with_exact_sums(masked_sum())
    moved = {"plain": 0, "exact": 0}
    for _ in range(100):
        tokens, batch = int(chance.integers(1, 60)), int(chance.integers(1, 9))
        text = (10 * chance.standard_normal((1, tokens, 32))).astype(np.float32)
        padded = chance.standard_normal((batch, int(chance.integers(tokens, 512)), 32)).astype(np.float32)
        row = int(chance.integers(batch))
        padded[row] = 0
        padded[row, :tokens] = text
        for name, model in (("plain", plain), ("exact", exact)):
            moved[name] += run(model, text)[0].tobytes() != run(model, padded)[row].tobytes()
        np.testing.assert_allclose(
            run(exact, text)[0], text[0].astype(np.float64).sum(axis=0), atol=tokens * 2**-23 + 1e-4
        )
    assert moved["exact"] == 0
    assert moved["plain"] > 50  # else there would be nothing to mend


def test_it_is_as_near_as_float32s_own_sum() -> None:
    x = np.random.default_rng(1).standard_normal((4, 512, 32)).astype(np.float32)
    truth = x.astype(np.float64).sum(axis=1)
    errors = [np.abs(run(model, x) - truth).max() for model in (masked_sum(), with_exact_sums(masked_sum()))]
    assert errors[1] <= errors[0]


@pytest.mark.parametrize("other", [masked_sum(axis=2), masked_sum(kind=TensorProto.INT64)])
def test_other_sums_stay(other: onnx.ModelProto) -> None:
    assert with_exact_sums(other) == other
